"""Until when each key may be seen: all that a record, and most models' own patterns, say about it.

A key is seen from its own position on. An eviction ends that, and so do sliding windows and chunks: the queries that
see a key form one interval, whose end is one integer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import and_masks, causal_mask_function, chunked_overlay, sliding_window_overlay

from smdlib.masks.shadow import NEVER
from smdlib.masks.spec import MaskSpec

# transformers makes a new function for every pass; its code says what it computes.
_AND = and_masks(causal_mask_function).__code__
_SLIDING = sliding_window_overlay(1).__code__
_CHUNKED = chunked_overlay(1, torch.empty(0)).__code__


@dataclass(frozen=True)
class Limits:
    """Until when a layer's keys may be seen, as far as evictions go: a mask of queries times keys that nobody has made.

    Queries and keys are numbered as the model's own pattern counts them.

    Attributes:
        queries: int32 ``[B, Q]``, numbers of the queries.
        keys: int32 ``[B, H, K]``, numbers of the keys; 0 where there is none.
        until: int32 ``[B, H, K]``, the first query that cannot see the key any more; 0 where there is none.
        blocks: What attention has worked out from the numbers of queries and keys; the layers of a pass share it.
    """

    queries: Tensor
    keys: Tensor
    until: Tensor
    blocks: dict[Any, Any]

    def visible(self) -> Tensor:
        """Make the mask of evictions, without the model's own pattern: bool ``[B, H, Q, K]``."""
        return self.queries[:, None, :, None] < self.until[:, :, None, :]


def is_interval(spec: MaskSpec) -> bool:
    """Whether the model's own pattern is known to show each key to one interval of queries, from the key's own on.

    Args:
        spec: The pattern.

    Example:
        >>> is_interval(MaskSpec({"mask_function": causal_mask_function}))
        True
    """
    parts = [getattr(part, "__code__", None) for part in _parts(spec.arguments["mask_function"])]
    known = {causal_mask_function.__code__, _SLIDING, _CHUNKED}
    return causal_mask_function.__code__ in parts and known.issuperset(parts)


def narrowed(limits: Limits, spec: MaskSpec) -> Limits:
    """Let each key's interval end where the model's own window or chunk does.

    Args:
        limits: Of evictions.
        spec: A pattern that `is_interval` knows.

    Returns:
        Limits of evictions and pattern.

    Example:
        >>> at = torch.arange(3, dtype=torch.int32)
        >>> limits = Limits(at[None], at[None, None], until=torch.tensor([[[9, 2, 9]]], dtype=torch.int32), blocks={})
        >>> window = and_masks(sliding_window_overlay(2), causal_mask_function)
        >>> narrowed(limits, MaskSpec({"mask_function": window})).until.tolist()
        [[[2, 2, 4]]]
    """
    until, keys = limits.until, limits.keys.long()
    for part in _parts(spec.arguments["mask_function"]):
        inside = inspect.getclosurevars(part).nonlocals
        if part.__code__ is _SLIDING:
            end = keys + inside["sliding_window"]
        elif part.__code__ is _CHUNKED:
            begin, size = inside["left_padding"].to(keys.device)[:, None, None], inside["chunk_size"]
            end = begin + ((keys - begin) // size + 1) * size
        else:
            continue
        until = torch.minimum(until, end.clamp(max=NEVER).int())
    return Limits(limits.queries, limits.keys, until, limits.blocks)


def _parts(function: Callable[..., Any]) -> list[Any]:
    """Take a pattern apart into those that all have to hold."""
    if getattr(function, "__code__", None) is not _AND:
        return [function]
    return [part for inner in inspect.getclosurevars(function).nonlocals["mask_functions"] for part in _parts(inner)]
