"""A transformers cache that evicts keys for good and keeps the rest on fixed slots."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from smdlib.cache.layer import CompressedLayer
from smdlib.cache.settings import CacheSettings, EvictionRecorder
from smdlib.cache.support import check_supported, text_config
from smdlib.cache.tokens import TokenLog
from smdlib.policies import (
    Allocation,
    EvictionPolicy,
    StepwiseAllocation,
    UniformAllocation,
    make_policy,
    needs_tokens,
    resolve_budget,
)

_DEFAULT_RESERVE = 128


class CompressedCache(Cache):
    """KV cache for ``model.generate`` and plain calls whose policy evicts keys, permanently.

    Storage is allocated once per layer, ``budget + reserve`` slots per row and KV head; a decoded token takes a free
    slot, and eviction frees slots without moving a key. A prompt may arrive in several chunks under the same budget.
    A chunk no longer than ``reserve`` is written into the free slots, so that a layer never holds more than ``budget +
    reserve`` keys and nothing is reallocated; a longer one is attended to in a copy of the kept keys with the chunk
    behind them, ``budget + chunk`` keys on top of the slots of one layer at a time, gone once that layer has attended.
    (The first chunk is attended to where the model put it.) The model needs an installed
    `smdlib.masks.MaskedAttentionAdapter`, which also tells it the positions of its tokens. A second turn goes on with
    the same cache: pass the whole conversation to ``generate``; all keys still held are on offer to the policy again.
    Sample under ``torch.no_grad()``: the stored keys carry no gradient.

    Args:
        config: ``model.config``.
        policy: An `EvictionPolicy` or the name of a registered one.
        budget: A float in (0, 1] keeps ``ceil(budget * prompt)`` keys of each row's own prompt, an int that many keys,
            per layer and KV head. With ``evict_every`` it caps prompt and response keys together.
        allocation: Spreads the budget over layers and heads; uniform by default. With `AdaptiveHeadAllocation` rows
            and heads get slots of their own number, in blocks with at most a quarter of padding.
        evict_every: ``None`` evicts after each prefill (chunk) only and keeps the response on top; ``n`` also evicts
            after every ``n`` decoded tokens.
        recorder: Notes what was evicted and when, e.g. a `smdlib.masks.ShadowMaskRecorder`.
        reserve: Slots on top of the budget, for the tokens decoded between evictions, or for the whole response when
            ``evict_every`` is ``None``. Default: ``evict_every``, or 128. Beyond it storage grows by another
            ``reserve`` (counted in `growths`, warned about once).
        prompt_lengths: int ``[B]``, unpadded prompt lengths, for a prompt that arrives in several calls: then a share
            refers to the whole prompt from the first chunk on, and a last chunk of one token counts as prompt. Without
            it a call with one token is decoding once every row has begun, and a share refers to the tokens seen so far.
        generators: One ``torch.Generator`` per row for policies that draw random numbers.

    Raises:
        UnsupportedModelError: if eviction in this architecture has no exact mask.
        ValueError: for a budget, ``evict_every`` or ``reserve`` out of range.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from smdlib import CompressedCache, MaskedAttentionAdapter
        >>> model = LlamaForCausalLM(
        ...     LlamaConfig(
        ...         vocab_size=32,
        ...         hidden_size=16,
        ...         intermediate_size=16,
        ...         num_hidden_layers=2,
        ...         num_attention_heads=4,
        ...         num_key_value_heads=2,
        ...     )
        ... ).eval()
        >>> with MaskedAttentionAdapter(model), torch.no_grad():
        ...     cache = CompressedCache(model.config, "streaming", budget=8, evict_every=1)
        ...     tokens = model.generate(torch.arange(20)[None], cache=cache, max_new_tokens=4, min_new_tokens=4)
        >>> tokens.shape, cache.get_seq_length(), cache.kv_bytes() == 2 * 2 * 2 * (8 + 1) * 4 * 4
        (torch.Size([1, 24]), 23, True)
    """

    layers: list[CompressedLayer]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        config: Any,
        policy: EvictionPolicy | str,
        budget: float | int,
        *,
        allocation: Allocation | None = None,
        evict_every: int | None = None,
        recorder: EvictionRecorder | None = None,
        reserve: int | None = None,
        prompt_lengths: Tensor | Sequence[int] | None = None,
        generators: Sequence[torch.Generator] | None = None,
    ) -> None:
        check_supported(config)
        num_layers = int(text_config(config).num_hidden_layers)
        evict_every = _positive_int("evict_every", evict_every)
        reserve = _positive_int("reserve", reserve) or evict_every or _DEFAULT_RESERVE
        if evict_every is not None and reserve < evict_every:
            raise ValueError(
                f"reserve={reserve} slots cannot hold the {evict_every} tokens decoded between two evictions "
                f"(evict_every={evict_every}); pass reserve >= evict_every or leave it out."
            )
        if allocation is not None and (isinstance(allocation, type) or not callable(allocation)):
            raise TypeError(f"allocation must be an object such as PyramidAllocation(), not {allocation!r}.")
        if isinstance(allocation, StepwiseAllocation) and evict_every is None:
            raise ValueError(
                f"{type(allocation).__name__} shrinks budgets at evictions while decoding, of which there are none "
                "without evict_every; pass evict_every=1, or another allocation."
            )
        if isinstance(recorder, type):
            raise TypeError(f"recorder must be an instance: {recorder.__name__}(), not the class.")
        if prompt_lengths is not None and bool((torch.as_tensor(prompt_lengths) < 1).any()):
            raise ValueError(f"prompt_lengths count the real tokens of each prompt, at least 1; got {prompt_lengths}.")
        resolve_budget(budget, torch.ones(1, dtype=torch.int64))  # refuses a bad budget here, not in the first forward
        self.growths = 0
        policy = make_policy(policy)
        self.settings = CacheSettings(
            num_layers=num_layers,
            policy=policy,
            budget=budget,
            allocation=allocation or UniformAllocation(),
            evict_every=evict_every,
            reserve=reserve,
            prompt_lengths=None if prompt_lengths is None else torch.as_tensor(prompt_lengths, dtype=torch.int64),
            recorder=recorder,
            generators=generators,
            on_grow=self._note_growth,
            owner=object(),
            tokens=TokenLog() if needs_tokens(policy) else None,
        )
        super().__init__(layers=[CompressedLayer(layer, self.settings) for layer in range(num_layers)])
        if recorder is not None:
            recorder.begin(num_layers, self.settings.owner)

    def kv_bytes(self) -> int:
        """Bytes of keys and values: sum over layers of ``B * H * slots * 2 * D * itemsize``; 0 before a prefill.

        Slots are the largest of a layer's budgets plus the reserve; where an allocation gives every head its own budget
        from scores, the sum over rows and heads of these, plus at most a quarter of padding.
        """
        return sum(layer.slots.nbytes for layer in self.layers if layer.slots is not None)

    def reset(self) -> None:
        """Forget all keys and the record, keep the settings."""
        super().reset()
        if self.settings.tokens is not None:
            self.settings.tokens.reset()
        if self.settings.recorder is not None:
            self.settings.recorder.begin(self.settings.num_layers, self.settings.owner)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times (rows ``[0, 0, 1, 1]``): one prefill serves a group of samples.

        The flow: prefill all but the last token of each prompt once, repeat the rows, and let ``generate`` go on::

            cache = CompressedCache(model.config, policy, budget, prompt_lengths=mask.sum(1), recorder=recorder)
            with torch.no_grad():
                model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], cache=cache)
                cache.batch_repeat_interleave(samples)
                ids, mask = ids.repeat_interleave(samples, 0), mask.repeat_interleave(samples, 0)
                tokens = model.generate(input_ids=ids, attention_mask=mask, cache=cache, do_sample=True)

        Args:
            repeats: Number of samples G per prompt, at least 1.

        Raises:
            ValueError: for a number below 1, or if the cache has one generator per row.
        """
        _positive_int("repeats", repeats)
        self._map_rows(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows ``indices``.

        Args:
            indices: int64 ``[N]``.
        """
        self._map_rows(lambda rows: rows[indices.to(rows.device)])

    def _map_rows(self, rows: Callable[[Tensor], Tensor]) -> None:
        if self.settings.generators is not None:
            raise ValueError(
                "the rows of a cache with one generator per row cannot be repeated or selected: copies of a generator "
                "would draw the same numbers. Prefill the repeated prompts, or leave generators out."
            )
        for layer in self.layers:
            layer.map_rows(rows)
        if self.settings.tokens is not None:
            self.settings.tokens.map_rows(rows)
        if self.settings.recorder is not None:
            self.settings.recorder.map_rows(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refuse beam search.

        Raises:
            ValueError: always; a beam that changes parents would need the record of another row's past.
        """
        raise ValueError(
            "beam search swaps the pasts of rows, so the sampled tokens are no sample of one policy and the record "
            "would not describe them. Use num_beams=1 with a CompressedCache."
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take tokens back.

        Raises:
            ValueError: always; evicted keys cannot come back, so the cache cannot be rolled back.
        """
        raise ValueError(
            "a CompressedCache cannot be cropped: keys that were evicted meanwhile would have to return. Assisted and "
            "speculative decoding need that; use plain sampling."
        )

    def _note_growth(self, layer_idx: int, size: int) -> None:
        self.growths += 1
        if self.growths == 1:
            warnings.warn(
                f"CompressedCache grew layer {layer_idx} to {size} slots because the response is longer than "
                f"reserve={self.settings.reserve}; that copies it. Pass reserve=max_new_tokens to allocate once.",
                stacklevel=2,
            )


def _positive_int(name: str, value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} must be a positive int or None, not {value!r}.")
    return value
