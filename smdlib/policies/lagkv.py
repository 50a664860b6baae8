"""LagKV: keys and values that stand out against those that follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._chunks import head_chunks
from ._options import check_int
from .registry import register_policy
from .view import CacheView


@register_policy("lagkv")
@dataclass(frozen=True)
class LagKVPolicy:
    """Keeps keys that stand out against the next partition of the sequence (LagKV, arXiv 2504.04704, equations 2 to 6).

    The present keys of a row and head beyond the sinks, in order of position, form partitions of ``lag`` keys; with lo
    and hi the smallest and largest entry of each channel of the next partition, in float32::

        u[k]     = softmax within the partition of std over the channels of (x[k] - lo) / (hi - lo),  x = keys, values
        score[k] = rank within the partition of (u_keys[k] + u_values[k]) / lag                 in [0, 1)
        score[k] = 1          (the last whole partition, and the keys after it)
        score[k] = +inf       (the first ``sinks`` tokens)

    A head with fewer than two partitions keeps its newest keys (``score[k] = position / seen``). Of equal keys the
    older one ranks lower. A channel that is constant in the next partition says nothing and counts as 0.

    Attributes:
        sinks: number of first tokens that are protected.
        lag: number of keys of a partition, and of those that serve it as reference.

    Raises:
        TypeError: an option is not an int.
        ValueError: ``sinks`` is negative, or ``lag`` below 1.

    Example:
        >>> keys = torch.tensor([[9.0, 9.0], [0.0, 0.0], [0.0, 9.0], [0.0, 0.0], [1.0, 1.0]]).view(1, 1, 5, 2)
        >>> LagKVPolicy(sinks=1, lag=2).score(CacheView.of_prompt(keys, budget=3))
        tensor([[[   inf, 0.0000, 0.5000, 1.0000, 1.0000]]])
    """

    sinks: int = 4
    lag: int = 128

    def __post_init__(self) -> None:
        """Refuses partitions without keys."""
        check_int(self, "sinks", at_least=0)
        check_int(self, "lag", at_least=1)

    def score(self, view: CacheView) -> Tensor:
        """Scores ``[B, H, K]``: rank within the partition, sinks protected; see the class."""
        others = view.positions >= self.sinks
        order = view.positions.masked_fill(~others, torch.iinfo(torch.int64).max).argsort(-1)
        whole = others.sum(-1) // self.lag  # [B, H], partitions
        most = int(whole.max())
        by_position = view.positions / view.seen.clamp(min=1)[:, None, None]
        if most < 2:
            return view.protect(by_position, view.positions < self.sinks)
        span = most * self.lag
        ranked = torch.ones_like(by_position)
        for row, part in head_chunks(view, scratch=4 * 4 * span * view.keys.shape[3]):
            index = order[row, part, :span]
            stands_out = _stands_out(view.keys[row, part], index, self.lag)
            stands_out += _stands_out(view.values[row, part], index, self.lag)
            rank = stands_out.argsort(dim=-1, stable=True).argsort(-1) / self.lag  # [h, most - 1, lag]
            last = torch.arange(1, most, device=rank.device) >= whole[row, part, None]  # what has no next partition
            ranked[row, part] = ranked[row, part].scatter(
                -1, index[..., : -self.lag], rank.masked_fill(last[..., None], 1.0).flatten(-2)
            )
        scores = torch.where(whole[..., None] < 2, by_position, ranked)
        return view.protect(scores, view.positions < self.sinks)


def _stands_out(states: Tensor, index: Tensor, lag: int) -> Tensor:
    """How much each key (or value) of all partitions but the last stands out against the next one.

    Args:
        states: ``[h, K, D]``.
        index: ``[h, P * lag]``, slots in order of position.
        lag: size of a partition.

    Returns:
        ``[h, P - 1, lag]`` float32, softmax within each partition.
    """
    ordered = states.gather(1, index[..., None].expand(-1, -1, states.shape[-1])).float()
    parts = ordered.unflatten(1, (-1, lag))  # [h, P, lag, D]
    low, high = parts[:, 1:].aminmax(dim=2, keepdim=True)
    width = high - low
    scaled = (parts[:, :-1] - low) / width
    return torch.where(width > 0, scaled, 0.0).std(-1).softmax(-1)
