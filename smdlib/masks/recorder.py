"""Writes down, while sampling, when each key left the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from smdlib.masks.shadow import NEVER, UNKNOWN, ShadowMask

_BLOCK = 256


class ShadowMaskRecorder:
    """Records the evictions of one `smdlib.cache.CompressedCache` and turns them into a `ShadowMask`.

    Pass it to the cache, generate, then ask for the mask. A new cache (or ``cache.reset()``) starts a new record.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from smdlib import CompressedCache, MaskedAttentionAdapter, ShadowMaskRecorder
        >>> model = LlamaForCausalLM(
        ...     LlamaConfig(
        ...         vocab_size=32,
        ...         hidden_size=16,
        ...         intermediate_size=16,
        ...         num_hidden_layers=2,
        ...         num_attention_heads=4,
        ...         num_key_value_heads=2,
        ...     )
        ... ).eval()
        >>> recorder = ShadowMaskRecorder()
        >>> with MaskedAttentionAdapter(model), torch.no_grad():
        ...     cache = CompressedCache(model.config, "streaming", budget=8, recorder=recorder)
        ...     tokens = model.generate(torch.arange(12)[None], cache=cache, max_new_tokens=3, min_new_tokens=3)
        >>> recorder.shadow_mask(lengths=[15]).evicted_at[0, :8, 0, 0].tolist()[3:]
        [2147483647, 12, 12, 12, 12]
    """

    def __init__(self) -> None:
        self._layers: list[Tensor | None] = []
        self._seen: Tensor | None = None
        self._columns = 0
        self._owner: object = None
        self._ids: list[Tensor] = []  # columns of padded token ids, [B, Q] each

    def begin(self, num_layers: int, owner: object) -> None:
        """Start an empty record.

        Args:
            num_layers: Number of attention layers of the cache.
            owner: Stands for the cache; only it may write from now on.
        """
        self._owner = owner
        self._ids = []
        self._layers = [None] * num_layers
        self._seen, self._columns = None, 0

    def observe(self, owner: object, seen: Tensor, columns: int) -> None:
        """Note how many tokens each row has seen.

        Args:
            owner: Stands for the cache that saw them.
            seen: int64 ``[B]``.
            columns: Padded columns so far, at least ``seen.max()``.

        Raises:
            RuntimeError: if another cache has begun a record here meanwhile.
        """
        self._check_owner(owner)
        self._seen, self._columns = seen, columns

    def observe_tokens(self, owner: object, ids: Tensor) -> None:
        """Note the ids of the tokens that the model is about to see.

        Args:
            owner: Stands for the cache that is about to see them.
            ids: int64 ``[B, Q]``, padded columns.

        Raises:
            RuntimeError: if another cache has begun a record here meanwhile.
        """
        self._check_owner(owner)
        self._ids.append(ids.to(torch.int32))

    def _check_owner(self, owner: object) -> None:
        if owner is not self._owner:
            raise RuntimeError(
                "this ShadowMaskRecorder has begun the record of another cache since; two caches in use at the same "
                "time need a recorder each."
            )

    def record(self, layer_idx: int, positions: Tensor, evicted: Tensor | None, seen: Tensor) -> None:
        """Note evictions of one layer.

        Args:
            layer_idx: Index of the layer.
            positions: int64 ``[B, H, K]``, unpadded positions of keys.
            evicted: bool ``[B, H, K]``, which of them have just been evicted; ``None`` for all.
            seen: int64 ``[B]``; the first query that cannot see them any more is the one at position ``seen[b]``.
        """
        table = self._table(layer_idx, positions)
        # The last column takes the writes of keys that stay.
        index = positions if evicted is None else torch.where(evicted, positions, table.shape[2] - 1)
        table.scatter_(2, index, seen.to(torch.int32)[:, None, None].expand_as(index))

    def _table(self, layer_idx: int, positions: Tensor) -> Tensor:
        """Return int32 ``[B, H, capacity + 1]`` of a layer, large enough for all columns so far."""
        table = self._layers[layer_idx]
        if table is None or table.shape[2] <= self._columns:
            old = table
            # Grows by half, so that the copies stay rare however long the response gets.
            capacity = self._columns + max(_BLOCK, self._columns // 2)
            table = torch.full((*positions.shape[:2], capacity + 1), NEVER, dtype=torch.int32, device=positions.device)
            if old is not None:
                table[:, :, : old.shape[2] - 1] = old[:, :, :-1]
            self._layers[layer_idx] = table
        return table

    def map_rows(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Follow the cache when its rows are repeated or selected.

        Args:
            rows: Applied to every tensor whose first dimension is the batch.
        """
        self._layers = [None if table is None else rows(table) for table in self._layers]
        self._seen = None if self._seen is None else rows(self._seen)
        self._ids = [rows(ids) for ids in self._ids]

    def shadow_mask(self, lengths: Tensor | Sequence[int] | None = None) -> ShadowMask:
        """Return what was recorded.

        Args:
            lengths: int ``[B]``, unpadded length of each row's whole sequence, so that tokens fed to a row after its
                end leave no trace; at most one more than the tokens the row has seen, since the last sampled token is
                never fed. Default: the tokens seen.

        Returns:
            A mask with ``evicted_at`` int32 ``[B, max(lengths), L, H]``, right-padded with ``NEVER``, and the
            token ids.

        Raises:
            RuntimeError: if nothing was recorded yet.
            ValueError: if the lengths do not fit the record.
        """
        if self._seen is None or any(table is None for table in self._layers):
            raise RuntimeError(
                "nothing recorded yet: pass this recorder to a CompressedCache(..., recorder=recorder) and run the "
                "model with it first."
            )
        seen = self._seen
        ends = seen if lengths is None else torch.as_tensor(lengths, dtype=torch.int64, device=seen.device)
        if ends.shape != seen.shape:
            raise ValueError(f"lengths has shape {tuple(ends.shape)}, but the record holds {seen.shape[0]} rows.")
        if bool(((ends > seen + 1) | (ends < 1)).any()):
            raise ValueError(
                f"lengths must lie between 1 and the tokens seen + 1 ({(seen + 1).tolist()}), not {ends.tolist()}. "
                "Lengths count the real tokens of prompt and response, without padding."
            )
        total = int(ends.max())
        # Layers that evict seldom have shorter tables; the last column of each belongs to keys that stayed.
        tables = [table[:, :, : min(total, table.shape[2] - 1)] for table in self._layers if table is not None]
        padded = [
            torch.nn.functional.pad(table, (0, total - table.shape[2]), value=NEVER).to(seen.device) for table in tables
        ]
        evicted_at = torch.stack(padded, dim=1)
        # An eviction after the last query of a row changes nothing that the row has seen.
        evicted_at = torch.where(evicted_at < ends[:, None, None, None], evicted_at, NEVER)
        return ShadowMask(
            evicted_at=evicted_at.permute(0, 3, 1, 2).contiguous(),
            token_ids=self._unpadded_ids(seen, ends, total),
            batch_size=[evicted_at.shape[0]],
        )

    def _unpadded_ids(self, seen: Tensor, ends: Tensor, total: int) -> Tensor | None:
        """Return int32 ``[B, total]``, or ``None`` if some call did not say its tokens."""
        if sum(ids.shape[1] for ids in self._ids) != self._columns:
            return None
        ids = torch.cat(self._ids, dim=1).to(seen.device)
        position = torch.arange(total, device=seen.device)
        column = position + (self._columns - seen)[:, None]
        known = position < torch.minimum(seen, ends)[:, None]
        return torch.where(known, ids.gather(1, column.clamp(max=self._columns - 1)), UNKNOWN)
