"""Where the keys of one layer live: fixed slots, written in place.

A slot holds one key and value per KV head, the position of the token it belongs to (-1 for an empty slot) and, for
policies that ask, the attention mass it has received. An evicted key leaves its slot behind; the next token takes it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from smdlib.cache.table import EMPTY, SlotTable

__all__ = ["EMPTY", "KVSlots"]


class KVSlots(SlotTable):
    """Keys and values of one layer on slots allocated once, the same number for every row and head.

    Attributes:
        keys: ``[B, H, S, D]``.
        values: ``[B, H, S, D]``.

    Example:
        >>> slots = KVSlots(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), size=5, tracks_mass=False)
        >>> slots.keys.shape, slots.nbytes
        (torch.Size([1, 2, 5, 4]), 320)
    """

    def __init__(self, keys: Tensor, values: Tensor, size: int, tracks_mass: bool) -> None:
        """Allocate ``size`` slots for keys and values like ``[B, H, *, D]``; autocast may give them two dtypes."""
        batch, heads, _, dim = keys.shape
        super().__init__(batch, heads, size, tracks_mass, keys.device)
        self.keys = keys.new_zeros(batch, heads, size, dim)
        self.values = values.new_zeros(batch, heads, size, dim)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values (the bookkeeping of 8 or 12 bytes a slot is not counted)."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.keys.shape[0]

    def fill(
        self, keys: Tensor, values: Tensor, positions: Tensor, mass: Tensor | None, index: Tensor, valid: Tensor
    ) -> None:
        """Replace the content by the chosen keys, packed to the front.

        Args:
            keys: Offered keys ``[B, H, K, D]``, which may be this storage itself.
            values: Offered values ``[B, H, K, D]``.
            positions: int64 ``[B, H, K]``.
            mass: float32 ``[B, H, K]`` or ``None``.
            index: int64 ``[B, H, N]``, which of the K are kept; valid entries first.
            valid: bool ``[B, H, N]``.
        """
        by_channel = index.unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1])
        # Head by head, so that moving keys within the storage takes a copy of one head's keys, not of the layer's.
        for store, offered in ((self.keys, keys), (self.values, values)):
            for head in range(store.shape[1]):
                store[:, head, : index.shape[2]] = offered[:, head].gather(1, by_channel[:, head])
        self._refill(positions, mass, index, valid)

    def shown(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the slots in use, views ``[B, H, used, D]``."""
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Keys and values in use with those of a prefill chunk behind, written into the slots if there is room.

        Args:
            keys: ``[B, H, Q, D]``.
            values: ``[B, H, Q, D]``.

        Returns:
            Keys and values ``[B, H, used + Q, D]``, and whether they are the slots themselves; then ``used`` has grown
            by Q, and `positions` of the new ones follow later. If not, they are a copy.
        """
        end = self.used + keys.shape[2]
        if end > self.size:
            return torch.cat([self.shown()[0], keys], dim=2), torch.cat([self.shown()[1], values], dim=2), False
        with torch.no_grad():
            self.keys[:, :, self.used : end] = keys
            self.values[:, :, self.used : end] = values  # the mass of slots that were never in use is 0
        self.used, self.held = end, None
        return *self.shown(), True

    def write(self, key: Tensor, value: Tensor, position: Tensor) -> None:
        """Put one token into the next free slot of every row and head.

        Args:
            key: ``[B, H, 1, D]``.
            value: ``[B, H, 1, D]``.
            position: int64 ``[B]``.
        """
        by_channel = self._take(position).unsqueeze(-1).expand(-1, -1, -1, key.shape[-1])
        self.keys.scatter_(2, by_channel, key)
        self.values.scatter_(2, by_channel, value)

    def grow(self, extra: int) -> None:
        """Add ``extra`` slots (a new allocation, a copy of this layer)."""
        self._extend(extra)
        self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, extra))
        self.values = torch.nn.functional.pad(self.values, (0, 0, 0, extra))

    def map_rows(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Replace every row-wise tensor by ``rows(tensor)`` (repeat or select rows)."""
        super().map_rows(rows)
        self.keys, self.values = rows(self.keys), rows(self.values)
