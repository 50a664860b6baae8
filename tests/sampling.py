"""Sample with a compressed cache and score the sample, the way every parity test does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from smdlib import CompressedCache, MaskedAttentionAdapter, ShadowMask, ShadowMaskRecorder

# Sized for prompts of 9 to 26 tokens.
POLICIES: dict[str, dict[str, Any]] = {
    "streaming": {},
    "recent": {},
    "random": {"recent": 2},
    "snapkv": {"window": 4, "kernel_size": 3},
    "h2o": {},
    "tova": {},
    "knorm": {},
    "keydiff": {},
    "lagkv": {"sinks": 2, "lag": 3},
    "rkv": {"window": 4, "kernel_size": 3},
}
NO_TOKEN = 10**6  # an end token that is never drawn


@dataclass
class Sample:
    """A sampled batch: padded tokens, their mask, the record, and the sampler's own log-probs."""

    tokens: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    sampled: Tensor
    shadow: ShadowMask
    lengths: Tensor
    cache: CompressedCache

    def gap(self, log_probs: Tensor) -> float:
        """Largest absolute difference to the sampler on sampled tokens, in nats."""
        return float((log_probs - self.sampled)[self.response_mask].abs().max())


class EndRows(LogitsProcessor):
    """Makes row ``b`` emit an end token as its ``ends[b]``-th token; nothing else ends a row.

    It changes which tokens are drawn, not the logits that ``output_logits`` reports.
    """

    def __init__(self, width: int, ends: dict[int, int], eos: list[int]) -> None:
        self.width, self.ends, self.eos = width, ends, eos

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.eos] = -torch.inf
        for row, end in self.ends.items():
            if input_ids.shape[1] - self.width == end - 1:
                scores[row] = -torch.inf
                scores[row, self.eos[row % len(self.eos)]] = 0.0
        return scores


def ragged_prompts(lengths: list[int], vocab: int, seed: int = 0, low: int = 12) -> tuple[Tensor, Tensor]:
    """Random left-padded prompts: input_ids and attention_mask ``[B, max]``."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(low, vocab, (length,), generator=generator)
        mask[row, width - length :] = 1
    return ids, mask


def sample(
    model: Any,
    policy: Any,
    budget: float | int,
    *,
    prompts: tuple[Tensor, Tensor],
    new_tokens: int = 12,
    chunk: int | None = None,
    eos: list[int] | None = None,
    ends: dict[int, int] | None = None,
    seed: int = 0,
    **cache_options: Any,
) -> Sample:
    """Run ``model.generate`` (an adapter must be installed) and collect what the sampler believed.

    Rows end at a token of ``eos``: where chance has it, or, with ``ends``, row ``b`` after exactly ``ends[b]`` tokens.
    """
    ids, mask = prompts
    recorder = ShadowMaskRecorder()
    cache_options.setdefault("reserve", cache_options.get("evict_every") or new_tokens)
    cache = CompressedCache(model.config, policy, budget, recorder=recorder, **cache_options)
    torch.manual_seed(seed)
    extra: dict[str, Any] = {} if chunk is None else {"prefill_chunk_size": chunk}
    if ends is not None:
        assert eos is not None, "name the tokens that end a row"
        extra["logits_processor"] = LogitsProcessorList([EndRows(ids.shape[1], ends, eos)])
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=mask,
            cache=cache,
            max_new_tokens=new_tokens,
            do_sample=True,
            top_k=0,
            eos_token_id=eos or NO_TOKEN,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **extra,
        )
    tokens, width = out.sequences, ids.shape[1]
    steps = torch.stack(out.logits, 1).float().log_softmax(-1)  # [B, R, V]
    response = tokens[:, width:]
    sampled = torch.full(tokens.shape, torch.nan)
    sampled[:, width:] = steps.gather(-1, response[..., None]).squeeze(-1)
    ended = torch.isin(response, torch.tensor(eos or [NO_TOKEN])).int().cumsum(1)
    alive = (ended - torch.isin(response, torch.tensor(eos or [NO_TOKEN])).int()) == 0
    response_mask = torch.cat([torch.zeros_like(mask), alive.to(mask.dtype)], 1).bool()
    full = torch.cat([mask, alive.to(mask.dtype)], 1)
    lengths = full.sum(1)
    return Sample(tokens, full, response_mask, sampled, recorder.shadow_mask(lengths), lengths, cache)


def parity(model: Any, adapter: MaskedAttentionAdapter, taken: Sample) -> tuple[float, float]:
    """Gaps of the shadow-masked and of the dense log-probs to the sampler's, in nats."""
    with torch.no_grad():
        shadow = adapter.log_probs(taken.tokens, taken.attention_mask, taken.shadow)
        dense = adapter.log_probs(taken.tokens, taken.attention_mask)
    return taken.gap(shadow), taken.gap(dense)


@torch.no_grad()
def feed(model: Any, cache: CompressedCache, ids: Tensor, mask: Tensor, chunks: list[int], **kwargs: Any) -> Tensor:
    """Plain calls with explicit unpadded position ids, ``chunks`` columns each; logits ``[B, sum(chunks), V]``."""
    start = cache.get_seq_length()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = []
    for size in chunks:
        stop = start + size
        out = model(
            input_ids=ids[:, start:stop],
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            cache=cache,
            **kwargs,
        )
        logits.append(out.logits)
        start = stop
    return torch.cat(logits, 1)


def scored(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probs ``[B, T - 1]`` of ``ids[:, 1:]`` by ``logits [B, T, V]``."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def kept_positions(cache: CompressedCache, layer: int, row: int) -> list[list[int]]:
    """Positions that a layer holds of one row, sorted, for every KV head."""
    slots = cache.layers[layer].slots
    assert slots is not None
    return [sorted(head[head >= 0].tolist()) for head in slots.positions[row]]
