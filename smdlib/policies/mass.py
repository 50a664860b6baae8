"""Attention that keys receive, in one buffer of logits."""

from __future__ import annotations

import torch
from torch import Tensor


def received_attention(query: Tensor, key: Tensor, seen: Tensor | None, scaling: float) -> Tensor:
    """Softmax attention that each key receives, summed over the queries and over their group.

    Args:
        query: ``[*, G, Q, D]``, the G query heads of each KV head.
        key: ``[*, K, D]``.
        seen: bool ``[*, 1, Q, K]``, the keys that a query sees; ``None`` for all.
        scaling: Factor of the attention logits.

    Returns:
        float32 ``[*, K]``. A query that sees nothing gives nothing.

    Example:
        >>> query, key = torch.zeros(1, 2, 4), torch.zeros(3, 4)
        >>> received_attention(query, key, torch.tensor([[[True, True, False], [True, True, True]]]), scaling=1.0)
        tensor([0.8333, 0.8333, 0.3333])
    """
    rows = query.flatten(-3, -2).float()
    weights = (rows @ key.float().mT).mul_(scaling)  # [*, G * Q, K]
    if seen is not None:
        weights.unflatten(-2, query.shape[-3:-1]).masked_fill_(~seen, -torch.inf)
    # A query that sees nothing has only -inf; a finite maximum leaves it with weights of 0.
    top = weights.amax(-1, keepdim=True).clamp_(min=torch.finfo(weights.dtype).min)
    weights.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    return (torch.where(total > 0, total.reciprocal(), 0.0).mT @ weights).squeeze(-2)
