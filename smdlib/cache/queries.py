"""The last W queries of a layer, for policies that score keys with them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class QueryWindow:
    """Ring of the newest ``window`` queries of one layer, ``[B, Hq, W, D]``, allocated once.

    Example:
        >>> ring = QueryWindow(window=2)
        >>> ring.push(torch.arange(3.0).reshape(1, 1, 3, 1))
        >>> ring.push(torch.full((1, 1, 1, 1), 9.0))
        >>> ring.newest_last().flatten().tolist()
        [2.0, 9.0]
    """

    def __init__(self, window: int) -> None:
        """Keep ``window`` queries (at least 1)."""
        self.window = window
        self._ring: Tensor | None = None
        self._head = 0

    def push(self, query: Tensor) -> None:
        """Append queries ``[B, Hq, Q, D]``, oldest first."""
        if self._ring is None:
            self._ring = query.new_zeros(*query.shape[:2], self.window, query.shape[-1])
        newest = query[:, :, -self.window :].detach()
        if newest.shape[2] == 1:  # every decoded token
            self._ring[:, :, self._head] = newest[:, :, 0]
            self._head = (self._head + 1) % self.window
            return
        slots = (torch.arange(newest.shape[2], device=query.device) + self._head) % self.window
        self._ring.index_copy_(2, slots, newest)
        self._head = (self._head + newest.shape[2]) % self.window

    def newest_last(self) -> Tensor:
        """Return the window in order; queries that never existed are zeros at the front."""
        if self._ring is None:
            raise RuntimeError("QueryWindow.newest_last() before the first push().")
        return self._ring.roll(-self._head, dims=2)

    def map_rows(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Replace the rows by ``rows(tensor)``."""
        self._ring = None if self._ring is None else rows(self._ring)
