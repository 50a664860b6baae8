"""Figures worth logging, over loss tokens only; returned, never logged."""

from __future__ import annotations

import torch
from torch import Tensor


def token_mean(values: Tensor) -> Tensor:
    """Mean of ``values [N]``, 0 without tokens.

    Example:
        >>> token_mean(torch.tensor([1.0, 3.0])), token_mean(torch.tensor([]))
        (tensor(2.), tensor(0.))
    """
    return values.sum() / max(1, values.numel())


def effective_sample_size(log_ratio: Tensor) -> Tensor:
    """Share of the loss tokens that the importance weights leave effective, ``(sum w)^2 / (N sum w^2)``.

    Args:
        log_ratio: ``[N]`` in nats.

    Returns:
        Scalar in (0, 1]; 1 for equal weights or no tokens.

    Example:
        >>> effective_sample_size(torch.zeros(4))
        tensor(1.)
    """
    if log_ratio.numel() == 0:
        return log_ratio.new_ones(())
    log_ess = 2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0)
    return log_ess.exp() / log_ratio.numel()


def mismatch_k1(log_ratio: Tensor) -> Tensor:
    """Mean of ``-log_ratio``: the unbiased estimate of KL(sampler || policy) in nats, which may be negative.

    Args:
        log_ratio: ``log policy - log sampler`` of sampled tokens, ``[N]`` in nats.

    Returns:
        Scalar, 0 without tokens.
    """
    return -token_mean(log_ratio)


def mismatch_k3(log_ratio: Tensor) -> Tensor:
    """Mean of ``exp(r) - 1 - r``: the estimate of KL(sampler || policy) in nats that is never negative.

    Args:
        log_ratio: ``log policy - log sampler`` of sampled tokens, ``[N]`` in nats.

    Returns:
        Scalar, 0 without tokens.
    """
    return token_mean(log_ratio.expm1() - log_ratio)


def acceptance(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Probability that speculative sampling would accept: ``sum_v min(p_v, q_v)``, 1 for equal distributions.

    Its 5th percentile over tokens predicted collapse below 0.86 in Sparrow (arXiv 2606.08446).

    Args:
        p_logits: ``[N, V]``.
        q_logits: ``[N, V]``.

    Returns:
        ``[N]``.

    Example:
        >>> acceptance(torch.zeros(1, 2), torch.tensor([[0.0, -torch.inf]]))
        tensor([0.5000])
    """
    return torch.minimum(p_logits.softmax(-1), q_logits.softmax(-1)).sum(-1)


def zero_variance_groups(rewards: Tensor, group_size: int) -> Tensor:
    """Share of groups whose samples all got the same reward, and so give no gradient.

    Args:
        rewards: ``[B]``, the samples of a prompt next to each other.
        group_size: Samples per prompt.

    Returns:
        Scalar in [0, 1].

    Example:
        >>> zero_variance_groups(torch.tensor([1.0, 1.0, 0.0, 1.0]), group_size=2)
        tensor(0.5000)
    """
    groups = rewards.reshape(-1, group_size)
    return (groups == groups[:, :1]).all(-1).float().mean()
