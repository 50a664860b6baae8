"""Attention of one new token to heads that hold unequal numbers of keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from smdlib.cache.ragged import Block
from smdlib.policies.mass import received_attention


def block_attention(
    query: Tensor, blocks: Sequence[Block], visible: Tensor, scaling: float, dropout: float, want_mass: bool
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention, one block of row-and-head pairs after the other; nothing is padded or copied.

    Args:
        query: ``[B, Hq, 1, D]``.
        blocks: Keys and values of all pairs of row and KV head.
        visible: bool ``[B, H, 1, K]``; of a pair with fewer slots only the first ones count.
        scaling: Factor of the logits.
        dropout: Probability of dropping a weight.
        want_mass: Whether the attention mass is asked for.

    Returns:
        Output ``[B, 1, Hq, D]``, and float32 ``[B, H, K]`` attention that each key receives, or ``None``.

    Example:
        >>> one = torch.ones(1, 1, 4)
        >>> blocks = [Block(torch.tensor([1]), one, one, used=1), Block(torch.tensor([0]), one, 2 * one, used=1)]
        >>> output, _ = block_attention(torch.ones(1, 2, 1, 4), blocks, torch.ones(1, 2, 1, 1).bool(), 1.0, 0.0, False)
        >>> output[0, 0, :, 0]
        tensor([2., 1.])
    """
    heads = visible.shape[1]
    by_pair = rearrange(query, "b (h g) 1 d -> (b h) 1 g d", h=heads)  # the group's heads share their keys: one mask
    seen = visible.flatten(0, 1).unsqueeze(2)  # [B * H, 1, 1, K]
    output = torch.empty_like(by_pair)
    mass = torch.zeros(seen.shape[0], seen.shape[-1], device=query.device) if want_mass else None
    for block in blocks:
        keys, values = block.keys[:, None, : block.used], block.values[:, None, : block.used]
        own, own_seen = by_pair[block.pairs], seen[block.pairs, :, :, : block.used]
        mask = own_seen.expand(-1, -1, own.shape[2], -1)
        output[block.pairs] = scaled_dot_product_attention(own, keys, values, mask, dropout_p=dropout, scale=scaling)
        if mass is not None:
            asked = rearrange(own, "n 1 g d -> n g 1 d")
            mass[block.pairs, : block.used] = received_attention(asked, keys[:, 0], own_seen, scaling)
    output = rearrange(output, "(b h) 1 g d -> b 1 (h g) d", h=heads)
    return output, None if mass is None else mass.unflatten(0, (-1, heads))
