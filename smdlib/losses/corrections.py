"""Corrections for learners that do not replay the mask: reweight or reject what the sparse sampler produced.

They are the baselines that Shadow Mask Distillation replaces. All compare the dense policy as it was when the data was
sampled with the sparse sampler, ``pi_dense_old / pi_sparse``, and belong to a `GRPOLoss` built with ``dense=True``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from smdlib.losses.segments import segment_mean, segment_sum


class CorrectionValue(NamedTuple):
    """Weight of each loss token (0 where rejected) and which were kept, float32 and bool ``[N]``."""

    weights: Tensor
    kept: Tensor


class Correction(Protocol):
    """Turns the mismatch of old dense policy and sampler into weights of the objective."""

    def __call__(self, log_ratio: Tensor, lengths: Tensor) -> CorrectionValue:
        """Weigh tokens.

        Args:
            log_ratio: ``log pi_dense_old - log pi_sparse`` of the loss tokens, ``[N]`` in nats, without gradient.
            lengths: int64 ``[B]``, loss tokens of each row.
        """
        ...


def _levelled(log_ratio: Tensor, lengths: Tensor, level: str) -> Tensor:
    """The token's own log-ratio, or the geometric mean of its row's."""
    if level == "token":
        return log_ratio
    return segment_mean(log_ratio, lengths).repeat_interleave(lengths)


def _check_level(level: str) -> None:
    if level not in ("token", "sequence"):
        raise ValueError(f"level must be 'token' or 'sequence', not {level!r}.")


@dataclass(frozen=True)
class Unweighted:
    """Every token weighs 1, however unlikely the dense policy finds it: no correction.

    Given as ``correction=``, it makes the dense policy from before the update (``old_log_prob``) the denominator of the
    ratio, as in trainers that score the samples anew and forget who sampled them. Without a correction at all
    the denominator is the sampler.

    Example:
        >>> Unweighted()(torch.tensor([0.0, 1.0]), torch.tensor([2])).weights
        tensor([1., 1.])
    """

    def __call__(self, log_ratio: Tensor, lengths: Tensor) -> CorrectionValue:
        """Weigh the tokens of the ratios ``[N]`` alike; every token is kept."""
        weights = torch.ones_like(log_ratio)
        return CorrectionValue(weights, weights.bool())


@dataclass(frozen=True)
class TruncatedIS:
    """``min(pi_dense_old / pi_sparse, cap)`` as a weight (truncated importance sampling).

    Args:
        cap: Largest weight, above 0.
        level: ``"token"``, or ``"sequence"`` for the geometric mean over the row.

    Example:
        >>> TruncatedIS(cap=2.0)(torch.tensor([0.0, 1.0]), torch.tensor([2])).weights
        tensor([1., 2.])
    """

    cap: float = 2.0
    level: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        _check_level(self.level)
        if not (self.cap > 0 and math.isfinite(self.cap)):
            raise ValueError(f"cap must be a finite weight above 0, not {self.cap}.")

    def __call__(self, log_ratio: Tensor, lengths: Tensor) -> CorrectionValue:
        """Truncate the ratios ``[N]``; every token is kept."""
        weights = _levelled(log_ratio, lengths, self.level).clamp(max=math.log(self.cap)).exp()
        return CorrectionValue(weights, torch.ones_like(weights, dtype=torch.bool))


@dataclass(frozen=True)
class MaskedIS:
    """The ratio as a weight where it lies in ``[low, high]``, 0 elsewhere (masked importance sampling).

    Args:
        low: Smallest accepted ratio.
        high: Largest accepted ratio.
        level: ``"token"``, or ``"sequence"`` for the geometric mean over the row, which keeps or rejects whole rows.

    Example:
        >>> MaskedIS(0.5, 2.0)(torch.tensor([0.0, 1.0]), torch.tensor([2])).weights
        tensor([1., 0.])
    """

    low: float = 0.5
    high: float = 2.0
    level: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        _check_level(self.level)
        if not 0 <= self.low <= self.high:
            raise ValueError(f"accepted ratios need 0 <= low <= high, not low={self.low}, high={self.high}.")

    def __call__(self, log_ratio: Tensor, lengths: Tensor) -> CorrectionValue:
        """Keep ratios inside the bounds."""
        ratio = _levelled(log_ratio, lengths, self.level).exp()
        kept = (ratio >= self.low) & (ratio <= self.high)
        return CorrectionValue(torch.where(kept, ratio, 0.0), kept)


@dataclass(frozen=True)
class SparseRLCorrection:
    """The released rule of Sparse-RL: truncate, mask tokens, drop sequences, normalise.

    The token ratio is truncated at ``cap``; tokens with a ratio outside ``[low, cap]`` are masked; a sequence with any
    ratio below ``drop_below`` is dropped; the weights that remain are scaled to mean 1 over the batch that the loss
    is given.

    Args:
        low: Smallest accepted token ratio.
        cap: Largest accepted token ratio, and truncation.
        drop_below: A ratio below it drops its sequence.

    Example:
        >>> rule = SparseRLCorrection()
        >>> rule(torch.tensor([0.0, 1.0, -10.0, 0.0]), torch.tensor([2, 2])).weights
        tensor([1., 0., 0., 0.])
    """

    low: float = 0.5
    cap: float = 1.5
    drop_below: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.drop_below <= self.low <= self.cap:
            raise ValueError(f"thresholds need 0 <= drop_below <= low <= cap, not {self}.")

    def __call__(self, log_ratio: Tensor, lengths: Tensor) -> CorrectionValue:
        """Apply the rule to the ratios ``[N]``."""
        ratio = log_ratio.exp()
        lost = segment_sum((ratio < self.drop_below).to(ratio.dtype), lengths) > 0
        kept = (ratio >= self.low) & (ratio <= self.cap) & ~lost.repeat_interleave(lengths)
        weights = torch.where(kept, ratio.clamp(max=self.cap), 0.0)
        return CorrectionValue(weights * kept.sum() / weights.sum().clamp(min=1e-12), kept)
