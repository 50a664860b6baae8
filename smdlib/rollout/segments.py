"""Decodes a batch in segments, so that rows which have ended are not decoded on until the last one ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer

from smdlib.cache import CompressedCache
from smdlib.cache.support import num_kv_heads, text_config
from smdlib.masks import ShadowMask, ShadowMaskRecorder
from smdlib.rollout.options import GenerateOptions
from smdlib.rollout.watchers import RowEnds, SampledLogProbs


@dataclass(frozen=True)
class SampledRow:
    """One sampled row, unpadded.

    Attributes:
        prompt: int64 ``[P]``.
        response: int64 ``[R]``, its end token included.
        log_probs: float32 ``[R]`` in nats, of the distribution that the tokens were drawn from.
        shadow: Record ``[P + R, L, H]``.
        kv_bytes: The row's share of the cache at its largest, in bytes.
    """

    prompt: Tensor
    response: Tensor
    log_probs: Tensor
    shadow: ShadowMask
    kv_bytes: int


def decode(
    model: PreTrainedModel,
    cache: CompressedCache | DynamicCache,
    recorder: ShadowMaskRecorder | None,
    prompts: Tensor,
    mask: Tensor,
    options: GenerateOptions,
    ends: RowEnds,
) -> list[SampledRow]:
    """Sample one response of each prompt, with one call of ``generate`` for each segment.

    A segment ends when at least half of its rows have ended; the others go on, alone, in the next one. So the rows that
    are decoded are fewer than twice those that have to be, and all copies of keys together take less than the cache.

    Args:
        model: With an adapter installed.
        cache: Has seen all but the last column of the prompts, or nothing yet. The rows of the last segment stay in it.
        recorder: Of the cache's evictions, ``None`` if it keeps every key.
        prompts: int64 ``[B, P]``, left-padded.
        mask: int64 ``[B, P]``, ones at the prompts' tokens.
        options: Of sampling.
        ends: Says when a row and when a segment ends.

    Returns:
        A row per prompt, in order.
    """
    columns, device, sampled, kv_bytes = prompts.shape[1], prompts.device, {}, 0
    rows, ids, scored = torch.arange(len(prompts), device=device), prompts, torch.empty(len(prompts), 0, device=device)
    while len(rows):
        watcher, before = SampledLogProbs(options.temperature), ids.shape[1]
        rest = replace(options, max_new_tokens=columns + options.max_new_tokens - before)
        ids = cast(Any, model).generate(
            input_ids=ids,
            attention_mask=torch.nn.functional.pad(mask, (0, before - columns), value=1),
            cache=cache,
            generation_config=rest.config(),
            logits_processor=LogitsProcessorList([watcher]),
            stopping_criteria=StoppingCriteriaList([ends]),
        )
        scored = torch.cat([scored, watcher.log_probs(ids[:, before:])], 1)
        kv_bytes = max(kv_bytes, _kv_bytes(cache))
        ended, lengths = ends.ended(scored.shape[1]), ends.lengths(scored.shape[1])
        records = None if recorder is None else recorder.shadow_mask(mask.sum(1) + lengths)
        for at in ended.nonzero().flatten().tolist():
            start, stop = columns - int(mask[at].sum()), columns + int(lengths[at])
            if records is None:
                shadow = _dense_shadow(model, ids[at, start:stop])
            else:
                shadow = cast(ShadowMask, records[at]).crop(stop - start)
            sampled[int(rows[at])] = ids[at, start:columns], ids[at, columns:stop], scored[at, : stop - columns], shadow
        left = (~ended).nonzero().flatten()
        if len(left):
            cache.batch_select_indices(left)
            ends.keep(left)
        rows, ids, mask, scored = rows[left], ids[left], mask[left], scored[left]
    return [SampledRow(*sampled[row], kv_bytes=kv_bytes // len(prompts)) for row in range(len(prompts))]


def _dense_shadow(model: PreTrainedModel, tokens: Tensor) -> ShadowMask:
    """Return the record of a row that lost no key, with the ids of its tokens: it too is refused for others."""
    layers, heads = int(text_config(model.config).num_hidden_layers), num_kv_heads(model.config)
    shadow = ShadowMask.dense(len(tokens), layers, heads, device=tokens.device)
    shadow.token_ids = tokens.int()
    return shadow


def _kv_bytes(cache: CompressedCache | DynamicCache) -> int:
    if isinstance(cache, CompressedCache):
        return cache.kv_bytes()
    states = [one for layer in cast(list[DynamicLayer], cache.layers) for one in (layer.keys, layer.values)]
    return sum(one.nbytes for one in states if one is not None)
