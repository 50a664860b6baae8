"""SnapKV: what the last queries look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from ._options import check_int
from .mass import received_attention
from .registry import register_policy
from .view import CacheView

_CHUNK = 4 * 2**20  # bytes of logits at once, unless one head alone has more


@register_policy("snapkv")
@dataclass(frozen=True)
class SnapKVPolicy:
    """Keeps the last ``window`` tokens and the neighbourhoods they attend to (SnapKV, arXiv 2404.14469, listing 1).

    With ``A[g, i, k]`` the causal softmax over the present keys of query i of the window in query head g (float32)::

        mass[k]  = mean over the group's heads g of sum over the window's queries i of A[g, i, k]
        score[k] = max or mean of mass over the kernel_size keys around k        (keys outside the window)
        score[k] = +inf                                                         (keys of the window)

    Neighbours are neighbours in position among the keys that are still there and outside the window; beyond the first
    and the last of them there is nothing (``avg`` divides by ``kernel_size`` all the same, as the authors' code does).
    Padding and empty slots are outside, too: a row scores as it would alone. A row no longer than the window is all
    window.

    Attributes:
        window: number of last queries that vote, and whose keys are protected. Budgets no larger than it keep the most
            recent keys, whatever the queries look at.
        kernel_size: number of neighbouring keys that are pooled, odd; 1 pools nothing.
        pooling: "max" or "avg".

    Raises:
        TypeError: ``window`` or ``kernel_size`` is not an int.
        ValueError: ``window`` below 1, ``kernel_size`` even or below 1, or an unknown ``pooling``.

    Example:
        >>> keys = torch.tensor([0.0, 2.0, 0.0, 0.0, 0.0]).view(1, 1, 5, 1)
        >>> view = CacheView.of_prompt(keys, budget=2, queries=torch.ones(1, 1, 1, 1))
        >>> SnapKVPolicy(window=1, kernel_size=1).score(view)
        tensor([[[0.0878, 0.6488, 0.0878, 0.0878, inf]]])
        >>> SnapKVPolicy(window=1, kernel_size=3).score(view)
        tensor([[[0.6488, 0.6488, 0.6488, 0.0878, inf]]])
    """

    window: int = 32
    kernel_size: int = 7
    pooling: Literal["max", "avg"] = "max"

    def __post_init__(self) -> None:
        """Refuses a window without queries, and a kernel without a middle."""
        check_int(self, "window", at_least=1)
        check_int(self, "kernel_size", at_least=1)
        if self.kernel_size % 2 == 0:
            raise ValueError(f"SnapKVPolicy.kernel_size is {self.kernel_size}, expected an odd number, such as 7")
        if self.pooling not in ("max", "avg"):
            raise ValueError(f"SnapKVPolicy.pooling is {self.pooling!r}, expected 'max' or 'avg'")

    @property
    def query_window(self) -> int:
        """Number of last queries that the score needs."""
        return self.window

    def score(self, view: CacheView) -> Tensor:
        """Scores ``[B, H, K]``: pooled attention of the window, the window protected; see the class.

        Raises:
            ValueError: the view has no queries, or fewer than the window although the rows are longer.
        """
        window = view.newest(self.window)
        others = view.present & ~window
        mass = window_mass(view, self.window)
        scores = pool_by_position(mass, view.positions, others, self.kernel_size, self.pooling)
        return view.protect(scores, window)


def window_mass(view: CacheView, window: int) -> Tensor:
    """Attention that each key receives from its row's last queries, summed over them, averaged over the query group.

    Args:
        view: one layer, with queries ``[B, Hq, W, D]``.
        window: number of last queries to use, W at most unless no row is longer than W.

    Returns:
        ``[B, H, K]`` float32. A query that sees nothing (it does not exist, or its keys have left) gives nothing.

    Raises:
        ValueError: too few queries.
    """
    queries = view.queries
    held = 0 if queries is None else queries.shape[2]
    if queries is None or (held < window and held < int(view.seen.max())):
        raise ValueError(
            f"SnapKVPolicy needs the last {window} queries at layer {view.layer_idx}, view.queries has {held}: "
            "what calls it must honour query_window"
        )
    queries = rearrange(queries[:, :, -window:], "b (h g) w d -> b h g w d", h=view.num_kv_heads)
    heads, group, width = queries.shape[1:4]
    age = torch.arange(width, device=queries.device) - width
    asked_at = view.seen[:, None] + age  # [B, W], negative: no such query
    mass = torch.empty(view.positions.shape, dtype=torch.float32, device=view.keys.device)
    # Row by row, so that a row's rounding, and with it a near tie, cannot depend on its batch-mates; in head chunks,
    # so that neither the float32 copy of the keys nor the logits are ever there for the whole layer.
    # Below half a layer's keys and values, where one head allows it: eviction must not cost what it is to save.
    scratch = 4 * view.positions.shape[2] * (group * width + width + view.keys.shape[3])  # bytes per head
    step = max(1, min(_CHUNK, (view.keys.nbytes + view.values.nbytes) // 2) // max(1, scratch))
    for row in range(len(queries)):
        asked = asked_at[row, :, None]
        for first in range(0, heads, step):
            part = slice(first, first + step)
            positions = view.positions[row, part, None, None]
            seen = (positions >= 0) & (positions <= asked)  # [h, 1, W, K]
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
