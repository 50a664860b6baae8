"""What holds for every policy, on views that hypothesis draws: gaps, empty slots, ragged rows, budgets per head."""

import dataclasses
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smdlib.policies import CacheView, checked_scores, keep_indices, make_policy

INF, NAN = float("inf"), float("nan")
WINDOW = 3
OPTIONS = {
    "streaming": {"sinks": 2},
    "recent": {"sinks": 0},
    "random": {"recent": 2},
    "snapkv": {"window": WINDOW, "kernel_size": 3},
    "h2o": {},
    "tova": {},
    "knorm": {},
    "keydiff": {},
    "lagkv": {"sinks": 1, "lag": 3},
    "rkv": {"window": WINDOW, "kernel_size": 3},
    "protected": {"policy": "keydiff", "sinks": 1, "recent": 2, "spans": [(4, 6)]},
    "combined": {"parts": [(f"snapkv(window={WINDOW})", 1.0), ("knorm", 0.5), ("h2o(recent=1)", 0.25)]},
}


def policy_of(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `recent` warns of missing sinks
        return make_policy(name, **OPTIONS[name])


def protected_by(name, view):
    """Which keys the policy's definition protects, ``[B, H, K]`` bool."""
    age = view.seen[:, None, None] - view.positions  # 1 for the newest
    recent = {"random": 2, "snapkv": WINDOW, "rkv": WINDOW, "tova": 1, "h2o": (view.budget // 2)[..., None]}
    recent |= {"protected": 2, "combined": WINDOW}
    sinks = {"streaming": 2, "lagkv": 1, "protected": 1}
    span = (view.positions >= 4) & (view.positions < 6) & (name == "protected")
    return view.present & ((age <= recent.get(name, 0)) | (view.positions < sinks.get(name, 0)) | span)


@st.composite
def views(draw, dtype=torch.float32):
    """A cache in the middle of decoding: each head has other keys, in other slots; empty slots hold NaN."""
    rows, heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    slots, size = draw(st.integers(1, 14)), draw(st.integers(2, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    seen = torch.randint(1, 18, (rows,), generator=generator)
    positions = torch.full((rows, heads, slots), -1)
    for row in range(rows):
        for head in range(heads):
            there = torch.randperm(int(seen[row]), generator=generator)[:slots]
            positions[row, head, torch.randperm(slots, generator=generator)[: len(there)]] = there
            if not (there == seen[row] - 1).any():  # the newest key is always there
                positions[row, head, int(positions[row, head].argmax())] = seen[row] - 1

    def draw_states(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    empty = positions < 0
    return CacheView(
        layer_idx=1,
        num_layers=3,
        keys=draw_states(rows, heads, slots, size).masked_fill(empty[..., None], NAN),
        values=draw_states(rows, heads, slots, size).masked_fill(empty[..., None], NAN),
        positions=positions,
        seen=seen,
        budget=torch.randint(1, slots + 2, (rows, heads), generator=generator),
        scaling=size**-0.5,
        queries=draw_states(rows, heads * group, WINDOW, size),
        attention=torch.rand(rows, heads, slots, generator=generator).masked_fill(empty, NAN),
    )


def with_slots(view, order):
    """The slots ``order [B, H, N]`` of the view, N of any size."""
    by_channel = order[..., None].expand(-1, -1, -1, view.keys.shape[-1])
    moved = {name: getattr(view, name).gather(2, order) for name in ("positions", "attention")}
    moved |= {name: getattr(view, name).gather(2, by_channel) for name in ("keys", "values")}
    return dataclasses.replace(view, **moved)


def shuffled(view, seed):
    return torch.rand(view.positions.shape, generator=torch.Generator().manual_seed(seed)).argsort(-1)


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def kept_positions(scores, view):
    slots, valid = keep_indices(scores, view.positions, view.budget, int(view.budget.max()))
    return view.positions.gather(-1, slots).masked_fill(~valid, -1)


def each_policy(test):
    return pytest.mark.parametrize("name", OPTIONS)(settings(max_examples=40, deadline=None)(test))


@each_policy
@given(views(), st.integers(0, 99))
def test_slots_in_another_order_score_the_same(name, view, seed):
    order = shuffled(view, seed)
    scores = checked_scores(policy_of(name), view)
    moved = checked_scores(policy_of(name), with_slots(view, order))
    assert scores.dtype == torch.float32
    assert_same(moved, scores.gather(-1, order))


@each_policy
@given(views(), st.floats(allow_nan=True, width=32), st.integers(1, 5))
def test_empty_slots_do_not_matter(name, view, content, more):
    scores = checked_scores(policy_of(name), view)
    empty = torch.full((*view.positions.shape[:2], more), -1)
    states = torch.full((*empty.shape, view.keys.shape[-1]), content)
    grown = dataclasses.replace(
        view,
        positions=torch.cat([view.positions, empty], 2),
        keys=torch.cat([view.keys, states], 2),
        values=torch.cat([view.values, states], 2),
        attention=torch.cat([view.attention, states[..., 0]], 2),
    )
    with_more = checked_scores(policy_of(name), grown)
    assert_same(with_more[..., :-more], scores)
    assert (with_more[grown.positions < 0] == -INF).all()


@each_policy
@given(views())
def test_is_deterministic_changes_nothing_and_a_row_stands_alone(name, view):
    policy = policy_of(name)
    before = {key: value.clone() for key, value in vars(view).items() if isinstance(value, torch.Tensor)}
    scores = policy.score(view)
    assert torch.equal(policy.score(view), scores)
    for key, value in before.items():
        assert torch.equal(getattr(view, key).nan_to_num(7.0), value.nan_to_num(7.0)), key
    for row in range(len(view.seen)):
        one = {key: value[row : row + 1] for key, value in before.items()}
        alone = policy.score(dataclasses.replace(view, **one))
        # To rounding: a product of matrices may add in another order for another batch.
        torch.testing.assert_close(alone, scores[row : row + 1], rtol=1e-5, atol=1e-6, equal_nan=True)


@each_policy
@given(views())
def test_protects_what_it_says_and_nothing_else(name, view):
    assert torch.equal(checked_scores(policy_of(name), view) == INF, protected_by(name, view))


@each_policy
@given(views(dtype=torch.bfloat16))
def test_bf16_keys_are_scored_in_float32(name, view):
    scores = checked_scores(policy_of(name), view)
    wide = dataclasses.replace(view, **{key: getattr(view, key).float() for key in ("keys", "values", "queries")})
    # To rounding: block sizes may follow the bytes of a key. Scored in bfloat16 they would be off by a hundredth.
    torch.testing.assert_close(scores, checked_scores(policy_of(name), wide), rtol=1e-5, atol=1e-6)


@each_policy
@given(views(dtype=torch.bfloat16), st.integers(0, 99))
def test_equal_keys_are_told_apart_by_position_alone(name, view, seed):
    """Every key the same: what stays follows from positions, in whatever slots and batch."""
    present = view.present[..., None]
    same = {key: torch.where(present, torch.ones_like(getattr(view, key)), NAN) for key in ("keys", "values")}
    view = dataclasses.replace(view, **same, attention=torch.where(view.present, 1.0, NAN))
    moved = with_slots(view, shuffled(view, seed))
    kept = [kept_positions(checked_scores(policy_of(name), case), case) for case in (view, moved)]
    assert torch.equal(*kept)
    # Then the newest stay: no policy but the random one, sinks, and those that compare keys may prefer older ones.
    if name in ("recent", "snapkv", "h2o", "knorm", "keydiff"):
        for row in range(len(view.seen)):
            for head, budget in enumerate(view.budget[row].tolist()):
                newest = sorted(p for p in view.positions[row, head].tolist() if p >= 0)[-budget:]
                assert [p for p in kept[0][row, head].tolist() if p >= 0] == newest
