"""Views to try a policy on: golden numbers that anyone can make again, and the same view in other guises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from smdlib.policies import CacheView, EvictionPolicy, needs_tokens, query_window, tracks_attention

HEADS, GROUP, SIZE = 2, 2, 8


def golden(*shape: int, a: float, b: float) -> Tensor:
    """``sin(a i) + cos(b i^2)`` for entry i: numbers without a pattern, the same on every machine.

    Args:
        *shape: Of the result.
        a: Any number.
        b: Any number.

    Returns:
        float32.

    Example:
        >>> golden(2, a=1.0, b=1.0)
        tensor([1.0000, 1.3818])
    """
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    return (torch.sin(i * a) + torch.cos(i * i * b)).float().reshape(shape)


def golden_view(policy: EvictionPolicy, lengths: Sequence[int], budget: int, dtype: torch.dtype) -> CacheView:
    """View of the middle layer of three after a prefill of left-padded rows, with just what the policy asks for.

    Args:
        policy: For its ``query_window``, ``tracks_attention`` and ``needs_tokens``.
        lengths: Tokens of each row.
        budget: Keys to keep.
        dtype: Of keys, values and queries.

    Returns:
        B rows, 2 KV heads, 4 query heads, head size 8. Padding holds numbers too, as in a model.
    """
    rows, tokens, window = len(lengths), max(lengths), query_window(policy)
    queries = golden(rows, HEADS * GROUP, window, SIZE, a=0.731, b=0.0137).to(dtype) if window else None
    view = CacheView.of_prompt(
        golden(rows, HEADS, tokens, SIZE, a=0.417, b=0.0191).to(dtype),
        golden(rows, HEADS, tokens, SIZE, a=0.293, b=0.0071).to(dtype),
        budget=budget,
        lengths=torch.tensor(lengths),
        queries=queries,
        attention=golden(rows, HEADS, tokens, a=0.571, b=0.0113).abs() if tracks_attention(policy) else None,
        token_ids=torch.arange(rows * tokens).view(rows, tokens) * 7 % 31 if needs_tokens(policy) else None,
    )
    ids = None if view.token_ids is None else view.token_ids.clone()
    return replace(view, layer_idx=1, num_layers=3, positions=view.positions.clone(), token_ids=ids)


def alone(view: CacheView, row: int) -> CacheView:
    """One row of a batch as a batch of its own, without its padding."""
    one, padding = slice(row, row + 1), view.keys.shape[2] - int(view.seen[row])
    cut = {name: getattr(view, name) for name in ("keys", "values", "positions", "attention", "token_ids")}
    cut = {name: part if part is None else part[one, :, padding:].clone() for name, part in cut.items()}
    return replace(
        view,
        **cut,
        seen=view.seen[one].clone(),
        budget=view.budget[one].clone(),
        queries=None if view.queries is None else view.queries[one].clone(),
        generators=None if view.generators is None else view.generators[one],
    )


def reordered(view: CacheView, fill: float, empty: int = 5) -> CacheView:
    """The same keys in other slots, differently in each head, with empty slots between them, as after decode eviction.

    Args:
        view: After a prefill.
        fill: What lies in empty slots, those of padding among them: the key of a token that is gone.
        empty: Number of empty slots to add.

    Returns:
        A view with ``K + empty`` slots.
    """
    rows, heads, slots = view.positions.shape
    target = golden(rows, heads, slots + empty, a=1.7, b=0.31).argsort(-1)[..., :slots]

    def move(old: Tensor, filling: float) -> Tensor:
        new = torch.full((rows, heads, slots + empty, *old.shape[3:]), filling, dtype=old.dtype)
        index = target.view(*target.shape, *(1,) * (old.ndim - 3)).expand_as(old)
        there = view.present.view(*target.shape, *(1,) * (old.ndim - 3))
        return new.scatter_(2, index, torch.where(there, old, filling))

    return replace(
        view,
        keys=move(view.keys, fill),
        values=move(view.values, fill),
        positions=move(view.positions, -1),
        attention=None if view.attention is None else move(view.attention, abs(fill)),
        token_ids=None if view.token_ids is None else move(view.token_ids, -1),
    )


def by_position(scores: Tensor, view: CacheView) -> Tensor:
    """Scores of the keys of each position, ``[B, H, T]``, NaN where a head has no such key.

    Args:
        scores: ``[B, H, K]``.
        view: What was scored.

    Returns:
        As many columns as the longest row has seen tokens.
    """
    table = torch.full((*scores.shape[:2], int(view.seen.max()) + 1), torch.nan)
    index = torch.where(view.present, view.positions, table.shape[2] - 1)
    return table.scatter_(2, index, scores)[:, :, :-1]
