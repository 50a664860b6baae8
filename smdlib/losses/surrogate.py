"""Per-token policy objectives, and which tokens they clip."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Ratios beyond exp(20) would overflow, and times an advantage of 0 be NaN.
RATIO_BOUND = 20.0


class SurrogateValue(NamedTuple):
    """Objective to maximise and which tokens were clipped, each ``[N]``."""

    objective: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


class Surrogate(Protocol):
    """A per-token objective of the ratio and the advantage."""

    def __call__(self, log_ratio: Tensor, log_prob: Tensor, advantage: Tensor) -> SurrogateValue:
        """Return the objective ``[N]`` for log-ratios, log-probs (nats) and advantages ``[N]``."""
        ...


@dataclass(frozen=True)
class ClippedSurrogate:
    """``min(r A, clip(r, 1 - low, 1 + high) A)`` (PPO, arXiv 1707.06347, eq. 7; asymmetric as in DAPO, 2503.14476).

    Args:
        low: Clip below ``1 - low``, in [0, 1].
        high: Clip above ``1 + high``, at least 0.
        dual: For negative advantages additionally ``max(., dual * A)``, above 1 (dual-clip PPO, arXiv 1912.09729).

    Raises:
        ValueError: for thresholds out of range.

    Example:
        >>> value = ClippedSurrogate(0.2, 0.2)(torch.tensor([0.5]), torch.tensor([-1.0]), torch.tensor([2.0]))
        >>> value.objective, value.clipped_high
        (tensor([2.4000]), tensor([True]))
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 or not self.high >= 0:
            raise ValueError(f"clip thresholds need 0 <= low <= 1 and high >= 0, not low={self.low}, high={self.high}.")
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"dual clipping bounds the ratio of negative advantages above 1, not at {self.dual}.")

    def __call__(self, log_ratio: Tensor, log_prob: Tensor, advantage: Tensor) -> SurrogateValue:
        """Return the clipped objective ``[N]``."""
        ratio = log_ratio.clamp(-RATIO_BOUND, RATIO_BOUND).exp()
        plain, clipped = ratio * advantage, ratio.clamp(1 - self.low, 1 + self.high) * advantage
        objective = torch.minimum(plain, clipped)
        low = (ratio < 1 - self.low) & (advantage < 0)
        high = (ratio > 1 + self.high) & (advantage > 0)
        if self.dual is not None:
            bound = self.dual * advantage
            high = high | ((advantage < 0) & (objective < bound))
            objective = torch.where(advantage < 0, torch.maximum(objective, bound), objective)
        return SurrogateValue(objective, low, high)


@dataclass(frozen=True)
class CISPOSurrogate:
    """``sg[clip(r, low, high)] A log pi``: clipped tokens keep their gradient (CISPO, arXiv 2506.13585, eq. 4).

    Args:
        low: Smallest weight; 0 does not clip below, as in the paper.
        high: Largest weight, at least ``low`` (the paper's ``1 + eps_high``).

    Example:
        >>> log_prob = torch.tensor([-1.0], requires_grad=True)
        >>> value = CISPOSurrogate(high=1.5)(log_prob + 2.0, log_prob, torch.tensor([1.0]))
        >>> torch.autograd.grad(value.objective.sum(), log_prob)[0]
        tensor([1.5000])
    """

    low: float = 0.0
    high: float = 1.2

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high or not math.isfinite(self.high):
            raise ValueError(f"CISPO weights need 0 <= low <= high < inf, not low={self.low}, high={self.high}.")

    def __call__(self, log_ratio: Tensor, log_prob: Tensor, advantage: Tensor) -> SurrogateValue:
        """Return the weighted log-prob objective ``[N]``."""
        ratio = log_ratio.detach().clamp(max=RATIO_BOUND).exp()
        weight = ratio.clamp(self.low, self.high)
        return SurrogateValue(weight * advantage * log_prob, ratio < self.low, ratio > self.high)
