"""Sample with a compressed cache and score the sample, the way every parity test does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smdlib import CompressedCache, MaskedAttentionAdapter, ShadowMask, ShadowMaskRecorder


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
    seed: int = 0,
    **cache_options: Any,
) -> Sample:
    """Run ``model.generate`` (an adapter must be installed) and collect what the sampler believed."""
    ids, mask = prompts
    recorder = ShadowMaskRecorder()
    cache_options.setdefault("reserve", cache_options.get("evict_every") or new_tokens)
    cache = CompressedCache(model.config, policy, budget, recorder=recorder, **cache_options)
    torch.manual_seed(seed)
    extra = {} if chunk is None else {"prefill_chunk_size": chunk}
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=mask,
            cache=cache,
            max_new_tokens=new_tokens,
            do_sample=True,
            top_k=0,
            eos_token_id=eos if eos is not None else -1,
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
    ended = torch.isin(response, torch.tensor(eos or [-1])).int().cumsum(1)
    alive = (ended - torch.isin(response, torch.tensor(eos or [-1])).int()) == 0
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
