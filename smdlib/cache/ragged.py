"""Slots for heads of unequal budgets: each row and head gets about as many as it needs, in a few rectangular blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smdlib.cache.table import SlotTable

PADDING = 0.25
"""Slots that the blocks of a layer may hold on top of what its heads need, as a share of that."""


@dataclass
class Block:
    """Row-and-head pairs with the same number of slots.

    Attributes:
        pairs: int64 ``[N]``, ``row * H + head``.
        keys: ``[N, S, D]``.
        values: ``[N, S, D]``.
        used: slots ``[0, used)`` may hold keys, all later ones are empty.
    """

    pairs: Tensor
    keys: Tensor
    values: Tensor
    used: int = 0


def plan_blocks(needs: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Group pairs of similar need, into few blocks that together hold at most a quarter more slots than needed.

    Args:
        needs: Slots that each pair needs, at least 1.

    Returns:
        ``(slots, pairs)`` of each block, the largest first.

    Example:
        >>> plan_blocks([10, 100, 9, 95])
        [(100, [1, 3]), (10, [0, 2])]
        >>> plan_blocks([10, 9, 8, 10])
        [(10, [0, 3, 1, 2])]
    """
    order = sorted(range(len(needs)), key=lambda pair: -needs[pair])
    span = needs[order[0]] - needs[order[-1]]
    # Smallest need beside a largest one, by difference and by ratio; the last ratio alone keeps to the padding.
    least = [lambda size, parts=parts: size - span / parts for parts in range(1, 7)]
    least += [lambda size, ratio=ratio: size / ratio for ratio in (5.0, 3.0, 2.0, 1.75, 1.5, 1.4, 1 + PADDING)]
    plans = [_grouped(needs, order, rule) for rule in least]
    good = [blocks for blocks in plans if _slots(blocks) <= (1 + PADDING) * sum(needs)]
    return min(good, key=lambda blocks: (len(blocks), _slots(blocks)))


def _grouped(needs: Sequence[int], order: Sequence[int], least: Callable[[int], float]) -> list[tuple[int, list[int]]]:
    blocks: list[tuple[int, list[int]]] = []
    for pair in order:
        if not blocks or needs[pair] < least(blocks[-1][0]):
            blocks.append((needs[pair], []))
        blocks[-1][1].append(pair)
    return blocks


def _slots(blocks: list[tuple[int, list[int]]]) -> int:
    return sum(size * len(pairs) for size, pairs in blocks)


