"""The importance ratio policy / sampler, per token or per sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from smdlib.losses.segments import segment_mean


class Ratio(Protocol):
    """Turns log-ratios of tokens into the log-ratios that the surrogate sees."""

    def __call__(self, log_ratio: Tensor, lengths: Tensor) -> Tensor:
        """Map token log-ratios ``[N]`` of rows with ``lengths [B]`` to ``[N]``, differentiable."""
        ...


@dataclass(frozen=True)
class TokenRatio:
    """Each token its own ratio (PPO, GRPO, DAPO).

    Example:
        >>> import torch
        >>> TokenRatio()(torch.tensor([0.1, 0.5]), torch.tensor([2]))
        tensor([0.1000, 0.5000])
    """

    def __call__(self, log_ratio: Tensor, lengths: Tensor) -> Tensor:
        """Return the token log-ratios ``[N]`` unchanged."""
        return log_ratio


@dataclass(frozen=True)
class SequenceRatio:
    """The geometric mean of a row's token ratios for each of its tokens (GSPO, arXiv 2507.18071, eq. 7).

    Example:
        >>> import torch
        >>> SequenceRatio()(torch.tensor([0.1, 0.5, 0.2]), torch.tensor([2, 1]))
        tensor([0.3000, 0.3000, 0.2000])
    """

    def __call__(self, log_ratio: Tensor, lengths: Tensor) -> Tensor:
        """Return each row's mean log-ratio at each of its tokens, ``[N]``."""
        return segment_mean(log_ratio, lengths).repeat_interleave(lengths)
