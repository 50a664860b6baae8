"""Which slots of a layer are taken, and by what: the bookkeeping that is the same wherever the keys themselves lie."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EMPTY = -1


class SlotTable:
    """Positions and attention mass of the slots of one layer, and which slots the next tokens take.

    Attributes:
        positions: int64 ``[B, H, S]``, unpadded token index, ``-1`` for an empty slot.
        mass: float32 ``[B, H, S]`` attention mass of each slot, or ``None`` where no policy asks for it.
        used: slots ``[0, used)`` may hold keys, all later ones are empty.
        held: number of keys, where every row and head is known to hold equally many, else ``None``.
    """

    def __init__(self, batch: int, heads: int, size: int, tracks_mass: bool, device: torch.device) -> None:
        """All ``size`` slots of every row and head are empty."""
        self.positions = torch.full((batch, heads, size), EMPTY, dtype=torch.int64, device=device)
        self.mass = torch.zeros(batch, heads, size, device=device) if tracks_mass else None
        self.used = 0
        self.held: int | None = None
        self._free = self.positions[:, :, :0]
        self._next_free = 0
        self._holes = 0  # of the free slots in the queue, those at its front that lie below `used` for certain

    @property
    def size(self) -> int:
        """Number of slots per row and head; of the largest head where they differ."""
        return self.positions.shape[2]

    @property
    def room(self) -> int:
        """How many tokens can be written before slots have to be freed or added."""
        return self._free.shape[2] - self._next_free

    @property
    def full(self) -> bool:
        """Whether every slot in use is known to hold a key."""
        return self.held == self.used

    def find_free(self, count: int) -> None:
        """Queue the ``count`` lowest empty slots of every row and head for the next tokens.

        A head whose own slots hold its keys and ``count`` more is given no others, however wide the table is.
        """
        self._next_free = self._holes = 0
        if self.full:
            beyond = torch.arange(self.used, self.used + count, device=self.positions.device)
            self._free = beyond.expand(*self.positions.shape[:2], -1)
            return
        rank = torch.arange(self.size, 0, -1, device=self.positions.device)
        rank = torch.where(self.positions < 0, rank, 0)
        self._free = rank.topk(count, dim=2).indices

    def free(self, index: Tensor, valid: Tensor) -> None:
        """Empty the slots ``index [B, H, N]`` where ``valid``; nothing is moved."""
        at = self.positions.gather(2, index)
        self.positions.scatter_(2, index, torch.where(valid, EMPTY, at))
        self.held = None

    def free_for_next(self, index: Tensor) -> None:
        """Empty the slots ``index [B, H, N]`` of a `full` table, all of which hold keys; the next tokens take them."""
        self.positions.scatter_(2, index, EMPTY)
        self.held = self.used - index.shape[2]
        self._free, self._next_free, self._holes = index, 0, index.shape[2]

    def _take(self, position: Tensor) -> Tensor:
        """Book the next free slot of every row and head for the token at ``position [B]``; returns ``[B, H, 1]``."""
        slot = self._free[:, :, self._next_free : self._next_free + 1]
        self._next_free += 1
        self.positions.scatter_(2, slot, position[:, None, None].expand_as(slot))
        if self.mass is not None:
            self.mass.scatter_(2, slot, 0.0)
        if self._holes:
            self._holes -= 1
        else:
            # Lowest-first filling never reaches beyond one past the highest slot in use.
            self.used = min(self.size, self.used + 1)
        self.held = None if self.held is None else self.held + 1
        return slot

    def _refill(self, positions: Tensor, mass: Tensor | None, index: Tensor, valid: Tensor) -> None:
        """Replace the content by the keys ``index [B, H, N]`` of those at ``positions [B, H, K]``, where ``valid``."""
        kept = index.shape[2]
        kept_positions = torch.where(valid, positions.gather(2, index), EMPTY)  # `positions` may be a view of ours
        self.positions.fill_(EMPTY)
        self.positions[:, :, :kept] = kept_positions
        if self.mass is not None and mass is not None:
            self.mass.zero_()
            self.mass[:, :, :kept] = torch.where(valid, mass.gather(2, index), 0.0)
        self.used = kept
        self.held = kept if bool(valid.all()) else None

    def _extend(self, extra: int) -> None:
        """Add ``extra`` empty slots to every row and head."""
        self.positions = torch.nn.functional.pad(self.positions, (0, extra), value=EMPTY)
        self.mass = None if self.mass is None else torch.nn.functional.pad(self.mass, (0, extra))

    def map_rows(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Replace every row-wise tensor by ``rows(tensor)`` (repeat or select rows)."""
        self.positions, self._free = rows(self.positions), rows(self._free)
        self.mass = None if self.mass is None else rows(self.mass)
