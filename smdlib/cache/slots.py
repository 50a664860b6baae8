"""Where the keys of one layer live: fixed slots, written in place.

A slot holds one key and value per KV head, the position of the token it belongs to (-1 for an empty slot) and, for
policies that ask, the attention mass it has received. An evicted key leaves its slot behind; the next token takes it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import repeat
from torch import Tensor

EMPTY = -1


class KVSlots:
    """Keys and values of one layer on slots allocated once.

    Attributes:
        keys: ``[B, H, S, D]``.
        values: ``[B, H, S, D]``.
        positions: int64 ``[B, H, S]``, unpadded token index, ``-1`` for an empty slot.
        mass: float32 ``[B, H, S]`` attention mass of each slot, or ``None`` where no policy asks for it.
        used: slots ``[0, used)`` may hold keys, all later ones are empty.

    Example:
        >>> slots = KVSlots(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), size=5, tracks_mass=False)
        >>> slots.keys.shape, slots.nbytes
        (torch.Size([1, 2, 5, 4]), 320)
    """

    def __init__(self, keys: Tensor, values: Tensor, size: int, tracks_mass: bool) -> None:
        """Allocate ``size`` slots for keys and values like ``[B, H, *, D]``; autocast may give them two dtypes."""
        batch, heads, _, dim = keys.shape
        self.keys = keys.new_zeros(batch, heads, size, dim)
        self.values = values.new_zeros(batch, heads, size, dim)
        self.positions = torch.full((batch, heads, size), EMPTY, dtype=torch.int64, device=keys.device)
        self.mass = torch.zeros(batch, heads, size, device=keys.device) if tracks_mass else None
        self.used = 0
        self._free = self.positions[:, :, :0]
        self._next_free = 0

    @property
    def size(self) -> int:
        """Number of slots per row and head."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values (the bookkeeping of 8 or 12 bytes a slot is not counted)."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def room(self) -> int:
        """How many tokens can be written before slots have to be freed or added."""
        return self._free.shape[2] - self._next_free

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
        kept = index.shape[2]
        by_channel = index.unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1])
        # Head by head, so that moving keys within the storage takes a copy of one head's keys, not of the layer's.
        for store, offered in ((self.keys, keys), (self.values, values)):
            for head in range(store.shape[1]):
                store[:, head, :kept] = offered[:, head].gather(1, by_channel[:, head])
        kept_positions = torch.where(valid, positions.gather(2, index), EMPTY)
        self.positions.fill_(EMPTY)
        self.positions[:, :, :kept] = kept_positions
        if self.mass is not None and mass is not None:
            self.mass.zero_()
            self.mass[:, :, :kept] = torch.where(valid, mass.gather(2, index), 0.0)
        self.used = kept

    def append(self, keys: Tensor, values: Tensor) -> bool:
        """Write the keys of a prefill chunk behind all others, if there is room; their positions follow later.

        Args:
            keys: ``[B, H, Q, D]``.
            values: ``[B, H, Q, D]``.

        Returns:
            Whether there was room. If not, nothing has been written.
        """
        end = self.used + keys.shape[2]
        if end > self.size:
            return False
        self.keys[:, :, self.used : end] = keys
        self.values[:, :, self.used : end] = values
        if self.mass is not None:
            self.mass[:, :, self.used : end] = 0.0
        self.used = end
        return True

    def find_free(self, count: int) -> None:
        """Queue the ``count`` lowest empty slots of every row and head for the next tokens."""
        rank = torch.arange(self.size, 0, -1, device=self.positions.device)
        rank = torch.where(self.positions < 0, rank, 0)
        self._free = rank.topk(count, dim=2).indices
        self._next_free = 0

    def write(self, key: Tensor, value: Tensor, position: Tensor) -> None:
        """Put one token into the next free slot of every row and head.

        Args:
            key: ``[B, H, 1, D]``.
            value: ``[B, H, 1, D]``.
            position: int64 ``[B]``.
        """
        slot = self._free[:, :, self._next_free : self._next_free + 1]
        self._next_free += 1
        by_channel = slot.unsqueeze(-1).expand(-1, -1, -1, key.shape[-1])
        self.keys.scatter_(2, by_channel, key)
        self.values.scatter_(2, by_channel, value)
        self.positions.scatter_(2, slot, repeat(position, "b -> b h 1", h=slot.shape[1]))
        if self.mass is not None:
            self.mass.scatter_(2, slot, 0.0)
        # Lowest-first filling never reaches beyond one past the highest slot in use.
        self.used = min(self.size, self.used + 1)

    def free(self, index: Tensor, valid: Tensor) -> None:
        """Empty the slots ``index [B, H, N]`` where ``valid``; nothing is moved."""
        at = self.positions.gather(2, index)
        self.positions.scatter_(2, index, torch.where(valid, EMPTY, at))

    def grow(self, extra: int) -> None:
        """Add ``extra`` slots (a new allocation, a copy of this layer)."""
        old = self.size
        bigger = KVSlots(self.keys, self.values, old + extra, self.mass is not None)
        bigger.keys[:, :, :old], bigger.values[:, :, :old] = self.keys, self.values
        bigger.positions[:, :, :old] = self.positions
        if bigger.mass is not None and self.mass is not None:
            bigger.mass[:, :, :old] = self.mass
        self.keys, self.values, self.positions, self.mass = bigger.keys, bigger.values, bigger.positions, bigger.mass

    def map_rows(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Replace every row-wise tensor by ``rows(tensor)`` (repeat or select rows)."""
        self.keys, self.values = rows(self.keys), rows(self.values)
        self.positions, self._free = rows(self.positions), rows(self._free)
        self.mass = None if self.mass is None else rows(self.mass)
