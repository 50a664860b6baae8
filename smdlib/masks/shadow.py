"""The shadow mask: one integer per key says from which query on it was gone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorClass
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEVER = 2**31 - 1
"""``evicted_at`` of a key that was never evicted."""

UNKNOWN = -1  # token id of padding, and of the last sampled token, which is never fed


class ShadowMask(TensorClass["nocast"]):  # noqa: D101 (the decorator replaces it: see below)
    evicted_at: Tensor
    token_ids: Tensor | None = None

    @classmethod
    def dense(cls, *shape: int, device: torch.device | str | None = None) -> ShadowMask:
        """Return the mask of a rollout without eviction.

        Args:
            *shape: ``*batch, T, L, H``.
            device: Where it lives.

        Example:
            >>> ShadowMask.dense(2, 5, 3, 1).evicted_at.shape
            torch.Size([2, 5, 3, 1])
        """
        evicted_at = torch.full(shape, NEVER, dtype=torch.int32, device=device)
        return cls(evicted_at=evicted_at, batch_size=shape[:-3])

    @property
    def num_tokens(self) -> int:
        """Tokens T."""
        return self.evicted_at.shape[-3]

    @property
    def nbytes(self) -> int:
        """Bytes of the record, 4 per token, layer and KV head."""
        return self.evicted_at.nbytes

    def visible(self, layer: int, queries: Tensor | Sequence[int] | None = None) -> Tensor:
        """Expand one layer to the boolean mask that its queries saw (sliding windows of the model not included).

        Args:
            layer: Layer index.
            queries: int ``[Q]``, unpadded query positions; all by default.

        Returns:
            bool ``[*batch, H, Q, T]``.
        """
        gone = self.evicted_at[..., layer, :].transpose(-1, -2).unsqueeze(-2)  # [*batch, H, 1, T]
        keys = torch.arange(self.num_tokens, device=gone.device)
        at = keys if queries is None else torch.as_tensor(queries, device=gone.device)
        return (keys <= at[:, None]) & (at[:, None] < gone)

    def retention(
        self, lengths: Tensor | Sequence[int] | None = None, first: Tensor | Sequence[int] | None = None
    ) -> Tensor:
        """Share of the causally possible (query, key) pairs that were visible.

        Args:
            lengths: int ``[*batch]``, unpadded lengths of the rows; ``T`` by default.
            first: int ``[*batch]``, count queries from this position on, such as the prompt length; 0 by default.

        Returns:
            float32 ``[*batch, L, H]``, 1 without eviction.

        Raises:
            ValueError: unless ``0 <= first < lengths <= T``.
        """
        device, batch = self.evicted_at.device, self.evicted_at.shape[:-3]
        end = _per_row(lengths, self.num_tokens, batch, device)
        start = _per_row(first, 0, batch, device)
        keys = torch.arange(self.num_tokens, device=device)[:, None, None]
        if bool((end > self.num_tokens).any()) or bool((start < 0).any()) or bool((start >= end).any()):
            raise ValueError(
                f"retention needs 0 <= first < lengths <= {self.num_tokens} tokens, not "
                f"first={start.flatten().tolist()}, lengths={end.flatten().tolist()}."
            )
        # Key k is seen by queries max(k, start) .. min(evicted_at, end) - 1.
        seen = torch.minimum(self.evicted_at.long(), end) - torch.maximum(keys, start)
        pairs = (end * (end + 1) - start * (start + 1)) / 2
        return (seen.clamp(min=0).sum(-3) / pairs[..., 0, :, :]).float()

    def pad(self, num_tokens: int) -> ShadowMask:
        """Return the mask right-padded with ``NEVER`` to ``num_tokens``.

        Args:
            num_tokens: New T, at least the present one.

        Raises:
            ValueError: if it is smaller; use `crop`.
        """
        extra = num_tokens - self.num_tokens
        if extra < 0:
            raise ValueError(f"cannot pad a mask of {self.num_tokens} tokens to {num_tokens}; crop() shortens.")
        evicted_at = torch.nn.functional.pad(self.evicted_at, (0, 0, 0, 0, 0, extra), value=NEVER)
        ids = None if self.token_ids is None else torch.nn.functional.pad(self.token_ids, (0, extra), value=UNKNOWN)
        return ShadowMask(evicted_at=evicted_at, token_ids=ids, batch_size=self.batch_size)

    def crop(self, num_tokens: int) -> ShadowMask:
        """Return the mask of the first ``num_tokens`` tokens.

        Args:
            num_tokens: New T, at most the present one.

        Raises:
            ValueError: if it is larger; use `pad`.
        """
        if not 0 < num_tokens <= self.num_tokens:
            raise ValueError(f"cannot crop a mask of {self.num_tokens} tokens to {num_tokens}; pad() lengthens.")
        evicted_at = self.evicted_at[..., :num_tokens, :, :]
        evicted_at = torch.where(evicted_at < num_tokens, evicted_at, NEVER)
        ids = None if self.token_ids is None else self.token_ids[..., :num_tokens]
        return ShadowMask(evicted_at=evicted_at, token_ids=ids, batch_size=self.batch_size)

    @classmethod
    def stack(cls, masks: Sequence[ShadowMask]) -> ShadowMask:
        """Stack masks of equal batch shape along a new first dimension, padding T to the longest.

        Args:
            masks: At least one mask.

        Raises:
            ValueError: if there is none, or if layers or heads differ.
        """
        if not masks:
            raise ValueError("ShadowMask.stack needs at least one mask.")
        shapes = {tuple(mask.evicted_at.shape[-2:]) for mask in masks}
        if len(shapes) > 1:
            raise ValueError(f"cannot stack masks of different (layers, KV heads): {sorted(shapes)}.")
        longest = max(mask.num_tokens for mask in masks)
        padded = [mask.pad(longest) for mask in masks]
        evicted_at = torch.stack([mask.evicted_at for mask in padded])
        ids = None
        if any(mask.token_ids is not None for mask in padded):
            unknown = torch.full(evicted_at.shape[1:-2], UNKNOWN, dtype=torch.int32, device=evicted_at.device)
            ids = torch.stack([unknown if mask.token_ids is None else mask.token_ids for mask in padded])
        return cls(evicted_at=evicted_at, token_ids=ids, batch_size=evicted_at.shape[:-3])

    def save(self, path: str | Path) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write the mask to one file (safetensors with a checksum), atomically.

        Args:
            path: File to write.
        """
        from smdlib.masks.files import save_mask

        save_mask(self.evicted_at, self.token_ids, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> ShadowMask:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read a mask that `save` wrote.

        Args:
            path: File to read.

        Raises:
            FileNotFoundError: if there is no such file.
            ShadowMaskFileError: if the file is damaged, of another kind, or not a possible record.
        """
        from smdlib.masks.files import load_mask

        evicted_at, ids = load_mask(Path(path))
        return cls(evicted_at=evicted_at, token_ids=ids, batch_size=evicted_at.shape[:-3])

    def plot(self, row: int = 0, path: str | Path | None = None, **options: Any) -> Figure:
        """Draw what each layer and KV head kept over the sequence; see `smdlib.masks.plot.plot_retained_keys`.

        Args:
            row: Row of a batch of masks.
            path: Where to save the picture; not saved by default.
            **options: ``length``, ``prompt_length``, ``title``.

        Returns:
            The matplotlib figure.
        """
        from smdlib.masks.plot import plot_retained_keys

        return plot_retained_keys(self, row=row, path=path, **options)


def _per_row(values: Tensor | Sequence[int] | None, default: int, batch: torch.Size, device: torch.device) -> Tensor:
    """Return one int64 per row, ``[*batch, 1, 1, 1]``."""
    rows = torch.full(batch, default, device=device) if values is None else torch.as_tensor(values, device=device)
    return rows[..., None, None, None]


# TensorClass puts a signature in the place of a docstring.
ShadowMask.__doc__ = """Which keys every query could see while sampling.

Track 1 of Shadow Mask Distillation (arXiv 2605.06850). Eviction is permanent, so the whole boolean mask
per layer and KV head is one number per key::

    visible(query q, key k)  <=>  k <= q  and  q < evicted_at[k]

Positions are those of the unpadded sequence: the record survives padding, slicing, pickling and TorchRL's replay
buffers (rows of different length in a ``LazyStackStorage``, or in a ``ListStorage`` with ``collate_fn=lazy_stack``).
It carries the ids of its tokens, so that it is refused for others.

Args:
    evicted_at: int32 ``[*batch, T, L, H]``, position of the first query that could no longer see the key of token
        ``T`` in layer ``L`` and KV head ``H``; ``NEVER`` (2**31 - 1) for keys never evicted and for padding.
    token_ids: int32 ``[*batch, T]``, ids of the tokens that the sampler was fed, -1 where unknown; ``None`` if none is.

Example:
    >>> evicted_at = torch.full((1, 4, 1, 1), NEVER, dtype=torch.int32)
    >>> evicted_at[0, 1] = 3  # the key of token 1 is last seen by query 2
    >>> mask = ShadowMask(evicted_at=evicted_at, batch_size=[1])
    >>> mask.visible(layer=0)[0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]
    >>> mask.retention().item(), mask.nbytes
    (0.8999999761581421, 16)
"""


def check_record(evicted_at: Tensor) -> None:
    """Refuse numbers that no eviction can have produced.

    Args:
        evicted_at: ``[*batch, T, L, H]``.

    Raises:
        ValueError: if the dtype is not int32, dimensions are missing, or a key is gone before its own query.

    Example:
        >>> check_record(torch.zeros(1, 4, 1, 1, dtype=torch.int32))
        Traceback (most recent call last):
        ...
        ValueError: evicted_at is not a record of evictions: a key is gone before its own query ...
    """
    if evicted_at.dtype != torch.int32 or evicted_at.ndim < 3:
        raise ValueError(
            f"evicted_at must be int32 [*batch, T, L, H], not {evicted_at.dtype} of shape {tuple(evicted_at.shape)}."
        )
    own = torch.arange(evicted_at.shape[-3], device=evicted_at.device)[:, None, None]
    if bool((evicted_at <= own).any()):
        raise ValueError(
            "evicted_at is not a record of evictions: a key is gone before its own query (evicted_at[k] <= k). "
            "Was it padded on the left, or is it the mask of something else?"
        )
