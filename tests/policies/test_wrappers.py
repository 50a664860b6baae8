"""Protected and Combined."""

import dataclasses

import pytest
import torch

from smdlib.policies import (
    CacheView,
    Combined,
    H2OPolicy,
    KnormPolicy,
    PolicyError,
    Protected,
    SnapKVPolicy,
    StreamingPolicy,
    keep_indices,
    make_policy,
    needs_tokens,
    query_window,
    tracks_attention,
)

INF = float("inf")


class Returns:
    """A policy that scores by position as it is told, and keeps what it was shown."""

    def __init__(self, scores, window=0, tracks=False):
        self.scores, self.query_window, self.tracks_attention = torch.tensor(scores), window, tracks

    def score(self, view):
        self.view = view
        return self.scores[view.positions.clamp(min=0)]


def kept_positions(policy, view):
    slots, valid = keep_indices(policy.score(view), view.positions, view.budget, int(view.budget.max()))
    assert valid.all()
    return view.positions.gather(-1, slots).tolist()


# --- Protected


@pytest.mark.parametrize(
    "options", [{"sinks": 2}, {"recent": 3}, {"spans": [(4, 6), (9, 10)]}, {"sinks": 1, "recent": 1, "spans": [(3, 5)]}]
)
def test_protects_these_and_leaves_the_others(random_view, scrambled, options):
    view, _ = scrambled(random_view(rows=2, lengths=[12, 7]))
    scores = Protected("keydiff", **options).score(view)
    inner = make_policy("keydiff").score(view)
    for row, heads in enumerate(view.positions.tolist()):
        for head, positions in enumerate(heads):
            for slot, position in enumerate(positions):
                safe = (
                    position < options.get("sinks", 0)
                    or position >= view.seen[row] - options.get("recent", 0)
                    or any(first <= position < end for first, end in options.get("spans", []))
                )
                expected = INF if safe and position >= 0 else inner[row, head, slot]
                assert scores[row, head, slot] == expected


def test_protects_tokens_wherever_they_stand(scrambled):
    ids = torch.tensor([[0, 0, 3, 9, 3, 5], [3, 1, 2, 9, 4, 9]])
    view = CacheView.of_prompt(torch.ones(2, 1, 6, 2), budget=3, lengths=torch.tensor([4, 6]), token_ids=ids)
    assert view.token_ids[:, 0].tolist() == [[-1, -1, 3, 9, 3, 5], [3, 1, 2, 9, 4, 9]]
    policy = Protected("knorm", token_ids=[9, 3])
    safe = (policy.score(view)[:, 0] == INF).tolist()
    assert safe == [[False, False, True, True, True, False], [True, False, False, True, False, True]]
    assert kept_positions(policy, view) == [[[0, 1, 2]], [[0, 3, 5]]]
    with pytest.raises(ValueError, match=r"Protected needs view.token_ids at layer 0, got None"):
        policy.score(dataclasses.replace(view, token_ids=None))


def test_a_budget_smaller_than_what_is_protected_keeps_the_newest(random_view):
    view = random_view(rows=1, heads=1, budget=3)
    assert kept_positions(Protected("knorm", sinks=2, recent=2), view) == [[[1, 10, 11]]]


def test_a_policy_keeps_its_own_protection():
    view = CacheView.of_prompt(torch.zeros(1, 1, 6, 2), budget=3)
    assert kept_positions(Protected(StreamingPolicy(sinks=1), spans=[(2, 3)]), view) == [[[0, 2, 5]]]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "Protected protects nothing: set sinks, recent, spans or token_ids"),
        ({"token_ids": [-1]}, ValueError, "token_ids has -1, expected token ids"),
        ({"token_ids": ["the"]}, ValueError, "token_ids has 'the', expected token ids"),
        ({"sinks": -1}, ValueError, "Protected.sinks is -1, expected an int >= 0"),
        ({"recent": 0.5}, TypeError, "Protected.recent is 0.5"),
        ({"spans": [(3, 3)]}, ValueError, r"spans has \(3, 3\), expected 0 <= first < end"),
        ({"spans": [(-2, 3)]}, ValueError, r"spans has \(-2, 3\), expected 0 <= first < end"),
        ({"spans": [(1, 2, 3)]}, TypeError, "expected pairs of positions"),
        ({"spans": [4]}, TypeError, "spans has 4, expected pairs of positions"),
        ({"spans": [(0, 2.0)]}, TypeError, "expected pairs of positions"),
    ],
)
def test_protected_refuses(options, error, message):
    with pytest.raises(error, match=message):
        Protected("knorm", **options)


# --- Combined


