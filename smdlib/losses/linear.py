"""The fused language-model head: log-prob, entropy and KL per token without a ``[N, V]`` tensor.

Peak extra memory is a few blocks of logits, whatever the vocabulary; `smdlib.losses.fused_head` has the calculation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from smdlib.losses.fused_head import FusedHead, HeadTransform

_BLOCK_BYTES = 2 * 2**20


class TokenScores(NamedTuple):
    """Values of N tokens in nats, float32 ``[N]`` (float64 for float64 input); ``kl`` is ``None`` without a teacher."""

    log_probs: Tensor
    entropy: Tensor
    kl: Tensor | None = None


def linear_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher_hidden: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    transform: HeadTransform | None = None,
    reverse_kl: bool = False,
    block: int | None = None,
) -> TokenScores:
    """Log-prob, entropy and optionally the KL to a teacher, from hidden states.

    Sums are taken in float32 (float64 for float64 input), whatever the dtype of the input.

    Args:
        hidden: ``[N, D]``, the states that predict the N tokens.
        weight: ``[V, D]``, the head.
        targets: int64 ``[N]``.
        teacher_hidden: ``[N, D]``; the teacher is ``softmax(weight @ teacher_hidden)`` without gradient.
        bias: ``[V]``.
        transform: Temperature, scale and soft-capping of the logits.
        reverse_kl: KL(student || teacher) instead of KL(teacher || student).
        block: Vocabulary entries per block; by default blocks of logits take 2 MiB.

    Returns:
        Scores ``[N]`` in nats, differentiable in ``hidden``, ``weight`` and ``bias``.

    Raises:
        ValueError: if shapes do not fit, a target lies outside the vocabulary, the bias is not finite, or ``block`` is
            no positive int.

    Example:
        >>> scores = linear_scores(torch.zeros(2, 3), torch.zeros(5, 3), torch.tensor([0, 4]), torch.zeros(2, 3))
        >>> scores.log_probs, scores.entropy, scores.kl
        (tensor([-1.6094, -1.6094]), tensor([1.6094, 1.6094]), tensor([0., 0.]))
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden [N, D] {tuple(hidden.shape)} and weight [V, D] {tuple(weight.shape)} do not fit.")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets must be [N] = {tuple(hidden.shape[:1])}, not {tuple(targets.shape)}.")
    if teacher_hidden is not None and teacher_hidden.shape != hidden.shape:
        raise ValueError(f"teacher_hidden {tuple(teacher_hidden.shape)} and hidden {tuple(hidden.shape)} differ.")
    vocabulary = weight.shape[0]
    if targets.numel() and not bool(((targets >= 0) & (targets < vocabulary)).all()):
        raise ValueError(f"targets must lie in [0, {vocabulary}); got {int(targets.min())} to {int(targets.max())}.")
    if bias is not None and (bias.shape != weight.shape[:1] or not bool(bias.isfinite().all())):
        raise ValueError(
            f"bias must be finite and [V] = {tuple(weight.shape[:1])}, not {tuple(bias.shape)}; a banned token (-inf) "
            "has no entropy or KL here."
        )
    if block is not None and (isinstance(block, bool) or not isinstance(block, int) or block < 1):
        raise ValueError(f"block must be a whole number of at least 1 vocabulary entries, not {block!r}.")
    if block is None:
        block = max(256, _BLOCK_BYTES // (4 * max(1, hidden.shape[0])))
    log_probs, entropy, kl = FusedHead.apply(
        hidden, weight, bias, targets, teacher_hidden, transform or HeadTransform(), reverse_kl, block
    )
    return TokenScores(log_probs, entropy, kl)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    transform: HeadTransform | None = None,
    block: int | None = None,
) -> Tensor:
    """Log-prob of each target from hidden states, without a ``[N, V]`` tensor.

    Args:
        hidden: ``[N, D]``.
        weight: ``[V, D]``.
        targets: int64 ``[N]``.
        bias: ``[V]``.
        transform: Temperature, scale and soft-capping of the logits.
        block: Vocabulary entries per block.

    Returns:
        ``[N]`` in nats, differentiable.

    Raises:
        ValueError: as `linear_scores`.

    Example:
        >>> linear_log_probs(torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([2]))
        tensor([-1.3863])
    """
    return linear_scores(hidden, weight, targets, bias=bias, transform=transform, block=block).log_probs


def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    *,
    bias: Tensor | None = None,
    transform: HeadTransform | None = None,
    reverse: bool = False,
    block: int | None = None,
) -> Tensor:
    """KL(teacher || student) over the whole vocabulary from hidden states, without a ``[N, V]`` tensor.

    Args:
        hidden: ``[N, D]``, the student's.
        weight: ``[V, D]``, the head of both.
        teacher_hidden: ``[N, D]``, without gradient.
        bias: ``[V]``.
        transform: Temperature, scale and soft-capping of the logits of both.
        reverse: KL(student || teacher) instead.
        block: Vocabulary entries per block.

    Returns:
        ``[N]`` in nats, differentiable in the student.

    Raises:
        ValueError: as `linear_scores`.

    Example:
        >>> linear_kl(torch.zeros(1, 3), torch.eye(3), torch.zeros(1, 3))
        tensor([0.])
    """
    targets = torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    scores = linear_scores(
        hidden, weight, targets, teacher_hidden, bias=bias, transform=transform, reverse_kl=reverse, block=block
    )
    assert scores.kl is not None
    return scores.kl
