"""What a policy promises about any one view, asked of views whose answers must agree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from smdlib.policies import CacheView, EvictionPolicy, PolicyError, keep_indices
from smdlib.testing.guard import check_protected, score
from smdlib.testing.views import alone, by_position, golden_view, reordered

_STALE = 50.0  # what an evicted key may have left in its slot


def prompt_lengths(budget: int) -> list[int]:
    """Tokens of the three rows that every check uses: twice the budget, somewhat more than it, less than it.

    Args:
        budget: Keys to keep, at least 2.
    """
    return [2 * budget, budget + max(1, budget // 3), budget - max(1, budget // 6)]


def valid_scores(policy: EvictionPolicy, budget: int) -> str:
    """Scores are float32 ``[B, H, K]``, finite or infinite but no NaN, and enough keys may be kept."""
    lengths = prompt_lengths(budget)
    views = [golden_view(policy, rows, keys, dtype) for rows, keys, dtype in _sizes(lengths, budget)]
    for view in views:
        score(policy, view)
    return f"float32 [B, H, K] without NaN on {len(views)} views, bfloat16 keys and budgets of 1 among them"


def deterministic(policy: EvictionPolicy, budget: int) -> str:
    """The same view gets the same scores, now and after others."""
    lengths, name = prompt_lengths(budget), type(policy).__name__
    view = golden_view(policy, lengths, budget, torch.float32)
    first = score(policy, view)
    _agree(
        first,
        score(policy, view),
        view,
        f"{name}: score is not deterministic: the same view scored twice has other scores. It draws random numbers of "
        "its own, or keeps state between calls",
        exact=True,
    )
    score(policy, replace(reordered(golden_view(policy, lengths[::-1], budget, torch.float32), 0.0), layer_idx=2))
    _agree(
        first,
        score(policy, view),
        view,
        f"{name}: score is not deterministic: a view has other scores after another one was scored. It keeps state "
        "between calls, but one object serves every layer and several generations",
        exact=True,
    )
    return "the same view always has the same scores"


def slot_order(policy: EvictionPolicy, budget: int) -> str:
    """Scores belong to keys, wherever they lie and whatever lies in empty slots."""
    name = type(policy).__name__
    for seeds in (None, [11, 12, 13]):
        view = _with_generators(golden_view(policy, prompt_lengths(budget), budget, torch.float32), seeds)
        tidy = _with_generators(reordered(view, 0.0), seeds)
        stale = _with_generators(reordered(view, _STALE), seeds)
        scores = by_position(score(policy, view), view)
        clean, dirty = by_position(score(policy, tidy), tidy), by_position(score(policy, stale), stale)
        evicting = _evicts(view)
        _agree_tables(
            clean,
            dirty,
            evicting,
            f"{name}: the score of a key depends on what lies in empty slots (keys of padding, or of tokens that were "
            "evicted): leave slots out where view.present is false",
        )
        _agree_tables(
            scores,
            clean,
            evicting,
            f"{name}: the score of a key depends on the order of the slots or on the number of empty ones: read "
            "view.positions, not the index of the slot",
        )
    return "scores depend neither on the order of slots nor on empty ones"


def rows_apart(policy: EvictionPolicy, budget: int) -> str:
    """A row has the scores that it has alone, and draws from its own generator, when it evicts."""
    name = type(policy).__name__
    random = False
    for seeds in (None, [11, 12, 13]):
        batch = _with_generators(golden_view(policy, prompt_lengths(budget), budget, torch.float32), seeds)
        before = [generator.get_state() for generator in batch.generators or ()]
        table, evicting = by_position(score(policy, batch), batch), _evicts(batch)
        drew = [
            not torch.equal(generator.get_state(), state)
            for generator, state in zip(batch.generators or (), before, strict=True)
        ]
        random |= any(drew)
        for row, generator_drew in enumerate(drew):
            if generator_drew and not evicting[row]:
                raise PolicyError(
                    f"{name}: score draws from the generator of row {row}, which is within its budget and evicts "
                    "nothing. Its later choices would depend on its batch-mates: draw for rows that evict only."
                )
        for row in evicting.nonzero().flatten().tolist():
            single = _with_generators(alone(batch, row), None if seeds is None else [seeds[row]])
            own = by_position(score(policy, single), single)
            why = (
                "is not that of its row alone: it depends on other rows of the batch, or on their padding"
                if seeds is None
                else "with a generator per row is not that of its row alone: a row must draw from its own generator, "
                "view.generators[row], as many numbers as it does alone"
            )
            _agree_tables(
                own, table[row : row + 1, :, : own.shape[2]], evicting[row : row + 1], f"{name}: a score {why}", row
            )
    drawing = "; random numbers come from each row's own generator" if random else ""
    return f"every row of a batch has the scores that it has alone{drawing}"


def protection(policy: EvictionPolicy, budget: int) -> str:
    """No more keys are protected than the budget has room for."""
    view = golden_view(policy, prompt_lengths(budget), budget, torch.float32)
    most = check_protected(policy, view, score(policy, view))
    return f"at most {most} of {budget} keys protected"


def keep_set(policy: EvictionPolicy, budget: int) -> str:
    """Twelve hexadecimal digits that stand for the keys kept on golden numbers.

    Args:
        policy: The policy.
        budget: Keys to keep.
    """
    view = golden_view(policy, prompt_lengths(budget), budget, torch.float32)
    index, valid = keep_indices(score(policy, view), view.positions, view.budget, budget)
    kept = torch.where(valid, view.positions.gather(2, index), -1)
    return hashlib.sha256(repr(kept.tolist()).encode()).hexdigest()[:12]


CONTRACT: dict[str, Callable[[EvictionPolicy, int], str]] = {
    "scores": valid_scores,
    "deterministic": deterministic,
    "slots": slot_order,
    "rows": rows_apart,
    "protected": protection,
}
"""What is asked of a policy on views, by name and in order; each returns what it found, or raises `PolicyError`."""


def _sizes(lengths: list[int], budget: int) -> Iterator[tuple[list[int], int, torch.dtype]]:
    yield from ((lengths, budget, dtype) for dtype in (torch.float32, torch.bfloat16))
    yield from ((lengths, 1, torch.float32), ([2, 1], 1, torch.float32), ([1], 1, torch.float32))


def _with_generators(view: CacheView, seeds: list[int] | None) -> CacheView:
    generators = None if seeds is None else [torch.Generator().manual_seed(seed) for seed in seeds]
    return replace(view, generators=generators)


def _evicts(view: CacheView) -> Tensor:
    """Which rows have a head over its budget, bool ``[B]``."""
    return (view.present.sum(-1) > view.budget).any(-1)


def _agree(first: Tensor, second: Tensor, view: CacheView, fault: str, exact: bool = False) -> None:
    rows = torch.ones(len(first), dtype=torch.bool)
    _agree_tables(by_position(first, view), by_position(second, view), rows, fault, exact=exact)


def _agree_tables(
    first: Tensor, second: Tensor, rows: Tensor, fault: str, first_row: int = 0, exact: bool = False
) -> None:
    """Raise ``fault`` where two tables ``[B, H, T]`` differ in one of the rows, bool ``[B]``, and say where."""
    finite = first[first.isfinite()].abs()
    # Batches of other shapes add in another order; what is not float32's rounding is far larger.
    small = 0.0 if exact or not finite.numel() else 1e-4 * float(finite.median())
    same = torch.isclose(first, second, rtol=0.0 if exact else 1e-3, atol=small, equal_nan=True)
    wrong = ~same & rows[:, None, None]
    if wrong.any():
        row, head, position = wrong.nonzero()[0].tolist()
        values = f"{float(first[row, head, position]):.6g} and {float(second[row, head, position]):.6g}"
        raise PolicyError(f"{fault} (row {row + first_row}, KV head {head}, position {position}: {values}).")
