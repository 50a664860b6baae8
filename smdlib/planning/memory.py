"""Bytes of a batch, from a configuration and the settings of the rollout."""

from __future__ import annotations

from typing import Any

import torch

from smdlib.losses.linear import _BLOCK_BYTES
from smdlib.masks.recorder import _BLOCK
from smdlib.planning.geometry import Geometry, read_geometry
from smdlib.planning.plan import MemoryPlan
from smdlib.policies import (
    Allocation,
    EvictionPolicy,
    UniformAllocation,
    make_policy,
    query_window,
    resolve_budget,
    tracks_attention,
)


def plan_memory(
    config: Any,
    prompt: int,
    response: int,
    group: int,
    budget: float | int,
    *,
    prompts: int = 1,
    policy: EvictionPolicy | str | None = None,
    allocation: Allocation | None = None,
    evict_every: int | None = None,
    dtype: torch.dtype | str | None = None,
) -> MemoryPlan:
    """Say what one batch will take while `smdlib.SparseActor` samples it and while a loss of smdlib reads it.

    Exact for what the library itself allocates and keeps; what the model's layers need for their work is not in it.

    Args:
        config: A transformers configuration; no weights are needed.
        prompt: Tokens of each prompt.
        response: Longest response, in tokens.
        group: Responses per prompt, G.
        budget: As for `smdlib.cache.CompressedCache`.
        prompts: Distinct prompts of the batch.
        policy: For what it asks for, a query window or attention mass. ``None`` for one that asks for nothing.
        allocation: As for the cache.
        evict_every: As for the cache.
        dtype: Of keys and values; that of the configuration by default.

    Returns:
        Bytes; print it.

    Raises:
        UnsupportedModelError: if smdlib cannot replay this architecture exactly.
        ValueError: for a number that is out of range.

    Example:
        >>> from transformers import LlamaConfig
        >>> sizes = {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
        >>> config = LlamaConfig(hidden_size=2048, vocab_size=128256, **sizes)
        >>> print(plan_memory(config, prompt=4096, response=512, group=8, budget=0.25, dtype="bfloat16"))
        8 rows of 4608 tokens, 1024 keys per KV head
                                                            plain     smdlib
          sampling  keys and values                       1.21 GB     403 MB
          sampling  positions, attention mass, queries          -    16.8 MB
          sampling  record of evictions                         -    25.3 MB
          learning  shadow mask                                 -    18.9 MB
          learning  logits (fused head: one block)        9.46 GB    4.19 MB
          learning  keys and values of prompts, once            -     134 MB
          learning  hidden states of responses, twice           -    33.6 MB
    """
    for name, value in {"prompt": prompt, "response": response, "group": group, "prompts": prompts}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}, expected an int >= 1.")
    if evict_every is not None and (isinstance(evict_every, bool) or evict_every < 1):
        raise ValueError(f"evict_every is {evict_every!r}, expected an int >= 1, or None.")
    sizes = read_geometry(config, dtype)
    chosen = None if policy is None else make_policy(policy)
    rows, reserve = prompts * group, evict_every or response
    allocate = allocation or UniformAllocation()
    kept = allocate(resolve_budget(budget, torch.tensor([prompt])), sizes.layers, sizes.kv_heads)[:, 0]  # [L, H]
    # A layer's heads have as many slots as the largest of its budgets asks for, except where scores decide.
    by_scores = hasattr(allocate, "from_scores")
    budgets = tuple(int(layer.max()) for layer in kept)
    slots = [budget + reserve for budget in budgets]
    kv_sparse = rows * sum(slots) * sizes.token_bytes
    fed = prompt + response - 1  # the last token is sampled, and never read
    loss_tokens = rows * response
    block = min(sizes.vocabulary, max(256, _BLOCK_BYTES // (4 * loss_tokens)))
    return MemoryPlan(
        rows=rows,
        tokens=prompt + response,
        budgets=budgets,
        kv_dense=rows * sum(min(fed, window or fed) for window in sizes.windows) * sizes.token_bytes,
        kv_sparse=kv_sparse,
        kv_padding=kv_sparse // 4 if by_scores else 0,
        slots=rows * _slots(sizes, slots, reserve, chosen),
        record=rows * 4 * (sizes.kv_heads * _record(kept, prompt, response, evict_every) + fed),
        mask=rows * (prompt + response) * sizes.layers * sizes.kv_heads * 4,
        logits_full=rows * (prompt + response) * sizes.vocabulary * sizes.dtype.itemsize,
        logits_block=loss_tokens * block * 4,
        prompt_kv=prompts * (prompt - 1) * sizes.layers * sizes.token_bytes,
        states=2 * loss_tokens * sizes.hidden * sizes.dtype.itemsize,
    )


def _slots(sizes: Geometry, slots: list[int], reserve: int, policy: EvictionPolicy | None) -> int:
    """Bytes per row beside keys and values: a position a slot, the queue of free ones, mass, and the query window."""
    mass = 0 if policy is None or not tracks_attention(policy) else 4
    window = 0 if policy is None else query_window(policy)
    ring = sizes.query_heads * window * sizes.head_size * sizes.dtype.itemsize
    return sum(sizes.kv_heads * (size * (8 + mass) + 8 * reserve) + ring for size in slots)


def _record(kept: torch.Tensor, prompt: int, response: int, evict_every: int | None) -> int:
    """Columns of the recorder's tables, all layers together, at the end of the responses.

    Args:
        kept: Budgets ``[L, H]``.
        prompt: Tokens of the prompt.
        response: Tokens of the response.
        evict_every: As for the cache.
    """
    total = 0
    for layer in kept:
        most, least = int(layer.max()), int(layer.min())
        # All but the last prompt token are read first, for the whole group.
        noted = [prompt - 1, prompt] if prompt > 1 else [1]
        decoded = range(evict_every or response, response, evict_every or response)
        noted += [prompt + count for count in decoded if min(most, prompt) + count > least]
        capacity = -1
        for columns in noted:
            if capacity + 1 <= columns:
                capacity = columns + max(_BLOCK, columns // 2)
        total += capacity + 1
    return total
