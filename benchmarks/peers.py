"""A cache that evicts as most public code does: concatenate the new key, then gather the kept ones into new tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "benchmarks_slice_and_concatenate"
SINKS = 4


class SlicingLayer(DynamicLayer):
    """Keeps ``budget`` keys of each head: those of StreamingLLM, or (``tracks_mass``) half heavy hitters, half recent.

    Only its time and memory are looked at, so the mass starts from zero after a prefill, and the prompt is cut to the
    budget by position.
    """

    def __init__(self, budget: int, tracks_mass: bool) -> None:
        super().__init__()
        self.budget, self.tracks_mass, self.seen = budget, tracks_mass, 0
        self.mass: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Concatenate, as the base class; the result knows its layer, which attention tells when it is done."""
        self.seen += key_states.shape[-2]
        keys, values = super().update(key_states, value_states)
        setattr(keys, NAME, self)
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens seen: positions go on counting when keys leave."""
        return self.seen

    def evict(self, received: Tensor | None) -> None:
        """Gather the kept keys ``[B, H, budget, D]`` after attention, which each received ``[B, H, K]`` of."""
        assert self.keys is not None and self.values is not None
        batch, heads, held, dim = self.keys.shape
        if self.tracks_mass:
            before = torch.zeros(batch, heads, held, device=self.keys.device) if self.mass is None else self.mass
            self.mass = torch.nn.functional.pad(before, (0, held - before.shape[-1]))
            self.mass = self.mass if received is None else self.mass + received
        if held <= self.budget:
            return
        recent = self.budget // 2 if self.tracks_mass else self.budget - SINKS
        old = (
            self.mass[..., :-recent] if self.mass is not None else -torch.arange(held - recent, device=self.keys.device)
        )
        kept = old.expand(batch, heads, -1).topk(self.budget - recent, -1).indices.sort(-1).values
        last = torch.arange(held - recent, held, device=kept.device).expand(batch, heads, -1)
        index = torch.cat([kept, last], -1)
        self.mass = None if self.mass is None else self.mass.gather(-1, index)
        index = index[..., None].expand(-1, -1, -1, dim)
        self.keys, self.values = self.keys.gather(2, index), self.values.gather(2, index)


def slicing_cache(config: Any, budget: int, policy: str) -> DynamicCache:
    """Make a cache whose layers evict after every step; the model needs ``set_attn_implementation(NAME)``."""
    cache: Any = DynamicCache(config=config)
    cache.layers = [SlicingLayer(budget, policy == "h2o") for _ in cache.layers]
    return cache


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend, then let the layer evict; where it asks for the mass, one softmax serves both."""
    layer = getattr(key, NAME)
    if not layer.tracks_mass or query.shape[2] > 1:
        output, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
        layer.evict(None)
        return output, None
    grouped = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # [B, H, G, D]
    weights = (grouped @ key.mT * scaling).softmax(-1, dtype=torch.float32)
    output = (weights.to(value.dtype) @ value).flatten(1, 2)[:, None]
    layer.evict(weights.sum(2))
    return output, None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
