"""Attention of one decoded token, whose softmax serves the output and the mass that keys receive."""

from __future__ import annotations

import torch
from torch import Tensor


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float, want_mass: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend with one query per row, its group folded, and say what each key received.

    Fused attention keeps its weights to itself, so that a policy that needs them would compute them again; and for one
    query, whose weights take no room, two products are as fast.

    Args:
        query: float32 ``[B, Hq, 1, D]``.
        key: float32 ``[B, H, K, D]``.
        value: float32 ``[B, H, K, D]``.
        visible: bool ``[B, 1 | H, 1, K]`` or ``None`` for every key.
        scaling: Factor of the logits.
        want_mass: Whether the attention mass is asked for.

    Returns:
        Output ``[B, 1, Hq, D]``, and attention that each key receives ``[B, H, K]`` or ``None``, float32. A query that
        sees nothing gives zeros.

    Example:
        >>> one = torch.ones(1, 1, 3, 4)
        >>> output, mass = decode_attention(torch.ones(1, 2, 1, 4), one, one, None, 1.0, want_mass=True)
        >>> output.shape, mass.mul(3).round().tolist()
        (torch.Size([1, 1, 2, 4]), [[[2.0, 2.0, 2.0]]])
    """
    batch, heads, _, width = query.shape
    folded = query.reshape(batch, key.shape[1], -1, width)  # reshape: this runs in every layer for every token
    weights = (folded * scaling) @ key.mT
    if visible is not None:
        # A finite number, so that a query that sees nothing gets no NaN; its weights are removed below.
        weights = weights.masked_fill_(~visible, torch.finfo(weights.dtype).min)
    weights = weights.softmax(-1)
    if visible is not None:
        weights = weights * visible
    return (weights @ value).reshape(batch, 1, heads, width), weights.sum(2) if want_mass else None
