"""Replay by FlexAttention: a kernel that looks up the limits of each key, instead of a mask of queries times keys.

A mask takes a byte for each row, KV head, query and key, in every layer; limits take two integers for each key. One
mask function captures them, whatever the layer and its pattern, so one compiled kernel serves all layers and lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from smdlib.cache.layer import cache_layer_of
from smdlib.masks.attention import (
    REPLAY_ARGUMENT,
    fused_attention,
    layer_index,
    refuse_eager_only,
    shadow_attention,
)
from smdlib.masks.limits import Limits, is_interval, narrowed
from smdlib.masks.replay import Pass
from smdlib.masks.spec import MaskSpec

_BLOCK = 128
# Variants of one kernel: models, dtypes, gradients or none, a batch of one row. More is a mistake, and an error.
_MOST_VARIANTS = 64

Blocks = tuple[Tensor, Tensor, Tensor, Tensor]


def replay_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskSpec | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function registered with transformers: evictions are replayed by FlexAttention, the rest by sdpa.

    The rest is what `smdlib.masks.attention.shadow_attention` does on fused attention: rollouts, passes without a
    record, and patterns other than causal, sliding and chunked ones, which get their exact dense mask.

    Args:
        module: Attention module; its ``layer_idx`` names the layer.
        query: ``[B, Hq, Q, D]``.
        key: ``[B, H, K, D]``.
        value: ``[B, H, K, D]``.
        attention_mask: The recipe that `smdlib.masks.spec.mask_spec` left.
        scaling: Factor of the logits.
        dropout: Probability of dropping a weight.
        **kwargs: What the model passes on, a `Pass` among it while scoring.

    Returns:
        ``(output [B, Q, Hq, D], None)``.

    Raises:
        RuntimeError: for gradients on the CPU, where FlexAttention has no backward.
        ValueError: if the model needs soft-capping, sinks or a position bias.
    """
    offered = None if dropout else _offered(module, key, value, attention_mask, kwargs.get(REPLAY_ARGUMENT))
    if offered is None:
        return shadow_attention(
            module, query, key, value, attention_mask, scaling, dropout, inner=fused_attention, **kwargs
        )
    refuse_eager_only(module, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return limited_attention(query, *offered, scale).transpose(1, 2).contiguous(), None


def _offered(
    module: nn.Module, key: Tensor, value: Tensor, spec: MaskSpec | Tensor | None, what: Pass | None
) -> tuple[Tensor, Tensor, Limits] | None:
    """Keys, values and their limits in a pass that replays evictions; ``None`` for all that is left to sdpa."""
    if what is None or not isinstance(spec, MaskSpec) or not is_interval(spec) or cache_layer_of(key) is not None:
        return None
    offered = what.limits(layer_index(module), key, value)
    if offered is None:
        return None
    key, value, limits = offered
    return key, value, narrowed(limits, spec)


def limited_attention(query: Tensor, key: Tensor, value: Tensor, limits: Limits, scale: float) -> Tensor:
    """Attend to keys that are each seen from their own position until a limit, per KV head.

    On the CPU FlexAttention is traced as elsewhere, but not compiled: it is there to be tested, and makes every score.

    Args:
        query: ``[B, Hq, Q, D]``, on CUDA of a size D of at least 16.
        key: ``[B, H, K, D]``; a query may see the keys up to as many from the end as there are queries after it.
        value: ``[B, H, K, D]``.
        limits: Of these queries and keys.
        scale: Factor of the logits.

    Returns:
        ``[B, Hq, Q, D]``; 0 for a query that sees nothing.

    Raises:
        RuntimeError: for gradients on the CPU.

    Example:
        >>> at = torch.arange(2, dtype=torch.int32)
        >>> value = torch.tensor([10.0, 20.0]).view(1, 1, 2, 1)
        >>> limits = Limits(at[None], at[None, None], until=torch.tensor([[[1, 9]]], dtype=torch.int32), blocks={})
        >>> limited_attention(torch.zeros_like(value), value, value, limits, scale=1.0).flatten().tolist()
        [10.0, 20.0]
    """
    device = query.device
    if device.type == "cpu":
        query, key, value = (_without_gradient(tensor) for tensor in (query, key, value))
    size = query.shape[2], key.shape[2], device
    if size not in limits.blocks:
        limits.blocks[size] = causal_blocks(*size)
    blocks = limits.blocks[size]
    for tensor in (query, key, value, limits.keys, limits.until):
        torch._dynamo.maybe_mark_dynamic(tensor, [0, 2])
    torch._dynamo.maybe_mark_dynamic(limits.queries, [0, 1])
    for tensor in blocks:
        torch._dynamo.maybe_mark_dynamic(tensor, list(range(2, tensor.ndim)))
    return _compiled(device.type)(query, key, value, limits.queries, limits.keys, limits.until, blocks, scale)


def _without_gradient(tensor: Tensor) -> Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "FlexAttention has no backward on the CPU: learn there with MaskedAttentionAdapter(model, backend='sdpa'), "
            "or score under torch.no_grad()."
        )
    return tensor.detach()


