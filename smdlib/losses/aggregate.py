"""How per-token values become one number; exact when a batch is cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from smdlib.losses.segments import segment_mean


class Aggregation(Protocol):
    """Sums per-token values and divides by a number of items that may belong to a larger batch."""

    def count(self, lengths: Tensor) -> Tensor:
        """Return the items in rows with ``lengths [B]`` loss tokens, a scalar; add up over micro-batches."""
        ...

    def __call__(self, values: Tensor, lengths: Tensor, num_items: Tensor | int | None = None) -> Tensor:
        """Reduce ``values [N]`` of rows with ``lengths [B]`` to a scalar, 0 without loss tokens."""
        ...


def divide_by_items(total: Tensor, num_items: Tensor | int | None, own: Tensor) -> Tensor:
    """Divide by the items of the whole batch, or by this micro-batch's own where they are not given.

    Args:
        total: Scalar.
        num_items: Items of the whole batch.
        own: Items of this micro-batch.

    Returns:
        Scalar; 0 items divide by 1.

    Raises:
        ValueError: if the whole batch would have fewer items than its part.
    """
    if num_items is not None and int(num_items) < int(own):
        raise ValueError(
            f"num_items={int(num_items)}, but this micro-batch alone has {int(own)} items; pass the number of the "
            "whole batch."
        )
    count = own if num_items is None else torch.as_tensor(num_items, device=total.device)
    return total / count.clamp(min=1)


@dataclass(frozen=True)
class TokenMean:
    """Sum over all loss tokens divided by their number (DAPO, arXiv 2503.14476, eq. 8). Items are loss tokens.

    Example:
        >>> TokenMean()(torch.tensor([1.0, 3.0, 5.0]), lengths=torch.tensor([2, 1]))
        tensor(3.)
    """

    def count(self, lengths: Tensor) -> Tensor:
        """Return the number of loss tokens."""
        return lengths.sum()

    def __call__(self, values: Tensor, lengths: Tensor, num_items: Tensor | int | None = None) -> Tensor:
        """Reduce ``values [N]`` to their mean over ``num_items`` loss tokens."""
        return divide_by_items(values.sum(), num_items, self.count(lengths))


@dataclass(frozen=True)
class SequenceMean:
    """Mean over the tokens of each row, then over rows (GRPO, arXiv 2402.03300, eq. 3). Items are rows.

    Example:
        >>> SequenceMean()(torch.tensor([1.0, 3.0, 5.0]), lengths=torch.tensor([2, 1]))
        tensor(3.5000)
    """

    def count(self, lengths: Tensor) -> Tensor:
        """Return the number of rows."""
        return torch.as_tensor(lengths.shape[0], device=lengths.device)

    def __call__(self, values: Tensor, lengths: Tensor, num_items: Tensor | int | None = None) -> Tensor:
        """Reduce ``values [N]`` to the mean over ``num_items`` rows of each row's token mean."""
        return divide_by_items(segment_mean(values, lengths).sum(), num_items, self.count(lengths))


@dataclass(frozen=True)
class ConstantMean:
    """Sum over tokens divided by a constant, then mean over rows (Dr. GRPO, arXiv 2503.20783). Items are rows.

    Args:
        length: The constant, usually the largest response length in tokens.

    Raises:
        ValueError: for a length below 1.

    Example:
        >>> ConstantMean(length=4)(torch.tensor([1.0, 3.0, 5.0]), lengths=torch.tensor([2, 1]))
        tensor(1.1250)
    """

    length: int

    def __post_init__(self) -> None:
        if not self.length >= 1:
            raise ValueError(f"ConstantMean divides by a length of at least 1 token, not {self.length}.")

    def count(self, lengths: Tensor) -> Tensor:
        """Return the number of rows."""
        return torch.as_tensor(lengths.shape[0], device=lengths.device)

    def __call__(self, values: Tensor, lengths: Tensor, num_items: Tensor | int | None = None) -> Tensor:
        """Reduce ``values [N]`` to the mean over ``num_items`` rows of each row's sum divided by ``length``."""
        return divide_by_items(values.sum() / self.length, num_items, self.count(lengths))
