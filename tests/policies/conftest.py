"""What the policy tests share, as fixtures that return functions."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from smdlib.policies import CacheView

Reorder = Callable[..., tuple[CacheView, torch.Tensor]]


@pytest.fixture
def random_view() -> Callable[..., CacheView]:
    """A view of random numbers; `lengths` makes it a left-padded batch, whose padding holds NaN."""

    def build(
        rows=1, heads=2, group=2, tokens=12, size=4, *, budget=5, window=4, lengths=None, seed=0, dtype=torch.float32
    ):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(shape, generator=generator).to(dtype)

        keys, values = draw(rows, heads, tokens, size), draw(rows, heads, tokens, size)
        queries = draw(rows, heads * group, min(window, tokens), size)
        attention = draw(rows, heads, tokens).float().abs()
        seen = None if lengths is None else torch.tensor(lengths)
        if lengths is not None:
            for row, length in enumerate(lengths):
                keys[row, :, : tokens - length] = float("nan")
                values[row, :, : tokens - length] = float("nan")
                attention[row, :, : tokens - length] = float("nan")
                queries[row, :, : max(0, queries.shape[2] - length)] = float("nan")
        return CacheView.of_prompt(keys, values, budget=budget, lengths=seen, queries=queries, attention=attention)

    return build


@pytest.fixture
def row_of() -> Callable[[CacheView, int], CacheView]:
    """One row of a batch as a batch of its own, without its padding."""

    def cut(view, row):
        length = int(view.seen[row])
        one = slice(row, row + 1)
        return CacheView.of_prompt(
            view.keys[one, :, -length:],
            view.values[one, :, -length:],
            budget=int(view.budget[row, 0]),
            queries=view.queries[one],
            attention=view.attention[one, :, -length:],
        )

    return cut


@pytest.fixture
def scrambled() -> Reorder:
    """The same keys in other slots, different ones in each head, and some empty slots that hold NaN.

    Returns the view and `slot [B, H, K]`, where each old slot has gone.
    """

    def reorder(view, empty=3, seed=0):
        rows, heads, slots = view.positions.shape
        generator = torch.Generator().manual_seed(seed)
        shape = (rows, heads, slots + empty)
        slot = torch.rand(shape, generator=generator).argsort(-1)[..., :slots]

        def move(old, fill):
            new = torch.full((*shape, *old.shape[3:]), fill, dtype=old.dtype)
            index = slot.view(*slot.shape, *(1,) * (old.dim() - 3)).expand_as(old)
            return new.scatter_(2, index, old)

        nan = float("nan")
        moved = {name: move(getattr(view, name), nan) for name in ("keys", "values", "attention")}
        return dataclasses.replace(view, **moved, positions=move(view.positions, -1)), slot

    return reorder
