"""What a policy sees of one layer's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheView:
    """All that a policy sees of one layer, for B rows, H KV heads, K slots, Hq query heads and head size D.

    A slot holds one key and its value. Slots are in no particular order: after decode eviction a new key takes the slot
    of an old one. Always read ``positions``, never the slot's index.

    Attributes:
        layer_idx: index of the layer, from 0.
        num_layers: number of layers that the cache holds.
        keys: ``[B, H, K, D]``, with the rotary embedding of their own position.
        values: ``[B, H, K, D]``.
        positions: ``[B, H, K]`` int64, index of the key's token in its row without padding; -1 for an empty slot.
        seen: ``[B]`` int64, tokens each row has seen so far, so that its newest key has position ``seen - 1``.
        queries: ``[B, Hq, W, D]``, the last W queries, newest last, or None. Query i of row b has position
            ``seen[b] - W + i``; where that is negative there is no such query, and its content means nothing.
        attention: ``[B, H, K]``, attention mass each key has received so far, summed over the queries and over the
            group's query heads, or None.
        budget: ``[B, H]`` int64, number of keys that each head may keep.
        scaling: factor on the query-key products before the softmax.
        generators: one random generator per row, or None.
        token_ids: ``[B, H, K]`` int64, id of the key's token, -1 for an empty slot, or None.
        gapless: ``positions`` itself where its maker knows that no slot is empty, else None; see `all_present`.

    Example:
        >>> import torch
        >>> view = CacheView.of_prompt(torch.zeros(2, 1, 4, 8), budget=2, lengths=torch.tensor([4, 3]))
        >>> view.positions
        tensor([[[ 0,  1,  2,  3]],
                [[-1,  0,  1,  2]]])
        >>> view.newest(2)
        tensor([[[False, False,  True,  True]],
                [[False, False,  True,  True]]])
    """

    layer_idx: int
    num_layers: int
    keys: Tensor
    values: Tensor
    positions: Tensor
    seen: Tensor
    budget: Tensor
    scaling: float
    queries: Tensor | None = None
    attention: Tensor | None = None
    generators: Sequence[torch.Generator] | None = None
    token_ids: Tensor | None = None
    gapless: Tensor | None = None

    @classmethod
    def of_prompt(
        cls,
        keys: Tensor,
        values: Tensor | None = None,
        *,
        budget: int,
        lengths: Tensor | None = None,
        queries: Tensor | None = None,
        attention: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> CacheView:
        """View of one layer after a prefill, left-padded, slots in order: to try or test a policy without a model.

        Args:
            keys: ``[B, H, T, D]``.
            values: ``[B, H, T, D]``, the keys if None.
            budget: keys that each head may keep.
            lengths: ``[B]`` int64, tokens of each row without its left padding, T if None.
            queries: ``[B, Hq, W, D]``.
            attention: ``[B, H, T]``.
            token_ids: ``[B, T]`` int64.
        """
        rows, heads, tokens, size = keys.shape
        seen = torch.full((rows,), tokens, device=keys.device) if lengths is None else lengths
        positions = torch.arange(tokens, device=keys.device) - (tokens - seen)[:, None]
        if token_ids is not None:
            token_ids = torch.where(positions >= 0, token_ids, -1)[:, None].expand(rows, heads, tokens)
        return cls(
            layer_idx=0,
            num_layers=1,
            keys=keys,
            values=keys if values is None else values,
            positions=positions.clamp(min=-1)[:, None].expand(rows, heads, tokens),
            seen=seen,
            budget=torch.full((rows, heads), budget, device=keys.device),
            scaling=size**-0.5,
            queries=queries,
            attention=attention,
            token_ids=token_ids,
        )

    @property
    def present(self) -> Tensor:
        """Which slots hold a key, ``[B, H, K]`` bool."""
        return self.positions >= 0

    @property
    def all_present(self) -> bool:
        """Whether every slot is known to hold a key, without a look at the tensors; False says nothing."""
        # The same object: a view copied with other positions does not inherit what was known of these.
        return self.gapless is self.positions

    @property
    def num_kv_heads(self) -> int:
        """H, the number of KV heads."""
        return self.positions.shape[1]

    def newest(self, count: int | Tensor) -> Tensor:
        """Which slots hold one of the last tokens of their row, ``[B, H, K]`` bool.

        Args:
            count: number of tokens (not of keys that are still there), one for all or ``[B, H]``.
        """
        first = (self.seen[:, None] - count).clamp(min=0)  # never as low as an empty slot's -1
        return self.positions >= first.unsqueeze(-1)

    def protect(self, scores: Tensor, protected: Tensor) -> Tensor:
        """Scores with ``+inf`` for protected keys and ``-inf`` for empty slots, ``[B, H, K]``.

        Args:
            scores: ``[B, H, K]`` float32.
            protected: ``[B, H, K]`` bool.
        """
        # torch.where, not masked_fill: this runs at every decoded token, and masked_fill takes twice as long.
        kept = torch.where(protected, float("inf"), scores)
        return kept if self.all_present else torch.where(self.present, kept, float("-inf"))
