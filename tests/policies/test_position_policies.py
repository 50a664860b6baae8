"""streaming and recent."""

import dataclasses
import warnings

import pytest

from smdlib.policies import RecentPolicy, StreamingPolicy, keep_indices, make_policy

INF = float("inf")


def kept_positions(policy, view):
    slots, valid = keep_indices(policy.score(view), view.positions, view.budget, int(view.budget.max()))
    assert valid.all()
    return view.positions.gather(-1, slots).tolist()


@pytest.fixture
def recent():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return RecentPolicy()


def test_streaming_keeps_sinks_and_the_newest(random_view, scrambled):
    view = random_view(budget=5, lengths=[12, 7], rows=2, heads=1)
    expected = [[[0, 1, 9, 10, 11]], [[0, 1, 4, 5, 6]]]
    assert kept_positions(StreamingPolicy(sinks=2), view) == expected
    assert kept_positions(StreamingPolicy(sinks=2), scrambled(view)[0]) == expected


def test_recent_keeps_the_newest(random_view, scrambled, recent):
    view = random_view(budget=3, lengths=[12, 7], rows=2, heads=1)
    assert kept_positions(recent, view) == [[[9, 10, 11]], [[4, 5, 6]]]
    assert kept_positions(recent, scrambled(view)[0]) == [[[9, 10, 11]], [[4, 5, 6]]]
    assert kept_positions(RecentPolicy(sinks=1), view) == [[[0, 10, 11]], [[0, 5, 6]]]


def test_scores_are_positions_and_empty_slots_are_never_nan(random_view, recent):
    view = random_view(tokens=4, rows=2, heads=1, lengths=[4, 2])
    assert recent.score(view).tolist() == [[[0, 1, 2, 3]], [[-INF, -INF, 0, 1]]]
    assert StreamingPolicy(sinks=1).score(view).tolist() == [[[INF, 1, 2, 3]], [[-INF, -INF, INF, 1]]]


def test_a_budget_equal_to_the_sinks_keeps_the_sinks(random_view):
    """kvpress 277."""
    assert kept_positions(StreamingPolicy(sinks=4), random_view(budget=4, heads=1)) == [[[0, 1, 2, 3]]]


def test_positions_beyond_float32_stay_in_order(recent, random_view):
    far = 2**24
    view = random_view(tokens=6, heads=1, budget=3)
    view = dataclasses.replace(view, positions=view.positions + far, seen=view.seen + far)
    assert kept_positions(recent, view) == [[[far + 3, far + 4, far + 5]]]


def test_without_sinks_it_warns_once_where_it_is_built(recent, random_view):
    """keys_values 140."""
    with pytest.warns(UserWarning, match="RecentPolicy without sinks evicts the first tokens.*set sinks=4") as caught:
        policy = RecentPolicy()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="StreamingPolicy without sinks"):
        make_policy("streaming", sinks=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.score(random_view())
        make_policy("recent", sinks=1)
        make_policy("streaming")


@pytest.mark.parametrize("name", ["streaming", "recent"])
@pytest.mark.parametrize(("sinks", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), (None, TypeError)])
def test_refuses(name, sinks, error):
    with pytest.raises(error, match=f"Policy.sinks is {sinks}, expected an int >= 0"):
        make_policy(name, sinks=sinks)
