"""Parts of a layer that are small enough to be copied to float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .view import CacheView

_CHUNK = 4 * 2**20  # bytes at once, unless one head alone has more


def head_chunks(view: CacheView, scratch: int) -> Iterator[tuple[int, slice]]:
    """Rows of a layer, each in chunks of its KV heads, as (row, heads).

    Row by row, so that a row's rounding, and with it a near tie, cannot depend on its batch-mates; in chunks of heads,
    so that scratch memory stays below half of the layer's keys and values, where one head allows it: eviction must not
    cost what it is to save.

    Args:
        view: one layer.
        scratch: bytes of scratch memory that one head of one row needs.

    Example:
        >>> view = CacheView.of_prompt(torch.zeros(1, 4, 6, 2), budget=2)  # 384 bytes of keys and values
        >>> list(head_chunks(view, scratch=96))
        [(0, slice(0, 2, None)), (0, slice(2, 4, None))]
    """
    step = max(1, min(_CHUNK, (view.keys.nbytes + view.values.nbytes) // 2) // max(1, scratch))
    for row in range(view.positions.shape[0]):
        for first in range(0, view.num_kv_heads, step):
            yield row, slice(first, first + step)


def empty_scores(view: CacheView) -> Tensor:
    """Room for scores, ``[B, H, K]`` float32, not initialised."""
    return torch.empty(view.positions.shape, dtype=torch.float32, device=view.keys.device)
