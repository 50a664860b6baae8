"""One attention function for rollout and replay.

Both answer the same question, which keys may this query see, from different places: slots of a cache, or a record. The
attention itself stays the model's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from smdlib.cache.layer import cache_layer_of
from smdlib.cache.support import refuse_dropout
from smdlib.masks.decoding import decode_attention
from smdlib.masks.ragged import block_attention
from smdlib.masks.replay import Pass
from smdlib.masks.spec import MaskSpec
from smdlib.policies.mass import received_attention

REPLAY_ARGUMENT = "smdlib_replay"

# Arguments by which models ask for more than softmax attention.
_EAGER_ONLY = ("softcap", "s_aux", "position_bias")

Attention = Callable[..., tuple[Tensor, Tensor | None]]


def fused_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scaling: float | None,
    dropout: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention by ``scaled_dot_product_attention``, with a mask per KV head and the query group folded.

    Args:
        module: Attention module.
        query: ``[B, Hq, Q, D]``.
        key: ``[B, H, K, D]``.
        value: ``[B, H, K, D]``.
        visible: bool ``[B, 1 | H, Q, K]`` or ``None`` for plain causal attention.
        scaling: Factor of the logits.
        dropout: Probability of dropping a weight.
        **kwargs: What the model passes on.

    Returns:
        ``(output [B, Q, Hq, D], None)``.

    Raises:
        ValueError: if the model needs soft-capping, sinks or a position bias.
    """
    refuse_eager_only(module, kwargs)
    if visible is None or visible.shape[1] == 1:
        return sdpa_attention_forward(module, query, key, value, visible, dropout=dropout, scaling=scaling, **kwargs)
    heads, queries = key.shape[1], query.shape[2]
    if queries == 1:
        # The group's queries share their mask: they become the queries of their KV head.
        folded = rearrange(query, "b (h g) 1 d -> b h g d", h=heads)
        visible = visible.expand(-1, -1, folded.shape[2], -1)
        output = scaled_dot_product_attention(folded, key, value, visible, dropout_p=dropout, scale=scaling)
        return rearrange(output, "b h g d -> b 1 (h g) d"), None
    group = query.shape[1] // heads
    output = scaled_dot_product_attention(
        rearrange(query, "b (h g) q d -> (b h) g q d", h=heads),
        repeat(key, "b h k d -> (b h) g k d", g=group),
        repeat(value, "b h k d -> (b h) g k d", g=group),
        rearrange(visible, "b h q k -> (b h) 1 q k"),
        dropout_p=dropout,
        scale=scaling,
    )
    return rearrange(output, "(b h) g q d -> b q (h g) d", h=heads), None


