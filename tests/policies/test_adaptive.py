"""Budgets that heads win by their scores, against sorting all keys of a row in plain Python."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smdlib.policies import AdaptiveHeadAllocation, CacheView, PolicyError, ScoreAllocation, UniformAllocation
from smdlib.policies.adaptive import checked_budgets

FLOORS = (0.0, 0.2, 0.5, 1.0)
LEVELS = (-math.inf, -1.5, -0.0, 0.0, 0.5, 2.0, math.inf)


def plain_budgets(keys: list[dict[int, float]], budget: int, floor: float) -> list[int]:
    """Counts per head for ``keys[head][position] = score``: each head's best first, then the best of all."""
    least = max(1, math.ceil(Fraction(str(floor)) * budget))
    ranked = [sorted(head, key=lambda position: (-head[position], -position)) for head in keys]
    kept = [set(head[:least]) for head in ranked]
    rest = [
        (-keys[head][position], -position, head)
        for head in range(len(keys))
        for position in ranked[head]
        if position not in kept[head]
    ]
    total = len(keys) * budget
    for _, position, head in sorted(rest)[: total - sum(map(len, kept))]:
        kept[head].add(-position)
    counts = [len(head) for head in kept]
    spare = total - sum(counts)
    return [count + spare // len(keys) + (head < spare % len(keys)) for head, count in enumerate(counts)]


@given(st.data())
def test_budgets_are_those_of_one_sort_over_all_heads(data):
    rows, heads, keys = (data.draw(st.integers(1, most)) for most in (3, 4, 9))
    floor = data.draw(st.sampled_from(FLOORS))
    budget = torch.tensor(data.draw(st.lists(st.integers(1, 6), min_size=rows, max_size=rows)))
    seed = data.draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    positions = torch.rand(rows, heads, 2 * keys, generator=generator).argsort(-1)[..., :keys]
    positions = torch.where(torch.rand(positions.shape, generator=generator) < 0.2, -1, positions)
    levels = torch.tensor(LEVELS[data.draw(st.integers(0, 5)) :])
    scores = levels[torch.randint(len(levels), positions.shape, generator=generator)]
    scores = torch.where(positions < 0, torch.nan, scores)
    found = AdaptiveHeadAllocation(floor).from_scores(scores, positions, budget[:, None].expand(rows, heads))
    for row in range(rows):
        by_head = [
            {p: s for p, s in zip(positions[row, head].tolist(), scores[row, head].tolist(), strict=True) if p >= 0}
            for head in range(heads)
        ]
        assert found[row].tolist() == plain_budgets(by_head, int(budget[row]), floor)
    assert found.dtype == torch.int64
    assert (found.sum(-1) == heads * budget).all()


def test_by_hand():
    scores = torch.tensor([[[9.0, 8, 7, 6, 5], [4.0, 3, 2, 1, 0]]])
    positions = torch.arange(5).expand(1, 2, 5)
    counts = {
        floor: AdaptiveHeadAllocation(floor).from_scores(scores, positions, torch.tensor([[4, 4]]))[0].tolist()
        for floor in (0.0, 0.25, 0.6, 1.0)
    }
    assert counts == {0.0: [5, 3], 0.25: [5, 3], 0.6: [5, 3], 1.0: [4, 4]}
    few = {
        floor: AdaptiveHeadAllocation(floor).from_scores(scores, positions, torch.tensor([[2, 2]]))[0].tolist()
        for floor in (0.0, 0.5, 0.6, 1.0)
    }
    assert few == {0.0: [3, 1], 0.5: [3, 1], 0.6: [2, 2], 1.0: [2, 2]}


def test_a_row_does_not_depend_on_its_batch():
    torch.manual_seed(0)
    scores, positions = torch.randn(3, 4, 20), torch.arange(20).expand(3, 4, 20)
    budget = torch.tensor([3, 7, 12])[:, None].expand(3, 4)
    allocation = AdaptiveHeadAllocation()
    together = allocation.from_scores(scores, positions, budget)
    alone = [allocation.from_scores(scores[[row]], positions[[row]], budget[[row]]) for row in range(3)]
    assert torch.equal(together, torch.cat(alone))


def test_the_mean_budget_is_uniform():
    budget = torch.tensor([3, 8])
    assert torch.equal(AdaptiveHeadAllocation()(budget, 4, 2), UniformAllocation()(budget, 4, 2))
    assert isinstance(AdaptiveHeadAllocation(), ScoreAllocation)
    assert not isinstance(UniformAllocation(), ScoreAllocation)


@pytest.mark.parametrize(
    ("floor", "error"),
    [(-0.1, ValueError), (1.1, ValueError), (math.nan, ValueError), ("a", TypeError), (True, TypeError)],
)
def test_a_floor_that_is_no_share_is_refused(floor, error):
    with pytest.raises(error, match=r"AdaptiveHeadAllocation.floor is .*expected"):
        AdaptiveHeadAllocation(floor)


class Wrong(AdaptiveHeadAllocation):
    """Returns what it is told to."""

    def __init__(self, budgets):
        object.__setattr__(self, "budgets", budgets)

    def from_scores(self, scores, positions, budget):
        return self.budgets


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        (None, r"from_scores returned NoneType, expected int64 \[B, H\] = \[1, 2\]"),
        (torch.ones(1, 2), r"from_scores returned torch.float32 \[1, 2\]"),
        (torch.ones(2, dtype=torch.int64), r"from_scores returned torch.int64 \[2\]"),
        (torch.tensor([[0, 6]]), "KV head 0 of row 0 may keep 0 keys, but every head needs one"),
        (torch.tensor([[2, 3]]), "heads of row 0 may keep 5 keys together, but the budget of the layer is 6"),
    ],
)
def test_budgets_that_cannot_be_used_are_refused(budgets, message):
    view = CacheView.of_prompt(torch.zeros(1, 2, 5, 4), budget=3)
    with pytest.raises(PolicyError, match=rf"allocation Wrong at layer 0: .*{message}"):
        checked_budgets(Wrong(budgets), torch.zeros(1, 2, 5), view)
