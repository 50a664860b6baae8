"""The promise on one model: sample with evicted keys, replay the record, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smdlib.cache import CompressedCache
from smdlib.masks import MaskedAttentionAdapter, ShadowMask, ShadowMaskRecorder
from smdlib.masks.installation import owner_of
from smdlib.policies import Allocation, EvictionPolicy
from smdlib.rollout.generation import evaluation_mode

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4}
BAND = 0.15  # nats; what bfloat16 rounds apart, see the README


@dataclass(frozen=True)
class Parity:
    """What `check_parity` measured.

    Attributes:
        gap: Largest ``|sampled - replayed|`` log-prob of a sampled token, in nats, replayed under the record.
        mean_gap: Mean of it.
        dense_gap: The same without the record: what a learner that sees every key would be off by.
        mean_dense_gap: Mean of it.
        tolerance: Bound on ``gap``, in nats.
        evicted: Share of the keys of prompt and response that were evicted.
        sampled_tokens: Number of tokens compared.
        kv_bytes: Keys and values that the cache held.
        shadow: The record ``[B, T, L, H]``.
    """

    gap: float
    mean_gap: float
    dense_gap: float
    mean_dense_gap: float
    tolerance: float
    evicted: float
    sampled_tokens: int
    kv_bytes: int
    shadow: ShadowMask

    @property
    def conclusive(self) -> bool:
        """Whether keys were evicted that mattered; otherwise a dense learner would have passed as well."""
        return self.evicted > 0 and self.dense_gap > self.tolerance

    @property
    def holds(self) -> bool:
        """Whether the replayed log-probs are those of the sampler (false for NaN)."""
        return self.gap <= self.tolerance


@torch.no_grad()
def check_parity(
    model: PreTrainedModel,
    policy: EvictionPolicy | str,
    budget: float | int,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    new_tokens: int = 24,
    evict_every: int | None = None,
    chunk: int | None = None,
    allocation: Allocation | None = None,
    recorder: ShadowMaskRecorder | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Parity:
    """Sample from a model with evicted keys, replay the record, and compare the log-probs.

    Samples at temperature 1 from a generator of its own, and lets no row end early. An adapter is installed for the
    time being, unless the model has one.

    Args:
        model: A causal language model, in any dtype.
        policy: Policy or its name.
        budget: As for `smdlib.cache.CompressedCache`.
        input_ids: int64 ``[B, P]``, padded on the left.
        attention_mask: ``[B, P]``, all ones by default.
        new_tokens: Tokens to sample per row.
        evict_every: As for the cache.
        chunk: Columns per prefill call; all at once by default.
        allocation: As for the cache.
        recorder: Of the evictions; a new one by default.
        tolerance: In nats; 1e-4 in float32, 0.15 in half precision, which rounds more than that.
        seed: Of sampling.
        progress: Called with what is being done, how much of it is done, and of how much.

    Returns:
        The differences. Nothing is raised if they are large: look at ``holds`` and ``conclusive``.

    Raises:
        UnsupportedModelError: if the model cannot be replayed exactly, and why.
        ValueError: for settings that the cache refuses.

    Example:
        >>> from smdlib.testing import tiny_model
        >>> prompts = torch.arange(80).reshape(2, 40)
        >>> parity = check_parity(tiny_model(), "streaming", 0.4, prompts, new_tokens=8)
        >>> parity.holds, parity.conclusive, parity.gap < 1e-4 < parity.dense_gap
        (True, True, True)
    """
    tell = progress or (lambda what, done, total: None)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    recorder = ShadowMaskRecorder() if recorder is None else recorder
    cache = CompressedCache(
        model.config,
        policy,
        budget,
        allocation=allocation,
        evict_every=evict_every,
        reserve=evict_every or new_tokens,
        recorder=recorder,
        prompt_lengths=mask.sum(1),
    )
    if tolerance is None:
        tolerance = TOLERANCES.get(model.dtype, BAND)
    with evaluation_mode(model), _adapted(model) as adapter:
        tokens, sampled = _sample(model, cache, input_ids, mask, new_tokens, chunk, seed, tell)
        mask = torch.cat([mask, mask.new_ones(len(mask), new_tokens)], 1)
        lengths = mask.sum(1)
        shadow = recorder.shadow_mask(lengths)
        gaps = []
        for done, record in enumerate((shadow, None)):
            tell("scoring with the record" if record is not None else "scoring with every key", done, 2)
            logits = adapter(tokens, mask, record, logits_to_keep=new_tokens + 1)[:, :-1].float()
            scored = logits.log_softmax(-1).gather(-1, tokens[:, -new_tokens:, None]).squeeze(-1)
            gaps.append((scored - sampled).abs())
        tell("done", 2, 2)
    gone = (shadow.evicted_at < lengths[:, None, None, None]).sum()
    keys = lengths.sum() * shadow.evicted_at.shape[-2] * shadow.evicted_at.shape[-1]
    return Parity(
        gap=float(gaps[0].max()),
        mean_gap=float(gaps[0].mean()),
        dense_gap=float(gaps[1].max()),
        mean_dense_gap=float(gaps[1].mean()),
        tolerance=tolerance,
        evicted=float(gone / keys),
        sampled_tokens=sampled.numel(),
        kv_bytes=cache.kv_bytes(),
        shadow=shadow,
    )


@contextmanager
def _adapted(model: PreTrainedModel) -> Iterator[MaskedAttentionAdapter]:
    """Lend the model an adapter, or use the one it has."""
    owner = owner_of(model)
    if isinstance(owner, MaskedAttentionAdapter) and owner.installed:
        yield owner
        return
    with MaskedAttentionAdapter(model) as adapter:
        yield adapter


def _sample(
    model: PreTrainedModel,
    cache: CompressedCache,
    ids: Tensor,
    mask: Tensor,
    new_tokens: int,
    chunk: int | None,
    seed: int,
    tell: Callable[[str, int, int], None],
) -> tuple[Tensor, Tensor]:
    """Return tokens ``[B, P + R]`` and the sampler's own log-probs ``[B, R]``."""
    generator = torch.Generator(device=ids.device).manual_seed(seed)
    width, log_probs, start = ids.shape[1], [], 0
    prompt_ends = [*range(chunk or width, width, chunk or width), width]
    for end in [*prompt_ends, *range(width + 1, width + new_tokens)]:
        if end <= width:
            tell("reading the prompt", start, width)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:end]
        logits = model(
            input_ids=ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions,
            cache=cache,
            logits_to_keep=1,  # nobody reads those of the prompt
        ).logits[:, -1]
        start = end
        if end < width:
            continue
        step = logits.float().log_softmax(-1)
        token = torch.multinomial(step.exp(), 1, generator=generator)
        log_probs.append(step.gather(-1, token))
        ids, mask = torch.cat([ids, token], 1), torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        tell("sampling", len(log_probs), new_tokens)
    return ids, torch.cat(log_probs, 1)
