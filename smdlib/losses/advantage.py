"""Advantages relative to the other samples of the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantage(rewards: Tensor, group_size: int, *, standardize: bool = True, eps: float = 1e-6) -> Tensor:
    """Compare each sample's reward with those of its group (GRPO, arXiv 2402.03300, section 4.1.2).

    Args:
        rewards: ``[B]``, the samples of a prompt next to each other; ``B`` is a multiple of ``group_size``.
        group_size: Samples per prompt G, at least 2.
        standardize: Divide by the group's standard deviation (unbiased); ``False`` only centres (Dr. GRPO,
            arXiv 2503.20783).
        eps: Added to the standard deviation.

    Returns:
        float32 ``[B]``; exactly 0 where all rewards of a group are equal.

    Raises:
        ValueError: for groups of one, or rewards that do not divide into groups.

    Example:
        >>> group_advantage(torch.tensor([1.0, 0.0, 3.0, 3.0]), group_size=2, standardize=False)
        tensor([ 0.5000, -0.5000,  0.0000,  0.0000])
    """
    if group_size < 2:
        raise ValueError(
            f"group_size={group_size}: a sample is compared with the others of its group, and alone it has none. "
            "Sample at least 2 responses per prompt."
        )
    if rewards.ndim != 1 or rewards.shape[0] == 0 or rewards.shape[0] % group_size:
        raise ValueError(f"rewards of shape {tuple(rewards.shape)} do not divide into groups of {group_size}.")
    groups = rewards.float().reshape(-1, group_size)
    centred = groups - groups.mean(-1, keepdim=True)
    # Equal rewards may leave a rounding residue, which standardizing would blow up.
    equal = (groups == groups[:, :1]).all(-1, keepdim=True)
    centred = torch.where(equal, 0.0, centred)
    if standardize:
        centred = centred / (groups.std(-1, keepdim=True) + eps)
    return centred.reshape(-1)