@cache
def _compiled(device_type: str) -> Callable[..., Tensor]:
    """Compile at first use. What is not marked as dynamic is constant, so heads and scale never become symbols."""
    options: dict[str, Any] = {
        "backend": "eager" if device_type == "cpu" else "inductor",
        "dynamic": False,
        # Too many variants are then an error, rather than attention that makes every score.
        "fullgraph": True,
        "recompile_limit": _MOST_VARIANTS,
    }
    return torch.compile(_attend, **options)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    until: Tensor,
    blocks: Blocks,
    scale: float,
) -> Tensor:
    group = query.shape[1] // key.shape[1]

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        at, head = queries[b, q], h // group
        return (keys[b, head, k] <= at) & (at < until[b, head, k])

    key_counts, key_blocks, query_counts, query_blocks = blocks
    mask = BlockMask(
        seq_lengths=(query.shape[2], key.shape[2]),
        kv_num_blocks=key_counts,
        kv_indices=key_blocks,
        # The kernel asks the mask function nothing about full blocks, and a key may be evicted from any block.
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=query_counts,
        q_indices=query_blocks,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(_BLOCK, _BLOCK),
        mask_mod=visible,
    )
    # Left to itself, the kernel for few queries takes over below 128 of them, in a variant of its own.
    options: Any = {"BACKEND": "TRITON"}
    output = flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=True, kernel_options=options)
    assert isinstance(output, Tensor)
    return output


def causal_blocks(queries: int, keys: int, device: torch.device) -> Blocks:
    """Say which blocks of 128 keys hold any that a block of 128 queries may see, if the last query sees the last key.

    Token-level eviction hardly ever empties a block, so this is all that there is to skip. A row and a column are to
    spare, because a size of 1 is compiled on its own.

    Args:
        queries: Number of queries Q.
        keys: Number of keys K, at least Q.
        device: Where the result lives.

    Returns:
        int32 ``[1, 1, N + 1]`` and ``[1, 1, N + 1, M + 1]``, how many blocks of keys and which, for each of N blocks of
        queries; ``[1, 1, M + 1]`` and ``[1, 1, M + 1, N + 1]``, how many blocks of queries and which, for each of M
        blocks of keys.

    Example:
        >>> key_counts, _, query_counts, _ = causal_blocks(200, 300, torch.device("cpu"))
        >>> key_counts[0, 0, :-1].tolist(), query_counts[0, 0, :-1].tolist()
        ([2, 3], [2, 2, 1])
    """
    rows, columns = -(-queries // _BLOCK), -(-keys // _BLOCK)
    row, column = (torch.arange(size + 1, device=device, dtype=torch.int32) for size in (rows, columns))
    ahead = keys - queries  # keys that the first query already sees besides its own
    last = ((row + 1) * _BLOCK).clamp(max=queries) - 1 + ahead
    first = (column * _BLOCK - ahead).clamp(min=0) // _BLOCK
    key_blocks = column.clamp(max=columns - 1).expand(rows + 1, -1)
    query_blocks = (first[:, None] + row).clamp(max=rows - 1)
    key_counts, query_counts = last // _BLOCK + 1, (rows - first).clamp(min=0)
    key_counts, key_blocks, query_counts, query_blocks = (
        tensor[None, None].contiguous() for tensor in (key_counts, key_blocks, query_counts, query_blocks)
    )
    return key_counts, key_blocks, query_counts, query_blocks