def refuse_eager_only(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse, with a ``ValueError``, what a model passes on that only its own eager attention can compute."""
    foreign = [name for name in _EAGER_ONLY if kwargs.get(name) is not None]
    if foreign:
        raise ValueError(
            f"{type(module).__name__} uses {foreign}, which fused attention cannot compute; install the adapter with "
            "backend='eager'."
        )


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scaling: float | None,
    dropout: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention by the model's own eager function, which knows its soft-capping and sinks.

    Args:
        module: Attention module.
        query: ``[B, Hq, Q, D]``.
        key: ``[B, H, K, D]``.
        value: ``[B, H, K, D]``.
        visible: bool ``[B, 1 | H, Q, K]`` or ``None`` for plain causal attention.
        scaling: Factor of the logits.
        dropout: Probability of dropping a weight.
        **kwargs: What the model passes on.

    Returns:
        ``(output [B, Q, Hq, D], weights [B, Hq, Q, K])``.

    Raises:
        ValueError: if the model's file defines no eager attention.
    """
    own = _own_eager(module)
    if visible is None:
        rows = torch.arange(query.shape[2], device=query.device)
        visible = (torch.arange(key.shape[2], device=query.device) <= rows[:, None] + key.shape[2] - query.shape[2])[
            None, None
        ]
    if visible.shape[1] > 1:
        visible = visible.repeat_interleave(query.shape[1] // visible.shape[1], dim=1)
    additive = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
    additive = additive.masked_fill_(~visible, torch.finfo(query.dtype).min)
    output, weights = own(module, query, key, value, additive, scaling=scaling, dropout=dropout, **kwargs)
    assert weights is not None
    # A query that sees nothing (padding) gets uniform weights from the finite minimum; they are no attention.
    return output, weights * visible


def attention_mass(query: Tensor, key: Tensor, visible: Tensor | None, scaling: float) -> Tensor:
    """Attention that each key receives, summed over queries and over the query heads of its group.

    Works through blocks of queries of one row and KV head at a time, so that its scratch memory stays below
    what the layer's keys and values take.

    Args:
        query: ``[B, Hq, Q, D]``.
        key: ``[B, H, K, D]``.
        visible: bool ``[B, 1 | H, Q, K]`` or ``None`` for plain causal attention (Q == K).
        scaling: Factor of the logits.

    Returns:
        float32 ``[B, H, K]``.

    Example:
        >>> one = torch.ones(1, 2, 3, 4)
        >>> attention_mass(one, one[:, :1], None, scaling=1.0).mul(6).round().tolist()  # 2 heads x (1 + 1/2 + 1/3), ...
        [[[22.0, 10.0, 4.0]]]
    """
    batch, heads, keys, width = key.shape
    queries = query.shape[2]
    grouped = rearrange(query, "b (h g) q d -> b h g q d", h=heads)
    if visible is not None:
        visible = visible.expand(-1, heads, -1, -1)
    mass = torch.zeros(key.shape[:3], dtype=torch.float32, device=key.device)
    # Three quarters of the layer, less the float32 copy of one head's keys, over logits and masks (7 bytes each).
    spare = key.nbytes * 3 // 2 - 4 * keys * width
    block = max(4, spare // (7 * grouped.shape[2] * keys))
    for row in range(batch):
        for head in range(heads):
            own = key[row, head].float()
            for start in range(0, queries, block):
                stop = min(start + block, queries)
                # A causal block sees nothing beyond its last query.
                reach = keys if visible is not None else stop
                if visible is not None:
                    seen = visible[row, head, None, start:stop]
                else:
                    positions = torch.arange(reach, device=key.device)
                    seen = positions <= positions[start:stop, None]
                part = grouped[row, head, :, start:stop]
                mass[row, head, :reach] += received_attention(part, own[:reach], seen, scaling)
            del own  # before the next head's copy is made
    return mass


def shadow_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskSpec | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    inner: Attention,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function registered with transformers: rollout on a cache, replay of a record, or plain.

    Args:
        module: Attention module; its ``layer_idx`` names the layer.
        query: ``[B, Hq, Q, D]``.
        key: ``[B, H, K, D]``.
        value: ``[B, H, K, D]``.
        attention_mask: The recipe that `smdlib.masks.spec.mask_spec` left.
        scaling: Factor of the logits.
        dropout: Probability of dropping a weight.
        inner: `fused_attention` or `eager_attention`.
        **kwargs: What the model passes on, a `Pass` among it while scoring.

    Returns:
        ``(output [B, Q, Hq, D], weights or None)``.

    Raises:
        ValueError: if the model brings a mask of its own making while keys are evicted or replayed.
    """
    replay: Pass | None = kwargs.pop(REPLAY_ARGUMENT, None)
    cached = cache_layer_of(key)
    if not isinstance(attention_mask, MaskSpec):
        if cached is not None or replay is not None:
            raise ValueError(
                f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')}) got a mask of type "
                f"{type(attention_mask).__name__} that was not made through transformers' mask interface (a 4D mask of "
                "your own?); evictions cannot be combined with it exactly. Pass a 2D attention_mask."
            )
        # Not ours to interpret: the model's own attention, as if no adapter were there.
        own = sdpa_attention_forward if inner is fused_attention else _own_eager(module)
        return own(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    if replay is not None:
        if cached is not None:
            raise ValueError("a recorded mask is replayed without a cache; pass either a CompressedCache or a record.")
        key, value, visible = replay.seen(layer_index(module), key, value, attention_mask)
        return inner(module, query, key, value, visible, scaling, dropout, **kwargs)
    if cached is None:
        return inner(module, query, key, value, attention_mask.dense(query.device), scaling, dropout, **kwargs)

    if module.training:
        refuse_dropout(module.config, "sampling")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    padding = attention_mask.padding(query.shape[0], query.device)
    first = cached.is_first
    positions = cached.offered_positions(padding, query.shape[2])
    if first:
        visible = attention_mask.dense(query.device)
    else:
        visible = attention_mask.visible(positions, padding, cached.gapless)
    if cached.blocks is not None and inner is fused_attention:
        refuse_eager_only(module, kwargs)
        assert visible is not None
        output, mass = block_attention(query, cached.blocks, visible, scale, dropout, cached.tracks_attention)
        cached.commit(query, positions, mass, scale)
        return output, None
    if cached.blocks is not None and cached.slots is not None:
        key, value = cached.slots.shown()  # padded to the width of the largest head
    single = query.shape[2] == 1 and key.dtype == torch.float32 and not dropout
    if single and inner is fused_attention:
        refuse_eager_only(module, kwargs)
        output, mass = decode_attention(query, key, value, visible, scale, cached.tracks_attention)
        cached.commit(query, positions, mass, scale)
        return output, None
    output, weights = inner(module, query, key, value, visible, scaling, dropout, **kwargs)
    mass = None
    if cached.tracks_attention:
        if weights is None:
            mass = attention_mass(query, key, visible, scale)
        else:
            mass = rearrange(weights.float(), "b (h g) q k -> b h g q k", h=key.shape[1]).sum((2, 3))
    cached.commit(query, positions, mass, scale)
    return output, weights


def _own_eager(module: nn.Module) -> Attention:
    own: Attention | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise ValueError(
            f"{type(module).__name__} has no eager_attention_forward beside it, so its soft-capping or sinks cannot be "
            "delegated; smdlib cannot replay this model exactly."
        )
    return own


def layer_index(module: nn.Module) -> int:
    """Return the layer that an attention module belongs to, or raise a ``ValueError``."""
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ValueError(f"{type(module).__name__} has no layer_idx, so no layer of the record belongs to it.")
    return index
