"""What all layers of a cache share, and whom they tell about evictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from smdlib.cache.tokens import TokenLog
from smdlib.policies import Allocation, EvictionPolicy


class EvictionRecorder(Protocol):
    """What a cache tells about evictions; `smdlib.masks.ShadowMaskRecorder` is one.

    Example:
        >>> from smdlib.masks import ShadowMaskRecorder
        >>> recorder: EvictionRecorder = ShadowMaskRecorder()
    """

    def begin(self, num_layers: int, owner: object) -> None:
        """Start an empty record for the cache of ``num_layers`` layers that ``owner`` stands for."""
        ...

    def observe(self, owner: object, seen: Tensor, columns: int) -> None:
        """Note that every row ``b`` of the owner's cache has seen ``seen[b]`` tokens, in ``columns`` columns."""
        ...

    def observe_tokens(self, owner: object, ids: Tensor) -> None:
        """Note that the owner's cache is about to see the tokens ``ids [B, Q]``, padded columns."""
        ...

    def record(self, layer_idx: int, positions: Tensor, evicted: Tensor | None, seen: Tensor) -> None:
        """Note that keys at ``positions [B, H, K]`` are ``evicted`` for queries from ``seen [B]`` on.

        ``evicted`` is bool ``[B, H, K]``, or ``None`` for all.
        """
        ...

    def map_rows(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Follow the cache when its rows are repeated or selected."""
        ...


@dataclass(frozen=True)
class CacheSettings:
    """The arguments of `CompressedCache`, checked; see there for their meaning."""

    num_layers: int
    policy: EvictionPolicy
    budget: float | int
    allocation: Allocation
    evict_every: int | None
    reserve: int
    prompt_lengths: Tensor | None
    recorder: EvictionRecorder | None
    generators: Sequence[torch.Generator] | None
    on_grow: Callable[[int, int], None]
    owner: object
    tokens: TokenLog | None  # where the policy asks for them