class RaggedSlots(SlotTable):
    """Keys and values of one layer whose rows and heads have slots of their own number.

    Positions and mass are kept in one table ``[B, H, S]`` as wide as the largest head (8 or 12 bytes a slot); only keys
    and values, the rest of the memory, lie in `blocks`.

    Attributes:
        blocks: Where the keys and values lie; every pair of row and head is in one of them.
        needs: int64 ``[B, H]`` on the CPU, slots that each row and head was to get.

    Example:
        >>> one = torch.zeros(1, 2, 3, 4)
        >>> slots = RaggedSlots(one, one, needs=torch.tensor([[6, 2]]), tracks_mass=False)
        >>> [block.keys.shape for block in slots.blocks], slots.nbytes
        ([torch.Size([1, 6, 4]), torch.Size([1, 2, 4])], 256)
    """

    def __init__(self, keys: Tensor, values: Tensor, needs: Tensor, tracks_mass: bool) -> None:
        """Allocate ``needs [B, H]`` slots for keys and values like ``[B, H, *, D]``."""
        self.needs = needs.to("cpu", copy=True)
        batch, heads, _, self._dim = keys.shape
        super().__init__(batch, heads, int(self.needs.max()), tracks_mass, keys.device)
        self._allocate(keys, values)

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        """Lay out blocks for `needs`, with the dtypes and on the device of ``keys`` and ``values``."""
        self.blocks: list[Block] = []
        for size, chosen in plan_blocks(self.needs.flatten().tolist()):
            pairs = torch.tensor(chosen)
            shape = (len(chosen), size, self._dim)
            self.blocks.append(Block(pairs.to(keys.device), keys.new_zeros(shape), values.new_zeros(shape)))

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values (the bookkeeping of 8 or 12 bytes a slot is not counted)."""
        return sum(block.keys.nbytes + block.values.nbytes for block in self.blocks)

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.positions.shape[0]

    def fill(
        self, keys: Tensor, values: Tensor, positions: Tensor, mass: Tensor | None, index: Tensor, valid: Tensor
    ) -> None:
        """Replace the content by the chosen keys, packed to the front; see `KVSlots.fill`."""
        self._refill(positions, mass, index, valid)
        self.held = None  # the table is wider than the blocks of most heads
        counts = valid.sum(-1).flatten()
        index, heads = index.flatten(0, 1), keys.shape[1]
        for block in self.blocks:
            block.used = int(counts[block.pairs].max())
            row, head = (block.pairs // heads)[:, None], (block.pairs % heads)[:, None]
            chosen = index[block.pairs, : block.used]
            block.keys[:, : block.used] = keys[row, head, chosen]
            block.values[:, : block.used] = values[row, head, chosen]

    def shown(self) -> tuple[Tensor, Tensor]:
        """Keys and values as a copy ``[B, H, used, D]``, as wide as the largest head; empty ones hold anything."""
        return self._padded(self.used)

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Keys and values of all slots in use and of a prefill chunk behind them, a copy that replaces the slots.

        Args:
            keys: ``[B, H, Q, D]``.
            values: ``[B, H, Q, D]``.

        Returns:
            Keys and values ``[B, H, used + Q, D]``, and ``False``: they are not the slots.
        """
        all_keys, all_values = self._padded(self.used + keys.shape[2])
        all_keys[:, :, self.used :], all_values[:, :, self.used :] = keys, values
        self.blocks = []  # other budgets follow, in other blocks
        return all_keys, all_values, False

    def _padded(self, width: int) -> tuple[Tensor, Tensor]:
        first = self.blocks[0]
        shape = (*self.positions.shape[:2], width, self._dim)
        keys, values = first.keys.new_zeros(shape), first.values.new_zeros(shape)
        for block in self.blocks:
            keys.flatten(0, 1)[:, : block.used].index_copy_(0, block.pairs, block.keys[:, : block.used])
            values.flatten(0, 1)[:, : block.used].index_copy_(0, block.pairs, block.values[:, : block.used])
        return keys, values

    def write(self, key: Tensor, value: Tensor, position: Tensor) -> None:
        """Put one token into the next free slot of every row and head; see `KVSlots.write`."""
        slot = self._take(position).flatten()
        key, value = key.flatten(0, 2), value.flatten(0, 2)
        for block in self.blocks:
            at = (torch.arange(len(block.pairs), device=slot.device), slot[block.pairs])
            block.keys.index_put_(at, key[block.pairs])
            block.values.index_put_(at, value[block.pairs])
            block.used = min(block.keys.shape[1], block.used + 1)

    def grow(self, extra: int) -> None:
        """Add ``extra`` slots to every row and head (a new allocation, a copy of this layer)."""
        self._extend(extra)
        self.needs = self.needs + extra
        for block in self.blocks:
            block.keys = torch.nn.functional.pad(block.keys, (0, 0, 0, extra))
            block.values = torch.nn.functional.pad(block.values, (0, 0, 0, extra))

    def map_rows(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Repeat or select rows, in blocks laid out anew, so that the padding stays within its bound."""
        batch, heads = self.positions.shape[:2]
        parents = rows(torch.arange(batch, device=self.positions.device)).cpu()
        old, where = self.blocks, {}
        for block in old:
            where |= {pair: (block, place) for place, pair in enumerate(block.pairs.tolist())}
        super().map_rows(rows)
        self.needs = self.needs[parents]
        self._allocate(old[0].keys, old[0].values)
        for block in self.blocks:
            for place, pair in enumerate(block.pairs.tolist()):
                source, at = where[int(parents[pair // heads]) * heads + pair % heads]
                width = min(source.used, block.keys.shape[1])
                block.keys[place, :width] = source.keys[at, :width]
                block.values[place, :width] = source.values[at, :width]
                block.used = max(block.used, width)
