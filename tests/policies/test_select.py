import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smdlib.policies import (
    CacheView,
    PolicyError,
    available_policies,
    checked_scores,
    evict_indices,
    keep_indices,
    make_policy,
    worst_indices,
)

INF, NAN = float("inf"), float("nan")


def ranked(scores, positions):
    """Slots of one head that hold a key, worst first: by score, of equals the older one first."""
    slots = [slot for slot, position in enumerate(positions) if position >= 0]
    return sorted(slots, key=lambda slot: (scores[slot], positions[slot]))


def plain_keep(scores, positions, budget):
    slots = ranked(scores, positions)
    kept = slots[len(slots) - min(budget, len(slots)) :]
    return sorted(kept, key=lambda slot: positions[slot])


def plain_evict(scores, positions, budget):
    slots = ranked(scores, positions)
    return slots[: max(0, len(slots) - budget)]


def chosen(slots, valid):
    """Lists of the slots that are meant, one per head; the others must come last."""
    count = valid.sum(-1, keepdim=True)
    assert torch.equal(valid, torch.arange(valid.shape[-1]) < count)
    return [row[mask].tolist() for row, mask in zip(slots.flatten(0, 1), valid.flatten(0, 1), strict=True)]


@st.composite
def heads(draw, values=(-INF, -2.5, -0.0, 0.0, 1e-40, 0.5, 1e4, 1e30, INF)):
    """Scores that often tie, positions in any order with gaps and empty slots, and a budget for each of [B, H]."""
    rows, count, slots = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 12))
    size = rows * count * slots
    score = st.one_of(st.sampled_from(values), st.floats(-5, 5, width=32))
    scores = torch.tensor(draw(st.lists(score, min_size=size, max_size=size)), dtype=torch.float32)
    positions = [draw(st.permutations(range(2 * slots)))[:slots] for _ in range(rows * count)]
    empty = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    positions = torch.tensor(positions).flatten().masked_fill(empty, -1)
    junk = draw(st.sampled_from([NAN, INF, -INF, 0.0]))
    scores = scores.masked_fill(empty, junk)  # what an empty slot holds must not matter
    budget = draw(st.lists(st.integers(1, slots + 2), min_size=rows * count, max_size=rows * count))
    shape = (rows, count, slots)
    return scores.view(shape), positions.view(shape), torch.tensor(budget).view(rows, count)


@given(heads(), st.integers(0, 3))
def test_keep_and_evict_equal_a_plain_sort(case, slack):
    scores, positions, budget = case
    triples = list(
        zip(scores.flatten(0, 1).tolist(), positions.flatten(0, 1).tolist(), budget.flatten().tolist(), strict=True)
    )
    slots, valid = keep_indices(scores, positions, budget, int(budget.max()) + slack)
    assert slots.shape == valid.shape == (*budget.shape, int(budget.max()) + slack)
    kept = chosen(slots, valid)
    assert kept == [plain_keep(*triple) for triple in triples]
    excess = int(((positions >= 0).sum(-1) - budget).clamp(min=0).max())
    slots, valid = evict_indices(scores, positions, budget, excess + slack)
    assert slots.shape == valid.shape == (*budget.shape, excess + slack)
    gone = chosen(slots, valid)
    assert gone == [plain_evict(*triple) for triple in triples]
    assert slots.ge(0).all()
    assert slots.lt(positions.shape[-1] + (excess + slack == 0)).all()
    for keep, evict, (_, where, _) in zip(kept, gone, triples, strict=True):
        assert sorted(keep + evict) == [slot for slot, position in enumerate(where) if position >= 0]


@given(heads())
def test_evicting_one_key_is_the_first_of_evicting_many(case):
    scores, positions, budget = case
    slot, valid = evict_indices(scores, positions, budget, 1)
    many, many_valid = evict_indices(scores, positions, budget, positions.shape[-1])
    assert torch.equal(valid, many_valid[..., :1])
    assert torch.equal(slot[valid], many[..., :1][valid])


@given(heads(), st.integers(1, 12))
def test_the_worst_of_full_heads_are_those_that_eviction_chooses(case, count):
    scores, positions, _ = case
    full = (positions >= 0).all(-1).all(-1)
    if not full.any():
        positions = positions.clamp(min=0) + torch.arange(positions.shape[-1]) * 100  # no two alike
        scores = scores.nan_to_num(0.0, INF, -INF)
    else:
        scores, positions = scores[full], positions[full]
    count = min(count, positions.shape[-1])
    expected, _ = evict_indices(scores, positions, torch.zeros(positions.shape[:2], dtype=torch.int64), count)
    assert torch.equal(worst_indices(scores, positions, count), expected)


@given(heads(values=(INF, 0.0)))
def test_invariants(case):
    """The number kept, no empty slot, and protected keys stay while they fit."""
    scores, positions, budget = case
    slots, valid = keep_indices(scores, positions, budget, int(budget.max()))
    present = positions >= 0
    assert torch.equal(valid.sum(-1), torch.minimum(budget, present.sum(-1)))
    assert (positions.gather(-1, slots)[valid] >= 0).all()
    protected = (scores == INF) & present
    stayed = (protected.gather(-1, slots) & valid).sum(-1)
    assert torch.equal(stayed, torch.minimum(protected.sum(-1), budget))


