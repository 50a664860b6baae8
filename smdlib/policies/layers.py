"""Budgets that follow given shares of the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerAllocation:
    """Budgets in proportion to given shares, one per layer, with the same keys in total as a uniform budget.

    ``b[l] = L * m * share[l] / sum(share)`` for mean budget m, rounded so that the layers of a row hold exactly
    ``L * m`` keys together (largest remainders first, the earlier layer of equals) and none fewer than one: layers
    whose part would be below one key get one, and the others share the rest.

    Attributes:
        shares: one number above 0 per layer, first layer first; only their ratios matter.

    Raises:
        TypeError: a share is not a number.
        ValueError: no shares, or one that is not above 0; when called, a model of another number of layers.

    Example:
        >>> LayerAllocation([3, 2, 1])(torch.tensor([10]), num_layers=3, num_kv_heads=2)[:, 0].tolist()
        [[15, 15], [10, 10], [5, 5]]
    """

    shares: Sequence[float]

    def __post_init__(self) -> None:
        """Refuses shares that no keys can follow."""
        object.__setattr__(self, "shares", tuple(self.shares))
        if not self.shares:
            raise ValueError("LayerAllocation.shares is empty, expected one number above 0 per layer")
        for share in self.shares:
            if isinstance(share, bool) or not isinstance(share, (int, float)):
                raise TypeError(f"LayerAllocation.shares has {share!r}, expected a number above 0")
            if not (isfinite(share) and share > 0):
                raise ValueError(f"LayerAllocation.shares has {share}, expected a number above 0")

    def __call__(self, budget: Tensor, num_layers: int, num_kv_heads: int) -> Tensor:
        """Keys that each layer and head may keep, ``[L, B, H]`` int64; see `Allocation`."""
        if num_layers != len(self.shares):
            raise ValueError(f"LayerAllocation has {len(self.shares)} shares for a model of {num_layers} layers")
        rows = [divide(mean * num_layers, self.shares) for mean in budget.tolist()]
        layers = torch.tensor(rows, dtype=torch.int64, device=budget.device).view(-1, num_layers).T
        return layers[..., None].repeat(1, 1, num_kv_heads)


def divide(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to shares, each at least 1, with an exact sum.

    Args:
        total: the sum, at least the number of shares.
        shares: numbers above 0.

    Example:
        >>> divide(10, [100, 50, 1])
        [6, 3, 1]
    """
    exact = [Fraction(share) for share in shares]  # no float can spoil the sum
    open_ = set(range(len(shares)))
    while True:
        unit = Fraction(total - (len(shares) - len(open_))) / sum(exact[i] for i in open_)
        small = {i for i in open_ if exact[i] * unit < 1}
        if not small:
            break
        open_ -= small
    parts = [int(exact[i] * unit) if i in open_ else 1 for i in range(len(shares))]
    by_remainder = sorted(open_, key=lambda i: (parts[i] - exact[i] * unit, i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts
