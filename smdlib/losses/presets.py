"""The named members of the GRPO family, each a `GRPOLoss` put together from its parts.

They differ in ratio, surrogate and aggregation; advantages come from `group_advantage`, standardised or only centred as
the method says.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from smdlib.losses.aggregate import ConstantMean, SequenceMean, TokenMean
from smdlib.losses.grpo import GRPOLoss
from smdlib.losses.ratio import SequenceRatio, TokenRatio
from smdlib.losses.surrogate import CISPOSurrogate, ClippedSurrogate


def grpo(actor: nn.Module, *, clip: float = 0.2, **options: Any) -> GRPOLoss:
    """GRPO (arXiv 2402.03300, eq. 3): token ratios, symmetric clipping, mean over each row's tokens, then over rows.

    Args:
        actor: The policy.
        clip: Clips ratios to ``[1 - clip, 1 + clip]``.
        **options: ``temperature``, ``dense``, ``correction``, ``kl_to_ref_coeff`` of `GRPOLoss`.

    Returns:
        The loss. Standardise the advantages. The paper's KL to a reference (weight 0.04) is off unless asked for.
    """
    return GRPOLoss(
        actor, ratio=TokenRatio(), surrogate=ClippedSurrogate(clip, clip), aggregation=SequenceMean(), **options
    )


def dr_grpo(actor: nn.Module, *, max_response_length: int, clip: float = 0.2, **options: Any) -> GRPOLoss:
    """Dr. GRPO (arXiv 2503.20783): as GRPO, but each row's sum is divided by a constant instead of its length.

    Args:
        actor: The policy.
        max_response_length: The constant, in tokens.
        clip: Clips ratios to ``[1 - clip, 1 + clip]``.
        **options: As in `grpo`.

    Returns:
        The loss. Only centre the advantages: ``group_advantage(..., standardize=False)``.
    """
    return GRPOLoss(
        actor,
        ratio=TokenRatio(),
        surrogate=ClippedSurrogate(clip, clip),
        aggregation=ConstantMean(max_response_length),
        **options,
    )


def dapo(actor: nn.Module, *, low: float = 0.2, high: float = 0.28, **options: Any) -> GRPOLoss:
    """DAPO (arXiv 2503.14476, eq. 8): clip higher, and the mean over all tokens of the batch.

    Args:
        actor: The policy.
        low: Clips ratios below ``1 - low``.
        high: Clips ratios above ``1 + high``.
        **options: As in `grpo`.

    Returns:
        The loss. Standardise the advantages; dynamic sampling and the penalty for overlong responses are the script's.
    """
    return GRPOLoss(
        actor, ratio=TokenRatio(), surrogate=ClippedSurrogate(low, high), aggregation=TokenMean(), **options
    )


def gspo(actor: nn.Module, *, low: float = 3e-4, high: float = 4e-4, **options: Any) -> GRPOLoss:
    """GSPO (arXiv 2507.18071, eq. 5): one ratio a row, the geometric mean of its tokens', clipped closely.

    Args:
        actor: The policy.
        low: Clips ratios below ``1 - low``.
        high: Clips ratios above ``1 + high``.
        **options: As in `grpo`.

    Returns:
        The loss. Standardise the advantages.
    """
    return GRPOLoss(
        actor, ratio=SequenceRatio(), surrogate=ClippedSurrogate(low, high), aggregation=SequenceMean(), **options
    )


def cispo(actor: nn.Module, *, low: float = 0.0, high: float = 1.2, **options: Any) -> GRPOLoss:
    """CISPO (arXiv 2506.13585, eq. 4): the clipped ratio is a weight without gradient, so no token loses its own.

    Args:
        actor: The policy.
        low: Smallest weight; 0, as in the paper, does not clip below.
        high: Largest weight, the paper's ``1 + eps_high``.
        **options: As in `grpo`.

    Returns:
        The loss. Standardise the advantages.
    """
    return GRPOLoss(actor, ratio=TokenRatio(), surrogate=CISPOSurrogate(low, high), aggregation=TokenMean(), **options)
