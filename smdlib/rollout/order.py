"""The order in which prompts are drawn: a pure function, so that nothing has to be saved to resume it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4)
def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """Return the shuffled rows of one pass over the data.

    The same arguments give the same order on every machine and in every version of NumPy, which promises the bits of
    its bit generators but not what ``Generator.permutation`` makes of them. No global generator is read or advanced.

    Args:
        size: Rows of the data set N.
        seed: Not negative.
        epoch: Pass over the data, from 0.

    Returns:
        int64 ``[N]``, read-only: every row once.

    Example:
        >>> epoch_order(5, seed=0, epoch=0), epoch_order(5, seed=0, epoch=1)
        (array([3, 2, 1, 0, 4]), array([4, 1, 2, 0, 3]))
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(size)
    order = np.argsort(bits, kind="stable")
    order.flags.writeable = False  # it is shared by all callers
    return order


def row_at(position: int, size: int, seed: int | None) -> int:
    """Return the row of the data set that is drawn as the ``position``-th prompt.

    Args:
        position: Prompts drawn before it, over all epochs.
        size: Rows of the data set.
        seed: Of the shuffling; ``None`` takes the rows as they come.

    Example:
        >>> [row_at(position, 3, None) for position in range(5)]
        [0, 1, 2, 0, 1]
        >>> [row_at(position, 5, seed=0) for position in range(10)]
        [3, 2, 1, 0, 4, 4, 1, 2, 0, 3]
    """
    epoch, index = divmod(position, size)
    return index if seed is None else int(epoch_order(size, seed, epoch)[index])
