"""The sizes of a model that memory depends on, read from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from smdlib.cache.support import check_supported, num_kv_heads, text_config


@dataclass(frozen=True)
class Geometry:
    """Sizes of a decoder.

    Attributes:
        layers: L.
        kv_heads: H.
        query_heads: Hq.
        head_size: D of keys and values.
        hidden: Width of the last hidden states.
        vocabulary: V.
        dtype: Of weights, keys and values.
        windows: Of each layer, the tokens that a plain transformers cache holds at most; ``None`` for all.
    """

    layers: int
    kv_heads: int
    query_heads: int
    head_size: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype
    windows: tuple[int | None, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return self.kv_heads * self.head_size * 2 * self.dtype.itemsize


def read_geometry(config: Any, dtype: torch.dtype | str | None = None) -> Geometry:
    """Read the sizes from a configuration.

    Args:
        config: A transformers ``PreTrainedConfig``; no weights are needed.
        dtype: Of weights, keys and values, a name or a torch dtype; that of the configuration by default, float32 if it
            names none.

    Raises:
        UnsupportedModelError: if smdlib cannot replay this architecture exactly.
        ValueError: for a dtype that is none.

    Example:
        >>> from transformers import LlamaConfig
        >>> read_geometry(LlamaConfig(num_key_value_heads=8), "bfloat16").token_bytes
        4096
    """
    check_supported(config)
    text = text_config(config)
    layers = int(text.num_hidden_layers)
    chosen = dtype or getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    if isinstance(chosen, str):
        chosen = getattr(torch, chosen.removeprefix("torch."), None)
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}, expected a floating-point dtype such as 'bfloat16'.")
    return Geometry(
        layers=layers,
        kv_heads=num_kv_heads(config),
        query_heads=int(text.num_attention_heads),
        head_size=int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads),
        hidden=int(text.hidden_size),
        vocabulary=int(text.vocab_size),
        dtype=chosen,
        windows=_windows(text, layers),
    )


def _windows(text: Any, layers: int) -> tuple[int | None, ...]:
    """As transformers' ``DynamicCache(config=...)``, whose windowed layers hold one token less than the window."""
    sliding, chunked = getattr(text, "sliding_window", None), getattr(text, "attention_chunk_size", None)
    types = getattr(text, "layer_types", None) or [_only_type(sliding, chunked)] * layers
    sizes: dict[str, int | None] = {"sliding_attention": sliding, "chunked_attention": chunked}
    windows = [sizes.get(kind) for kind in types]
    return tuple(None if window is None else int(window) - 1 for window in windows)


def _only_type(sliding: int | None, chunked: int | None) -> str:
    if sliding is not None:
        return "sliding_attention"
    return "full_attention" if chunked is None else "chunked_attention"
