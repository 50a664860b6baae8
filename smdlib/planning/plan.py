"""The result of `plan_memory`, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class PlanLine(NamedTuple):
    """One line of a plan.

    Attributes:
        when: ``"sampling"`` or ``"learning"``.
        what: What the bytes are of.
        plain: Bytes without smdlib (every key, full logits); ``None`` where there is no such thing.
        smdlib: Bytes with it.
    """

    when: str
    what: str
    plain: int | None
    smdlib: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one batch, ``prompts * group`` rows, as the library allocates them; ``print`` it.

    Model weights, gradients, optimizer and the activations of the layers come on top, with or without smdlib.

    Attributes:
        rows: B, sampled rows.
        tokens: Tokens of a row, prompt and response.
        budgets: Keys that a KV head keeps of the prompt, one number a layer (the largest of its heads).
        kv_dense: Keys and values of a transformers ``DynamicCache`` at the end of the responses.
        kv_sparse: Keys and values of the `smdlib.cache.CompressedCache`, allocated once.
        kv_padding: What the cache may hold on top, at most, where the allocation gives every head its own slots.
        slots: Positions of the slots, attention mass and query window of policies that ask for them.
        record: Tables of the `smdlib.masks.ShadowMaskRecorder` while sampling, token ids included.
        mask: ``ShadowMask.nbytes``: what a batch carries to the learner.
        logits_full: Logits ``[B, T, V]`` in the model's dtype, which a plain learner makes for every pass.
        logits_block: One block of logits of the fused head, float32; a few are alive at once.
        prompt_kv: Keys and values of the distinct prompts, which the learner computes once for all rows and passes.
        states: Hidden states that predict response tokens, ``[N, D]`` of the masked and of the dense pass.
    """

    rows: int
    tokens: int
    budgets: tuple[int, ...]
    kv_dense: int
    kv_sparse: int
    kv_padding: int
    slots: int
    record: int
    mask: int
    logits_full: int
    logits_block: int
    prompt_kv: int
    states: int

    def lines(self) -> list[PlanLine]:
        """The plan, line by line."""
        listed = [
            PlanLine("sampling", "keys and values", self.kv_dense, self.kv_sparse),
            PlanLine("sampling", "padding of unequal heads, at most", None, self.kv_padding),
            PlanLine("sampling", "positions, attention mass, queries", None, self.slots),
            PlanLine("sampling", "record of evictions", None, self.record),
            PlanLine("learning", "shadow mask", None, self.mask),
            PlanLine("learning", "logits (fused head: one block)", self.logits_full, self.logits_block),
            PlanLine("learning", "keys and values of prompts, once", None, self.prompt_kv),
            PlanLine("learning", "hidden states of responses, twice", None, self.states),
        ]
        return [line for line in listed if line.smdlib or line.plain]

    def __str__(self) -> str:
        """A table in plain text."""
        width = max(len(line.what) for line in self.lines())
        head = f"{self.rows} rows of {self.tokens} tokens, {_span(self.budgets)} keys per KV head"
        table = [
            f"  {line.when}  {line.what:<{width}}  {'-' if line.plain is None else human_bytes(line.plain):>9}  "
            f"{human_bytes(line.smdlib):>9}"
            for line in self.lines()
        ]
        return "\n".join([head, f"  {'':<{width + 10}}  {'plain':>9}  {'smdlib':>9}", *table])


def _span(budgets: tuple[int, ...]) -> str:
    low, high = min(budgets), max(budgets)
    return str(low) if low == high else f"{low} to {high}"


def human_bytes(count: int) -> str:
    """Bytes as people read them, 1 GB = 10^9 bytes.

    Args:
        count: Bytes.

    Example:
        >>> human_bytes(512), human_bytes(1_234_567), human_bytes(20_000_000_000)
        ('512 B', '1.23 MB', '20.0 GB')
    """
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
