"""Loss tokens lie next to each other, ``[N]``, row after row; ``lengths [B]`` says how many belong to each row.

So padding cannot enter any sum, and appending padding changes no bit of one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum the tokens of each row.

    Args:
        values: ``[N]``.
        lengths: int64 ``[B]``, summing to N.

    Returns:
        ``[B]``, 0 for rows without loss tokens.

    Example:
        >>> segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 1]))
        tensor([3., 0., 4.])
    """
    if values.shape[0] == 0:
        return values.new_zeros(lengths.shape[0]) + values.sum()  # keeps the graph
    return torch.segment_reduce(values, "sum", lengths=lengths, initial=0.0)


def segment_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """Average the tokens of each row.

    Args:
        values: ``[N]``.
        lengths: int64 ``[B]``, summing to N.

    Returns:
        ``[B]``, 0 for rows without loss tokens.

    Example:
        >>> segment_mean(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 1]))
        tensor([1.5000, 0.0000, 4.0000])
    """
    return segment_sum(values, lengths) / lengths.clamp(min=1)
