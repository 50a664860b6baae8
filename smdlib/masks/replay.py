"""A shadow mask laid over one padded batch, ready for the attention function."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from smdlib.masks.limits import Limits
from smdlib.masks.shadow import NEVER, UNKNOWN, ShadowMask, check_record
from smdlib.masks.spec import MaskSpec


def row_starts(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Find where the tokens of each row lie.

    Args:
        attention_mask: bool ``[B, C]``, one run of ones per row, padding on either side.

    Returns:
        int64 ``(starts [B], lengths [B])``.

    Raises:
        ValueError: if the ones of a row are not contiguous, or a row has none.

    Example:
        >>> row_starts(torch.tensor([[False, True, True], [True, False, False]]))
        (tensor([1, 0]), tensor([2, 1]))
    """
    lengths = attention_mask.sum(-1)
    starts = attention_mask.int().argmax(-1)
    columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    run = (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])
    if bool((run != attention_mask).any()) or bool((lengths == 0).any()):
        raise ValueError(
            "attention_mask must mark one contiguous run of real tokens in every row, padding on the left or right; "
            "holes in the middle and empty rows have no positions."
        )
    return starts, lengths


class Pass(Protocol):
    """What a pass of the learner hands to attention; remembers which layers have applied it."""

    applied: set[int]

    def limits(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Limits] | None:
        """Say what one layer attends to, but for the model's own pattern.

        Args:
            layer_idx: Index of the layer.
            key: ``[B, H, C, D]`` of this pass's tokens.
            value: ``[B, H, C, D]``.

        Returns:
            Keys and values ``[B, H, K, D]`` with their limits; ``None`` where nothing is evicted: ask `seen`.
        """
        ...

    def seen(self, layer_idx: int, key: Tensor, value: Tensor, spec: MaskSpec) -> tuple[Tensor, Tensor, Tensor | None]:
        """Say what one layer attends to.

        Args:
            layer_idx: Index of the layer.
            key: ``[B, H, C, D]`` of this pass's tokens.
            value: ``[B, H, C, D]``.
            spec: The model's own pattern.

        Returns:
            Keys and values ``[B, H, K, D]``, and bool ``[B, 1 | H, C, K]`` or ``None`` for plain causal attention.
        """
        ...


class Replay:
    """One pass's evictions on padded columns; remembers which layers have applied it.

    Args:
        shadow_mask: Mask ``[B, T, L, H]``.
        starts: int64 ``[B]``, first real column of each row.
        lengths: int64 ``[B]``, real tokens of each row.
        columns: Padded columns C.
    """

    def __init__(self, shadow_mask: ShadowMask, starts: Tensor, lengths: Tensor, columns: int) -> None:
        evicted_at = shadow_mask.evicted_at.to(starts.device)
        column = torch.arange(columns, device=starts.device)
        position = column - starts[:, None]  # [B, C]
        real = (position >= 0) & (position < lengths[:, None])
        recorded = real & (position < evicted_at.shape[1])
        index = position.clamp(0, evicted_at.shape[1] - 1)[:, :, None, None].expand(-1, -1, *evicted_at.shape[2:])
        # Counted in columns, like the model's own pattern; never stays never.
        start = starts.int()[:, None, None, None]
        until = torch.minimum(evicted_at, NEVER - start) + start
        until = torch.where(recorded[:, :, None, None], until.gather(1, index), NEVER)
        until = torch.where(real[:, :, None, None], until, 0)
        self._until = until.permute(2, 0, 3, 1).contiguous()  # [L, B, H, C]
        self._columns = column.int().repeat(len(starts), 1)
        self._blocks: dict[Any, Any] = {}
        self.applied: set[int] = set()

    def limits(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Limits]:
        """Return keys and values as they are, with the limits of every column; see `Pass`."""
        self.applied.add(layer_idx)
        queries, until = self._columns.to(key.device), self._until[layer_idx].to(key.device)
        keys = queries[:, None].repeat(1, until.shape[1], 1)
        return key, value, Limits(queries, keys, until, self._blocks)

    def seen(self, layer_idx: int, key: Tensor, value: Tensor, spec: MaskSpec) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values as they are, and what may be seen, bool ``[B, H, C, C]``; see `Pass`."""
        key, value, limits = self.limits(layer_idx, key, value)
        dense = spec.dense(key.device)
        if dense is None:
            columns = torch.arange(key.shape[2], device=key.device)
            dense = columns <= columns[:, None]
        return key, value, limits.visible() & dense


def check_fits(
    shadow_mask: ShadowMask, lengths: Tensor, columns: int, num_layers: int, num_heads: int, spare: int = 0
) -> None:
    """Refuse a mask that was not recorded for these rows and this model.

    Args:
        shadow_mask: Mask ``[B, T, L, H]``.
        lengths: int64 ``[B]``, real tokens of the rows.
        columns: Padded columns of the batch.
        num_layers: Layers of the model.
        num_heads: KV heads of the model.
        spare: Tokens at the end that the mask need not cover.

    Raises:
        TypeError: if it is no `ShadowMask`.
        ValueError: if batch, tokens, layers or heads differ, or the numbers are no record.
    """
    if not isinstance(shadow_mask, ShadowMask):
        raise TypeError(f"shadow_mask must be a ShadowMask, not {type(shadow_mask).__name__}.")
    evicted_at = shadow_mask.evicted_at
    check_record(evicted_at)
    if evicted_at.ndim != 4 or evicted_at.shape[0] != lengths.shape[0]:
        raise ValueError(
            f"shadow mask of shape {tuple(evicted_at.shape)} does not fit {lengths.shape[0]} rows; expected [B, T, L, "
            "H]."
        )
    tokens, layers, heads = evicted_at.shape[1:]
    if (layers, heads) != (num_layers, num_heads):
        raise ValueError(
            f"shadow mask has {layers} layers and {heads} KV heads, the model has {num_layers} and {num_heads}: "
            "it was recorded with another model."
        )
    longest = int(lengths.max())
    if not longest - spare <= tokens <= columns:
        raise ValueError(
            f"shadow mask covers {tokens} tokens, but the longest row has {longest} tokens in {columns} columns. "
            f"Expected {longest} (or {longest - 1}: the last sampled token is never fed), up to {columns}."
        )


def check_tokens(shadow_mask: ShadowMask, input_ids: Tensor, starts: Tensor, lengths: Tensor) -> None:
    """Refuse tokens that are not those that the mask was recorded with.

    Args:
        shadow_mask: Mask ``[B, T, L, H]``; one without token ids fits any.
        input_ids: int64 ``[B, C]``.
        starts: int64 ``[B]``, first real column of each row.
        lengths: int64 ``[B]``, real tokens of each row.

    Raises:
        ValueError: if an id differs from that recorded at its position.
    """
    recorded = shadow_mask.token_ids
    if recorded is None:
        return
    recorded = recorded.to(input_ids.device)
    position = torch.arange(recorded.shape[1], device=input_ids.device)
    ids = input_ids.gather(1, (starts[:, None] + position).clamp(max=input_ids.shape[1] - 1))
    wrong = (recorded != UNKNOWN) & (position < lengths[:, None]) & (recorded != ids)
    if bool(wrong.any()):
        row, at = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"row {row} has token {int(ids[row, at])} at position {at}, but the mask was recorded with token "
            f"{int(recorded[row, at])} there ({int(wrong.sum())} tokens differ): was the text decoded and tokenised "
            "again, are the rows in another order, or is the attention_mask of a padded batch missing?"
        )
