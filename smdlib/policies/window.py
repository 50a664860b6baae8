"""The last queries of each row, the attention they give, and pooling over neighbours in position."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from ._chunks import empty_scores, head_chunks
from .mass import received_attention
from .view import CacheView


def last_queries(policy: object, view: CacheView, window: int) -> Tensor:
    """The queries of a window, by KV head.

    Args:
        policy: the policy that needs them, to be named in an error.
        view: one layer, with queries ``[B, Hq, W, D]``.
        window: number of last queries, W at most unless no row is longer than W.

    Returns:
        ``[B, H, Hq / H, min(window, W), D]``, newest last.

    Raises:
        ValueError: too few queries.
    """
    queries = view.queries
    held = 0 if queries is None else queries.shape[2]
    if queries is None or (held < window and held < int(view.seen.max())):
        raise ValueError(
            f"{type(policy).__name__} needs the last {window} queries at layer {view.layer_idx}, view.queries has "
            f"{held}: what calls it must honour query_window"
        )
    return rearrange(queries[:, :, -window:], "b (h g) w d -> b h g w d", h=view.num_kv_heads)


def window_mass(policy: object, view: CacheView, window: int) -> Tensor:
    """Attention that each key receives from its row's last queries, summed over them, averaged over the query group.

    Args:
        policy: the policy that needs it, to be named in an error.
        view: one layer, with queries ``[B, Hq, W, D]``.
        window: number of last queries to use, W at most unless no row is longer than W.

    Returns:
        ``[B, H, K]`` float32. A query that sees nothing (it does not exist, or its keys have left) gives nothing.

    Raises:
        ValueError: too few queries.
    """
    queries = last_queries(policy, view, window)
    group, width = queries.shape[2:4]
    age = torch.arange(width, device=queries.device) - width
    asked_at = view.seen[:, None] + age  # [B, W], negative: no such query
    mass = empty_scores(view)
    scratch = 4 * view.positions.shape[2] * (group * width + width + view.keys.shape[3])  # logits, mask, float32 keys
    for row, part in head_chunks(view, scratch):
        positions = view.positions[row, part, None, None]
        seen = (positions >= 0) & (positions <= asked_at[row, :, None])  # [h, 1, W, K]
        mass[row, part] = received_attention(queries[row, part], view.keys[row, part], seen, view.scaling) / group
    return mass


def pool_by_position(mass: Tensor, positions: Tensor, among: Tensor, kernel_size: int, pooling: str) -> Tensor:
    """1-D pooling over neighbours in position, wherever their slots are. Stride 1, same length.

    Args:
        mass: ``[B, H, K]``, not negative.
        positions: ``[B, H, K]`` int64.
        among: ``[B, H, K]`` bool, the keys that are pooled; all others count as beyond the edge.
        kernel_size: number of keys that are pooled, odd.
        pooling: "max" or "avg" (zeros beyond the edge are counted, as ``avg_pool1d`` does).

    Returns:
        ``[B, H, K]``, meaningful for the keys in ``among``.
    """
    order = positions.masked_fill(~among, torch.iinfo(torch.int64).max).argsort(-1)
    # Attention is never negative: a 0 beyond the edge wins no maximum and adds to no sum.
    in_order = mass.masked_fill(~among, 0.0).gather(-1, order)
    pool = F.max_pool1d if pooling == "max" else F.avg_pool1d
    pooled = pool(in_order, kernel_size, stride=1, padding=kernel_size // 2)
    return torch.empty_like(pooled).scatter_(-1, order, pooled)
