"""Samples responses of token prompts: one prefill per distinct prompt, ragged rows out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from smdlib.cache import CompressedCache
from smdlib.masks import ShadowMaskRecorder
from smdlib.masks.shared import distinct_prompts
from smdlib.policies import Allocation, EvictionPolicy
from smdlib.rollout.options import GenerateOptions
from smdlib.rollout.segments import SampledRow, decode
from smdlib.rollout.watchers import RowEnds


@dataclass(frozen=True)
class Eviction:
    """How the cache of a rollout evicts: the arguments of `smdlib.cache.CompressedCache`."""

    policy: EvictionPolicy | str
    budget: float | int
    allocation: Allocation | None = None
    evict_every: int | None = None


@torch.no_grad()
def sample_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Tensor],
    options: GenerateOptions,
    eviction: Eviction | None,
) -> list[SampledRow]:
    """Sample one response of each prompt.

    All but the last token of each *distinct* prompt is prefilled once, however often the prompt occurs. Rows that have
    ended leave the batch; see `smdlib.rollout.segments.decode`.

    Args:
        model: With an adapter installed.
        tokenizer: For stop strings.
        prompts: int64 ``[P]`` each, unpadded.
        options: Of sampling.
        eviction: ``None`` keeps every key (dense sampling).

    Returns:
        A row per prompt, in order.
    """
    device = next(model.parameters()).device
    distinct, index = distinct_prompts(prompts)
    if max(len(prompt) for prompt in distinct) == 1:
        # Nothing to prefill, so no cache whose rows could be repeated.
        distinct, index = list(prompts), torch.arange(len(prompts))
    index = index.to(device)
    ids, mask = _pad_left(distinct, options.pad_token_id, device)
    recorder = ShadowMaskRecorder()
    cache: CompressedCache | DynamicCache
    if eviction is None:
        cache = DynamicCache(config=model.config)
    else:
        cache = CompressedCache(
            model.config,
            eviction.policy,
            eviction.budget,
            allocation=eviction.allocation,
            evict_every=eviction.evict_every,
            reserve=eviction.evict_every or options.max_new_tokens,
            recorder=recorder,
            prompt_lengths=mask.sum(1),
        )
    with evaluation_mode(model), _own_generation_config(model):
        # All but the last token, which generate() needs; prompts of one token have nothing before it.
        if ids.shape[1] > 1:
            positions = (mask[:, :-1].cumsum(1) - 1).clamp(min=0)
            # logits_to_keep: nobody reads the prefill's logits.
            model(
                input_ids=ids[:, :-1],
                attention_mask=mask[:, :-1],
                position_ids=positions,
                cache=cache,
                logits_to_keep=1,
            )
            cache.batch_select_indices(index)
            ids, mask = ids[index], mask[index]
        ends = RowEnds(options, tokenizer, ids)
        return decode(model, cache, None if eviction is None else recorder, ids, mask, options, ends)


def _pad_left(rows: Sequence[Tensor], padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return padded ids and their mask, int64 ``[B, P]`` each."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(list(rows), batch_first=True, padding_value=padding, padding_side="left")
    mask = pad([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    return ids.to(device), mask.to(device)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Sample without dropout and activation checkpointing (which drops caches), then restore every module's mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _own_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Keep ``generate`` from filling our options up with the model's own, such as its top-k."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own
