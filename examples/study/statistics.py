"""Means over seeds, differences paired by seed, and their bootstrap intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True)
class Estimate:
    """A mean with the ends of its 95 % interval, and how many seeds it rests on."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        """Such as ``.842 [.831, .853] (16)``."""
        return f"{short(self.mean)} [{short(self.low)}, {short(self.high)}] ({self.count})"


def bootstrap(values: Sequence[float], resamples: int = RESAMPLES) -> Estimate:
    """Percentile bootstrap of the mean; the same numbers for the same values.

    Args:
        values: One per seed.
        resamples: Draws with replacement.

    Returns:
        Mean, and the 2.5th and 97.5th percentile of the resampled means; of a single value, the value itself.

    Raises:
        ValueError: without values.

    Example:
        >>> print(bootstrap([0.5, 0.5, 0.5]))
        .500 [.500, .500] (3)
    """
    if not len(values):
        raise ValueError("no values to take a mean of.")
    array = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(0).integers(len(array), size=(resamples, len(array)))
    low, high = np.percentile(array[picks].mean(1), (2.5, 97.5))
    return Estimate(float(array.mean()), float(low), float(high), len(array))


def paired(one: Mapping[int, float], other: Mapping[int, float], resamples: int = RESAMPLES) -> Estimate:
    """Interval of the mean difference ``one - other`` over the seeds that both have.

    Raises:
        ValueError: if they have none in common.
    """
    seeds = sorted(one.keys() & other.keys())
    if not seeds:
        raise ValueError("no seed in common.")
    return bootstrap([one[seed] - other[seed] for seed in seeds], resamples)


def short(value: float) -> str:
    """Three decimals, without a zero before the point.

    Example:
        >>> short(0.5), short(-0.25), short(12.3456), short(-0.0001)
        ('.500', '-.250', '12.346', '.000')
    """
    text = f"{round(value, 3) + 0.0:.3f}"
    return text.replace("0.", ".", 1) if text.lstrip("-").startswith("0.") else text
