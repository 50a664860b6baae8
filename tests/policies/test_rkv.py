import dataclasses
import math

import pytest
import torch

from smdlib.policies import RKVPolicy, make_policy, query_window, tracks_attention

INF = float("inf")


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def softmax(logits):
    exps = {name: math.exp(value - max(logits.values())) for name, value in logits.items()}
    return {name: value / sum(exps.values()) for name, value in exps.items()}


def plain_importance(key_of, outside, queries, scaling, kernel_size):
    """A for the positions outside; queries[head of the group][query of the window]."""
    mass = dict.fromkeys(outside, 0.0)
    for i in range(len(queries[0])):
        weights = softmax({p: max(dot(head[i], key_of[p]) * scaling for head in queries) for p in outside})
        for p in outside:
            mass[p] += weights[p] / len(queries[0])
    half = kernel_size // 2
    return {p: max(mass[q] for q in outside[max(0, n - half) : n + half + 1]) for n, p in enumerate(outside)}


def plain_redundancy(key_of, threshold):
    """S for all positions present."""
    order = sorted(key_of)
    total = dict.fromkeys(order, 0.0)
    for i in order:
        row = {
            k: 0.0
            if i == k
            else dot(key_of[i], key_of[k]) / math.sqrt(dot(key_of[i], key_of[i]) * dot(key_of[k], key_of[k]))
            for k in order
        } | {i: 0.0}
        row[max([k for k in order if row[k] > threshold], default=order[0])] = 0.0
        for k in order:
            total[k] += row[k]
    return softmax({k: total[k] / len(order) for k in order})


def plain_rkv(view, window=8, kernel_size=7, mix_lambda=0.07, threshold=0.5):
    """The definition, one row, head, query and key at a time, in Python floats."""
    rows, heads, slots = view.positions.shape
    group, width = view.queries.shape[1] // heads, view.queries.shape[2]
    scores = torch.full((rows, heads, slots), -INF)
    for row in range(rows):
        seen = int(view.seen[row])
        for head in range(heads):
            slot_of = {p: slot for slot, p in enumerate(view.positions[row, head].tolist()) if p >= 0}
            key_of = {p: view.keys[row, head, slot].tolist() for p, slot in slot_of.items()}
            outside = sorted(p for p in slot_of if p < seen - window)
            for slot in slot_of.values():
                scores[row, head, slot] = INF
            if not outside:
                continue
            queries = view.queries[row, head * group : (head + 1) * group, width - window :].tolist()
            importance = plain_importance(key_of, outside, queries, view.scaling, kernel_size)
            redundancy = plain_redundancy(key_of, threshold)
            for p in outside:
                scores[row, head, slot_of[p]] = mix_lambda * importance[p] - (1 - mix_lambda) * redundancy[p]
    return scores


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


OPTIONS = [
    {"window": 1, "kernel_size": 1, "mix_lambda": 0.5, "threshold": 0.0},
    {"window": 4, "kernel_size": 5, "mix_lambda": 0.07, "threshold": 0.5},
    {"window": 3, "kernel_size": 3, "mix_lambda": 1.0, "threshold": 0.9},
    {"window": 2, "kernel_size": 7, "mix_lambda": 0.0, "threshold": 0.2},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("group", [1, 3])
def test_equals_the_definition_wherever_the_keys_are(random_view, scrambled, options, group):
    view = random_view(rows=4, group=group, window=4, lengths=[12, 7, 4, 1])
    for case in (view, scrambled(view)[0]):
        assert_same(RKVPolicy(**options).score(case), plain_rkv(case, **options))


def test_after_evictions_the_keys_that_are_left_are_compared(random_view, scrambled):
    view = random_view(rows=2, tokens=16, window=3)
    gone = torch.rand(view.positions.shape, generator=torch.Generator().manual_seed(3)) < 0.4
    gone[..., -3:] = False
    gone[..., 0] = True  # the row without a similar key spares the oldest that is left
    view, _ = scrambled(dataclasses.replace(view, positions=view.positions.masked_fill(gone, -1)))
    for options in ({"window": 3, "kernel_size": 3}, {"window": 2, "kernel_size": 1, "threshold": 1.0}):
        assert_same(RKVPolicy(**options).score(view), plain_rkv(view, **options))


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_similarities_are_made_in_blocks(random_view, scrambled, monkeypatch, threshold):
    view, _ = scrambled(random_view(rows=2, heads=3, tokens=20))
    policy = RKVPolicy(window=4, threshold=threshold)
    whole = policy.score(view)
    monkeypatch.setattr("smdlib.policies.rkv._BLOCK", 24 * 3 * 23 * 7)  # seven rows of 23 at a time
    assert_same(policy.score(view), whole)
    monkeypatch.setattr("smdlib.policies._chunks._CHUNK", 1)  # and one head
    assert_same(policy.score(view), whole)


def test_a_budget_below_the_window_leaves_nothing_outside(random_view):
    view = random_view(tokens=8, window=4)
    positions = view.positions.clone()
    positions[..., :6] = -1
    scores = RKVPolicy(window=4).score(dataclasses.replace(view, positions=positions))
    assert scores.tolist() == [[[-INF] * 6 + [INF] * 2] * 2]


def test_asks_for_its_queries(random_view):
    policy = make_policy("rkv", window=5)
    assert (query_window(policy), tracks_attention(policy)) == (5, False)
    with pytest.raises(ValueError, match=r"RKVPolicy needs the last 5 queries at layer 0, view.queries has 4"):
        policy.score(random_view(window=4))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 0}, ValueError, "RKVPolicy.window is 0, expected an int >= 1"),
        ({"kernel_size": 4}, ValueError, "RKVPolicy.kernel_size is 4, expected an odd number"),
        ({"mix_lambda": 1.5}, ValueError, "RKVPolicy.mix_lambda is 1.5, expected a number from 0 to 1"),
        ({"mix_lambda": float("nan")}, ValueError, "RKVPolicy.mix_lambda is nan"),
        ({"threshold": "0.5"}, TypeError, "RKVPolicy.threshold is '0.5', expected a number from 0 to 1"),
        ({"evict_every": 128}, TypeError, "policy 'rkv' has no option evict_every"),
    ],
)
def test_refuses(options, error, message):
    with pytest.raises(error, match=message):
        make_policy("rkv", **options)
