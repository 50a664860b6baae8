"""What the model itself lets a query see: its causal, sliding or chunked pattern and the padding, kept as a function.

transformers builds one dense ``[B, 1, Q, K]`` mask per layer type. Eviction needs the same pattern at other places (one
slot may hold any position), so the adapter's mask function keeps the recipe instead of the dense result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask


class MaskSpec:
    """One forward pass's attention pattern for one kind of layer; handed down in the place of the mask tensor.

    Not a container that wrappers of modules copy or convert, on purpose: FSDP2's mixed precision rebuilds dicts, lists,
    tuples and dataclasses among the arguments of a layer. Positions are unpadded; ``columns`` are those of the padded
    batch.

    Args:
        arguments: The keyword arguments of the transformers mask function.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self._dense: Tensor | None = None
        self._dense_known = False
        self._padding: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """Say what is wrong with a model that computes with its mask before attention."""
        raise AttributeError(
            f"smdlib keeps the recipe of a mask, which has no {name!r}: a model that computes with its mask on the way "
            "to attention cannot be evicted or replayed exactly. Remove its MaskedAttentionAdapter."
        )

    @property
    def ndim(self) -> int:
        """4, as of the mask it stands for: ``generate`` prepares the mask of a static cache before the model asks."""
        return 4

    @property
    def query_length(self) -> int:
        """Number of queries Q."""
        return int(self.arguments["q_length"])

    def dense(self, device: torch.device) -> Tensor | None:
        """Return the model's own mask, bool ``[B, 1, Q, K]`` on ``device``, or ``None`` for plain causal attention."""
        if not self._dense_known:
            self._dense, self._dense_known = sdpa_mask(**self.arguments), True
        return None if self._dense is None else self._dense.to(device)

    def padding(self, batch: int, device: torch.device) -> Tensor:
        """Padded columns in front of each row.

        Args:
            batch: Number of rows B.
            device: Where the result lives.

        Returns:
            int64 ``[B]``.

        Raises:
            ValueError: for padding on the right or in the middle, which a cache cannot continue.
        """
        if self._padding is None:
            mask: Tensor | None = self.arguments.get("attention_mask")
            columns = int(self.arguments["q_offset"]) + self.query_length
            if mask is None:
                self._padding = torch.zeros(batch, dtype=torch.int64, device=device)
            elif mask.shape[1] != columns:
                raise ValueError(
                    f"attention_mask covers {mask.shape[1]} columns, but the cache and the new tokens are {columns}. "
                    "(Does gradient checkpointing drop the cache? Call model.eval() to sample.)"
                )
            else:
                self._padding = left_padding(mask.bool())
        return self._padding.to(device)

    def visible(self, positions: Tensor, padding: Tensor, gapless: bool = False) -> Tensor | None:
        """Evaluate the pattern at arbitrary keys, none of them newer than the newest query.

        Args:
            positions: int64 ``[B, H, K]``, unpadded key positions, ``-1`` for no key.
            padding: int64 ``[B]``, padded columns in front of each row.
            gapless: Whether every position is known to be a key's.

        Returns:
            bool ``[B, H, Q, K]``, or ``None`` if it is known that every key is seen.

        Raises:
            ValueError: if the model overlays a mask that cannot be evaluated key by key.
        """
        if self.query_length == 1 and self._pattern() is causal_mask_function:  # a decoded token: newer than every key
            return None if gapless else (positions >= 0)[:, :, None]
        queries = torch.arange(self.query_length, device=positions.device)[None] + self.arguments["q_offset"]
        return self._evaluate(queries, positions + padding[:, None, None], positions >= 0)

    def between(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Evaluate the pattern at arbitrary queries and keys of rows without padding.

        Args:
            queries: int64 ``[B, Q]``, unpadded positions.
            positions: int64 ``[B, H, K]``, unpadded key positions, ``-1`` for no key.

        Returns:
            bool ``[B, H, Q, K]``.

        Raises:
            ValueError: if the model overlays a mask that cannot be evaluated key by key.
        """
        return self._evaluate(queries, positions, positions >= 0)

    def _evaluate(self, queries: Tensor, keys: Tensor, present: Tensor) -> Tensor:
        """Ask the pattern about queries ``[B | 1, Q]`` and keys ``[B, H, K]``, columns; bool ``[B, H, Q, K]``."""
        row = torch.arange(keys.shape[0], device=keys.device)[:, None, None, None]
        head = torch.arange(keys.shape[1], device=keys.device)[None, :, None, None]
        key = keys[:, :, None, :].clamp(min=0)
        return self._pattern()(row, head, queries[:, None, :, None], key) & present[:, :, None, :]

    def _pattern(self) -> Callable[..., Tensor]:
        if self.arguments.get("use_vmap"):
            raise ValueError(
                "the model overlays a custom mask function (for example for image tokens), which cannot be evaluated "
                "at single keys; smdlib cannot evict or replay under it."
            )
        return self.arguments["mask_function"]


def left_padding(mask: Tensor) -> Tensor:
    """Count the padded columns in front of each row.

    Args:
        mask: bool ``[B, C]``.

    Returns:
        int64 ``[B]``.

    Raises:
        ValueError: for padding on the right or in the middle, which a cache cannot continue.

    Example:
        >>> left_padding(torch.tensor([[False, True, True], [True, True, True]]))
        tensor([1, 0])
    """
    if not bool((mask[:, 1:] >= mask[:, :-1]).all()):
        raise ValueError(
            "a CompressedCache needs left padding: attention_mask must be zeros followed by ones in every row "
            "(tokenizer.padding_side = 'left'), and ones for every generated column."
        )
    return mask.shape[1] - mask.sum(-1)


def mask_spec(**arguments: Any) -> MaskSpec:
    """Mask function registered with transformers: keep the recipe of the mask, build nothing yet.

    Args:
        **arguments: What transformers passes to a mask function.

    Returns:
        The recipe.

    Raises:
        ValueError: if the 2D mask is wider than the keys, as when a cache was dropped on the way.
    """
    mask = arguments.get("attention_mask")
    if isinstance(mask, MaskSpec):
        return mask
    width = int(arguments["kv_length"]) + int(arguments.get("kv_offset", 0))
    if mask is not None and mask.ndim == 2 and mask.shape[1] > width:
        raise ValueError(
            f"attention_mask covers {mask.shape[1]} columns, but cache and input together hold {width} keys. If a "
            "cache was passed, the model dropped it: gradient checkpointing in train mode does that; call model.eval()."
        )
    return MaskSpec(arguments)