def test_ties_go_to_the_newer_key_wherever_it_is():
    scores = torch.tensor([[[0.0, -0.0, 0.0, -0.0]]])
    positions = torch.tensor([[[7, 9, 3, 5]]])
    budget = torch.tensor([[2]])
    assert keep_indices(scores, positions, budget, 2)[0].tolist() == [[[0, 1]]]
    assert evict_indices(scores, positions, budget, 2)[0].tolist() == [[[2, 3]]]
    assert evict_indices(scores, positions, torch.tensor([[3]]), 1)[0].tolist() == [[[2]]]


@pytest.mark.parametrize("slots", [5, 64, 1000, 3000])
def test_tied_scores_give_one_keep_set_for_every_batch_size(slots):
    """kvpress 276: scores of bf16 keys take few values, and topk breaks ties differently for different shapes."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(6, 2, slots, generator=generator).mul(4).round().bfloat16().float()
    positions = torch.rand(6, 2, slots, generator=generator).argsort(-1)
    budget = torch.full((6, 2), slots // 2)
    whole, _ = keep_indices(scores, positions, budget, slots // 2)
    for row in range(6):
        one = slice(row, row + 1)
        alone, valid = keep_indices(scores[one], positions[one], budget[one], slots // 2)
        assert torch.equal(alone, whole[one])
        expected = [
            plain_keep(scores[row, head].tolist(), positions[row, head].tolist(), slots // 2) for head in range(2)
        ]
        assert chosen(alone, valid) == expected


@pytest.mark.parametrize("change", [lambda x: x * 1e4, lambda x: x - 1e4, lambda x: -x.abs() - 1])
def test_protected_keys_stay_whatever_the_scale_of_the_others(random_view, change):
    """kvpress 227."""
    view = random_view(tokens=12, budget=5)
    view = dataclasses.replace(view, attention=change(view.attention))
    slots, _ = keep_indices(make_policy("h2o", recent=3).score(view), view.positions, view.budget, 5)
    assert slots[..., -3:].tolist() == [[[9, 10, 11]] * 2]


@pytest.mark.parametrize("name", available_policies())
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.filterwarnings("ignore:RecentPolicy without sinks")
def test_a_prompt_of_one_or_two_tokens_keeps_one(random_view, name, tokens):
    """kvpress 264."""
    view = random_view(tokens=tokens, budget=1)
    scores = checked_scores(make_policy(name), view)
    assert chosen(*keep_indices(scores, view.positions, view.budget, 1)) == [
        plain_keep(head.tolist(), list(range(tokens)), 1) for head in scores[0]
    ]


class Returns:
    """A policy that returns what it was given."""

    def __init__(self, scores):
        self.scores = scores

    def score(self, view):
        return self.scores


@pytest.fixture
def view():
    """Layer 3; two rows of three keys in four slots, budget 2."""
    view = CacheView.of_prompt(torch.zeros(2, 1, 4, 2), budget=2, lengths=torch.tensor([3, 3]))
    return dataclasses.replace(view, layer_idx=3)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([[1.0]], r"score returned list, expected a tensor \[B, H, K\]"),
        (torch.zeros(2, 4), r"shape \[2, 4\], expected \[B, H, K\] = \[2, 1, 4\]"),
        (torch.zeros(1, 1, 4), r"shape \[1, 1, 4\], expected"),
        (torch.zeros(2, 1, 4, dtype=torch.float64), r"scores are torch.float64, expected torch.float32: return scores"),
        (torch.zeros(2, 1, 4, dtype=torch.bfloat16), "scores are torch.bfloat16"),
        (torch.zeros(2, 1, 4, dtype=torch.int64), "scores are torch.int64"),
        (torch.zeros(2, 1, 4, device="meta"), "scores are on meta, expected cpu"),
        (
            torch.tensor([[[0.0, 0, 0, 0]], [[0, 0, NAN, NAN]]]),
            "2 keys score NaN, expected a number; the first is position 1 of row 1, KV head 0",
        ),
        (
            torch.tensor([[[0.0, 0, 0, 0]], [[0, -INF, -INF, 0]]]),
            "1 keys of row 1, KV head 0 score above -inf, expected at least 2",
        ),
    ],
)
def test_what_a_policy_gets_wrong_names_the_policy_and_the_layer(view, scores, message):
    with pytest.raises(PolicyError, match="policy Returns at layer 3: .*" + message):
        checked_scores(Returns(scores), view)


def test_what_a_policy_may_do(view):
    """NaN in an empty slot, -inf for keys beyond the budget, -inf for a key that fits into no budget anyway."""
    for row in ([NAN, 0.0, 1.0, 2.0], [NAN, -INF, 1.0, 2.0], [-INF, -INF, 1.0, INF], [INF, -1e38, -INF, 0.0]):
        scores = torch.tensor([[row], [row]])
        assert checked_scores(Returns(scores), view) is scores
    few = dataclasses.replace(view, budget=torch.full((2, 1), 9))
    with pytest.raises(PolicyError, match="2 keys of row 0, KV head 0 score above -inf, expected at least 3"):
        checked_scores(Returns(torch.tensor([[[0.0, -INF, 1.0, 2.0]]] * 2)), few)


def test_a_key_that_may_never_be_kept_is_not_kept():
    scores = torch.tensor([[[-INF, 0.0, -1e38, -INF]]])
    assert keep_indices(scores, torch.arange(4).view(1, 1, 4), torch.tensor([[2]]), 2)[0].tolist() == [[[1, 2]]]