def test_combined_is_the_weighted_sum_of_ranks(random_view, scrambled):
    """Written out: ranks among the present keys of a head that no policy protects."""
    view, _ = scrambled(random_view(rows=2, lengths=[12, 7]))
    parts = [(SnapKVPolicy(window=2, kernel_size=3), 1.0), (KnormPolicy(), 0.5), (StreamingPolicy(sinks=1), 2.0)]
    scores = Combined(parts).score(view)
    singles = [policy.score(view) for policy, _ in parts]
    for row, heads in enumerate(view.positions.tolist()):
        for head, positions in enumerate(heads):
            present = [slot for slot, position in enumerate(positions) if position >= 0]
            free = [s for s in present if all(single[row, head, s] < INF for single in singles)]
            for slot in range(len(positions)):
                if slot in free:
                    expected = sum(
                        weight * sum(bool(single[row, head, j] < single[row, head, slot]) for j in free) / len(free)
                        for single, (_, weight) in zip(singles, parts, strict=True)
                    )
                else:
                    expected = INF if slot in present else -INF
                assert float(scores[row, head, slot]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("change", [lambda x: x * 1e4, lambda x: x - 1e4, torch.exp])
def test_scales_do_not_matter(change):
    view = CacheView.of_prompt(torch.zeros(1, 1, 5, 2), budget=2)
    one, other = [0.1, 0.5, 0.3, 0.2, 0.4], [3.0, 1.0, 4.0, 1.5, 9.0]
    expected = Combined([(Returns(one), 1.0), (Returns(other), 1.0)]).score(view)
    changed = change(torch.tensor(one)).tolist()
    assert torch.equal(Combined([(Returns(changed), 1.0), (Returns(other), 1.0)]).score(view), expected)
    alone = CacheView.of_prompt(torch.zeros(1, 1, 5, 2), budget=2)
    assert kept_positions(Combined([(Returns(one), 0.3)]), alone) == kept_positions(Returns(one), alone)


def test_ties_share_a_rank_and_bounds_survive():
    view = CacheView.of_prompt(torch.zeros(1, 1, 5, 2), budget=2)
    policy = Combined([(Returns([2.0, 2.0, 1.0, INF, -INF]), 1.0), (Returns([0.0, -0.0, 0.0, -INF, 0.0]), 4.0)])
    assert policy.score(view).tolist() == [[[0.5, 0.5, 0.25, INF, -INF]]]


def test_each_policy_sees_what_it_asked_for(random_view):
    wide, none, mass = Returns([0.0] * 12, window=3), Returns([0.0] * 12), Returns([0.0] * 12, window=1, tracks=True)
    view = random_view(window=4)
    Combined([(wide, 1), (none, 1), (mass, 1)]).score(view)
    assert torch.equal(wide.view.queries, view.queries[:, :, -3:])
    assert torch.equal(mass.view.queries, view.queries[:, :, -1:])
    assert none.view.queries is None and none.view.attention is None and wide.view.attention is None
    assert torch.equal(mass.view.attention, view.attention)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([], ValueError, "Combined.parts is empty"),
        ("knorm", TypeError, "Combined.parts is 'knorm', expected pairs"),
        (["knorm"], TypeError, "Combined.parts has 'knorm', expected a pair"),
        ([("knorm",)], TypeError, "expected a pair of a policy and its weight"),
        ([("knorm", "1")], TypeError, "weight '1', expected a number above 0"),
        ([("knorm", 0)], ValueError, "weight 0, expected a number above 0"),
        ([("knorm", float("nan"))], ValueError, "weight nan, expected a number above 0"),
        ([("knorm", float("inf"))], ValueError, "weight inf"),
        ([("nobody", 1.0)], ValueError, "unknown policy 'nobody'"),
    ],
)
def test_combined_refuses(parts, error, message):
    with pytest.raises(error, match=message):
        Combined(parts)


# --- both


def test_wrappers_ask_for_what_their_policies_ask():
    snapkv, h2o = SnapKVPolicy(window=5), H2OPolicy()
    both = Combined([(snapkv, 1.0), (h2o, 1.0), ("tova", 1.0)])
    for policy, asks in (
        (Protected(snapkv, sinks=1), (5, False)),
        (Protected(h2o, sinks=1), (0, True)),
        (both, (5, True)),
    ):
        assert (query_window(policy), tracks_attention(policy)) == asks
    assert (query_window(Protected(both, recent=1)), tracks_attention(Protected(both, recent=1))) == (5, True)
    assert tracks_attention(Combined([(snapkv, 1)])) is False
    tokens = Protected("knorm", token_ids=[1])
    assert needs_tokens(tokens) and needs_tokens(Combined([(tokens, 1), (h2o, 1)]))
    assert (
        needs_tokens(Protected(tokens, sinks=1))
        and not needs_tokens(Protected(h2o, sinks=1))
        and not needs_tokens(both)
    )


def test_wrappers_compose_and_are_written_as_text(random_view):
    sunk = "protected(policy='knorm', sinks=1)"
    both = f"combined(parts=[('snapkv(window=4)', 1.0), ({sunk!r}, 2)])"
    text = f"protected(policy={both!r}, recent=5)"
    built = Protected(Combined([(SnapKVPolicy(window=4), 1.0), (Protected(KnormPolicy(), sinks=1), 2.0)]), recent=5)
    assert make_policy(text) == built
    view = random_view(budget=6)
    assert all(head[0] == 0 and head[-5:] == [7, 8, 9, 10, 11] for head in kept_positions(built, view)[0])
    assert hash(built) == hash(make_policy(text))
    with pytest.raises(dataclasses.FrozenInstanceError):
        built.recent = 3


def test_what_a_wrapped_policy_gets_wrong_is_its_own_fault(random_view):
    bad = Returns([float("nan")] * 12)
    for policy in (Protected(bad, recent=12), Combined([("knorm", 1.0), (bad, 1.0)])):
        with pytest.raises(PolicyError, match="policy Returns at layer 0: 24 keys score NaN"):
            policy.score(random_view())
