"""The tokens that a cache has seen, for policies that ask what a key's token is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class TokenLog:
    """Ids of all tokens of a cache, by column.

    Example:
        >>> log = TokenLog()
        >>> log.append(torch.tensor([[0, 7, 8], [4, 5, 6]]))  # the first row begins with one padded column
        >>> log.at(torch.tensor([[[1, 0, -1]], [[2, 0, 1]]]), padding=torch.tensor([1, 0])).tolist()
        [[[8, 7, -1]], [[6, 4, 5]]]
    """

    def __init__(self) -> None:
        self._columns: list[Tensor] = []  # [B, Q] each

    def append(self, ids: Tensor) -> None:
        """Note the tokens ``ids [B, Q]``, padded columns, that the cache is about to see."""
        self._columns.append(ids.to(torch.int64))

    def at(self, positions: Tensor, padding: Tensor) -> Tensor:
        """Ids of the tokens at some positions.

        Args:
            positions: int64 ``[B, H, K]``, unpadded positions, -1 for an empty slot.
            padding: int64 ``[B]``, padded columns in front of each row.

        Returns:
            int64 ``[B, H, K]``, -1 for an empty slot.

        Raises:
            RuntimeError: if some call passed this log by.
        """
        self._columns = [torch.cat(self._columns, dim=1)] if self._columns else [padding.new_zeros(len(padding), 0)]
        ids = self._columns[0].to(positions.device)
        column = positions + padding[:, None, None]
        if int(column.max()) >= ids.shape[1]:
            raise RuntimeError(
                f"the policy asks for token ids, but only {ids.shape[1]} of {int(column.max()) + 1} columns are known: "
                "call the model itself, not a part of it, so that its adapter sees input_ids."
            )
        found = ids[:, None].expand(-1, positions.shape[1], -1).gather(2, column.clamp(min=0))
        return torch.where(positions >= 0, found, -1)

    def reset(self) -> None:
        """Forget all tokens."""
        self._columns = []

    def map_rows(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Follow the cache when its rows are repeated or selected."""
        self._columns = [rows(ids) for ids in self._columns]
