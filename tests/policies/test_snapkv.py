import dataclasses
import math

import pytest
import torch

from smdlib.policies import SnapKVPolicy, checked_scores, keep_indices, make_policy, query_window

INF = float("inf")


def plain_snapkv(view, window, kernel_size, pooling):
    """The definition, one query and one key at a time, in float64."""
    rows, heads, slots = view.positions.shape
    width = view.queries.shape[2]
    group = view.queries.shape[1] // heads
    scores = torch.full((rows, heads, slots), -INF)
    for row in range(rows):
        seen = int(view.seen[row])
        for head in range(heads):
            slot_of = {int(p): slot for slot, p in enumerate(view.positions[row, head]) if p >= 0}
            mass = dict.fromkeys(slot_of, 0.0)
            for query_head in range(head * group, (head + 1) * group):
                for position in range(max(0, seen - window), seen):
                    query = view.queries[row, query_head, position - seen + width].double()
                    logits = {
                        p: float(query @ view.keys[row, head, slot].double()) * view.scaling
                        for p, slot in slot_of.items()
                        if p <= position
                    }
                    total = sum(math.exp(logit) for logit in logits.values())
                    for p, logit in logits.items():
                        mass[p] += math.exp(logit) / total / group
            outside = sorted(p for p in slot_of if p < seen - window)
            for i, p in enumerate(outside):
                near = [mass[q] for q in outside[max(0, i - kernel_size // 2) : i + kernel_size // 2 + 1]]
                scores[row, head, slot_of[p]] = max(near) if pooling == "max" else sum(near) / kernel_size
            for p in slot_of:
                if p >= seen - window:
                    scores[row, head, slot_of[p]] = INF
    return scores


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize(("window", "kernel_size"), [(1, 1), (1, 3), (4, 5), (4, 7), (3, 1)])
def test_equals_the_definition(random_view, pooling, window, kernel_size):
    view = random_view(rows=2, window=window)
    scores = SnapKVPolicy(window, kernel_size, pooling).score(view)
    assert_same(scores, plain_snapkv(view, window, kernel_size, pooling))


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_left_padding_empty_slots_and_slot_order_do_not_matter(random_view, row_of, scrambled, pooling):
    policy = SnapKVPolicy(window=4, kernel_size=5, pooling=pooling)
    batch = random_view(rows=4, lengths=[12, 7, 4, 1])  # the third is exactly the window, the last is shorter
    scores = policy.score(batch)
    assert_same(scores, plain_snapkv(batch, 4, 5, pooling))
    for row, length in enumerate([12, 7, 4, 1]):
        assert_same(scores[row : row + 1, :, -length:], policy.score(row_of(batch, row)))
    moved, slot = scrambled(batch)
    scores_moved = policy.score(moved)
    assert_same(scores_moved.gather(-1, slot), scores)
    assert torch.equal(scores_moved == -INF, moved.positions < 0)


def test_after_evictions_neighbours_are_those_that_are_left(random_view, scrambled):
    """A cache in the middle of decoding: gaps in the positions, each head its own, and slots in any order."""
    view = random_view(rows=2, tokens=16, window=3)
    gone = torch.rand(view.positions.shape, generator=torch.Generator().manual_seed(3)) < 0.4
    gone[..., -3:] = False
    view, _ = scrambled(dataclasses.replace(view, positions=view.positions.masked_fill(gone, -1)))
    for pooling in ("max", "avg"):
        scores = SnapKVPolicy(window=3, kernel_size=3, pooling=pooling).score(view)
        assert_same(scores, plain_snapkv(view, 3, 3, pooling))


def test_a_query_whose_keys_have_all_left_has_no_vote(random_view):
    """A budget below the window evicts keys of the window itself; the older queries then see nothing."""
    view = random_view(tokens=8, window=4)
    positions = view.positions.clone()
    positions[..., :7] = -1
    scores = SnapKVPolicy(window=4).score(dataclasses.replace(view, positions=positions))
    assert scores.tolist() == [[[-INF] * 7 + [INF]] * 2]
    positions[..., 1] = 1
    scores = SnapKVPolicy(window=4, kernel_size=1).score(dataclasses.replace(view, positions=positions))
    assert_same(scores, plain_snapkv(dataclasses.replace(view, positions=positions), 4, 1, "max"))


def test_uses_only_the_last_queries_of_a_longer_window(random_view):
    view = random_view(window=8)
    shorter = dataclasses.replace(view, queries=view.queries[:, :, -3:])
    policy = SnapKVPolicy(window=3)
    assert torch.equal(policy.score(view), policy.score(shorter))


def test_many_heads_are_scored_in_chunks(random_view, monkeypatch):
    view = random_view(rows=2, heads=3)
    whole = SnapKVPolicy(window=4).score(view)
    monkeypatch.setattr("smdlib.policies._chunks._CHUNK", 2 * 2 * 4 * 12)  # two heads at a time
    assert_same(SnapKVPolicy(window=4).score(view), whole)


def test_bf16_keys_give_the_same_scores_and_keep_set_whatever_the_batch_size(random_view):
    """kvpress 276: bf16 keys, most scores tie."""
    view = random_view(rows=5, tokens=40, budget=16, dtype=torch.bfloat16)
    coarse = {name: getattr(view, name).sign() for name in ("keys", "queries")}
    view = dataclasses.replace(view, **coarse)
    policy = SnapKVPolicy(window=4, kernel_size=5)

    def kept(rows):
        part = {name: getattr(view, name)[rows] for name in ("keys", "positions", "seen", "queries", "budget")}
        cut = dataclasses.replace(view, **part)
        scores = policy.score(cut)
        return scores, keep_indices(scores, cut.positions, cut.budget, 16)[0]

    scores, slots = kept(slice(0, 5))
    assert any(len(set(head)) < 30 for head in scores.flatten(0, 1).tolist()), "the scores must tie"
    for rows in (slice(0, 1), slice(2, 4), slice(4, 5)):
        scores_part, slots_part = kept(rows)
        assert torch.equal(scores_part, scores[rows])
        assert torch.equal(slots_part, slots[rows])


def test_prefix_of_one_or_two_tokens_is_all_window(random_view):
    """kvpress 264."""
    for tokens in (1, 2):
        view = random_view(tokens=tokens, budget=1)
        scores = checked_scores(SnapKVPolicy(), view)
        assert (scores == INF).all()
        slots, valid = keep_indices(scores, view.positions, view.budget, 1)
        assert slots.tolist() == [[[tokens - 1]] * 2]
        assert valid.all()


def test_asks_for_its_queries(random_view):
    assert query_window(make_policy("snapkv", window=5)) == 5
    view = random_view(window=4)
    with pytest.raises(ValueError, match=r"last 5 queries at layer 0, view.queries has 4"):
        SnapKVPolicy(window=5).score(view)
    with pytest.raises(ValueError, match=r"view.queries has 0"):
        SnapKVPolicy().score(dataclasses.replace(view, queries=None))
    short = random_view(rows=2, window=4, lengths=[3, 4])  # nobody has a fifth query: nothing is missing
    assert_same(SnapKVPolicy(window=5).score(short), plain_snapkv(short, 5, 7, "max"))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 0}, ValueError, "SnapKVPolicy.window is 0, expected an int >= 1"),
        ({"window": 0.4}, TypeError, "SnapKVPolicy.window is 0.4, expected an int >= 1"),
        ({"kernel_size": 4}, ValueError, "kernel_size is 4, expected an odd number"),
        ({"kernel_size": -1}, ValueError, "kernel_size is -1"),
        ({"pooling": "mean"}, ValueError, "pooling is 'mean', expected 'max' or 'avg'"),
    ],
)
def test_refuses(options, error, message):
    with pytest.raises(error, match=message):
        make_policy("snapkv", **options)
