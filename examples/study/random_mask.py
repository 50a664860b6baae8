"""A record that nobody made: random keys of each prompt gone once it is read, on tokens that were sampled dense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from smdlib import ShadowMask
from smdlib.masks import NEVER

from .setting import Eviction


def random_shadow(shape: Sequence[int], prompt: int, keep: float, group: int, generator: torch.Generator) -> Tensor:
    """Evict all but a share of the prompts' keys, each head its own choice, each group of rows the same.

    Args:
        shape: Rows, tokens, layers and KV heads of the record.
        prompt: Tokens of each prompt; the key of its last one stays.
        keep: Share of the prompt's keys that stays.
        group: Rows that share a prompt.
        generator: Draws the keys.

    Returns:
        ``evicted_at``, int32 ``[B, T, L, H]``.

    Example:
        >>> gone = random_shadow((2, 8, 1, 1), prompt=6, keep=0.5, group=2, generator=torch.Generator())
        >>> (gone == 5).sum(1).flatten().tolist(), (gone == 6).sum(1).flatten().tolist()
        ([2, 2], [1, 1])
    """
    rows, tokens, layers, heads = shape
    score = torch.rand(rows // group, prompt - 1, layers, heads, generator=generator)
    rank, kept = score.argsort(1).argsort(1), math.ceil(keep * prompt)
    # What the cache does: ``kept`` keys stay when all but the last token were read, and again when that one was, too.
    gone = torch.full_like(rank, NEVER, dtype=torch.int32)
    gone = gone.masked_fill(rank >= kept - 1, prompt).masked_fill(rank >= kept, prompt - 1)
    record = torch.full((rows // group, tokens, layers, heads), NEVER, dtype=torch.int32)
    record[:, : prompt - 1] = gone
    return record.repeat_interleave(group, 0)


def add_random_masks(batch: TensorDictBase, eviction: Eviction, generator: torch.Generator) -> None:
    """Put random records where the rollout left dense ones; ``batch["group_size"]`` rows share a prompt."""
    dense: ShadowMask = cast(Any, batch["shadow"])
    prompt, group = int((~batch["masks", "all_assistant_mask"][0]).sum()), int(batch["group_size"][0])
    evicted_at = random_shadow(dense.evicted_at.shape, prompt, eviction.keep, group, generator)
    batch["shadow"] = ShadowMask(evicted_at=evicted_at, token_ids=dense.token_ids, batch_size=[len(batch)])
