import dataclasses
import itertools
import math
import statistics

import pytest
import torch

from smdlib.policies import CacheView, LagKVPolicy, keep_indices, make_policy

INF = float("inf")


def softmax(values):
    exps = [math.exp(value) for value in values]
    return [value / sum(exps) for value in exps]


def scaled(value, reference):
    low, high = min(reference), max(reference)
    return (value - low) / (high - low) if high > low else 0.0


def stands_out(part, following):
    """Softmax over one partition of the spread of each vector, scaled channel by channel by the next partition."""
    channels = list(zip(*following, strict=True))
    return softmax([statistics.stdev(map(scaled, vector, channels)) for vector in part])


def plain_lagkv(view, sinks, lag):
    """The definition, one row, head, partition and key at a time, in Python floats."""
    scores = torch.full(view.positions.shape, -INF)
    for row, heads in enumerate(view.positions.tolist()):
        for head, positions in enumerate(heads):
            slot_of = {position: slot for slot, position in enumerate(positions) if position >= 0}
            others = sorted(position for position in slot_of if position >= sinks)
            score = dict.fromkeys(slot_of, INF) | dict.fromkeys(others, 1.0)
            parts = [others[i : i + lag] for i in range(0, len(others) - lag + 1, lag)]
            if len(parts) < 2:
                score |= {position: position / int(view.seen[row]) for position in others}
            for part, following in itertools.pairwise(parts):
                spread = [0.0] * lag
                for states in (view.keys, view.values):
                    now, then = (
                        [states[row, head, slot_of[position]].tolist() for position in group]
                        for group in (part, following)
                    )
                    spread = [a + b for a, b in zip(spread, stands_out(now, then), strict=True)]
                for rank, i in enumerate(sorted(range(lag), key=lambda i: spread[i])):
                    score[part[i]] = rank / lag
            for position, slot in slot_of.items():
                scores[row, head, slot] = score[position]
    return scores


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("sinks", "lag"), [(0, 2), (4, 3), (2, 1), (1, 5), (3, 8), (0, 100)])
def test_equals_the_definition_wherever_the_keys_are(random_view, scrambled, sinks, lag):
    view = random_view(rows=4, lengths=[20, 13, 6, 1], tokens=20)
    for case in (view, scrambled(view)[0]):
        assert_same(LagKVPolicy(sinks, lag).score(case), plain_lagkv(case, sinks, lag))


def test_after_evictions_partitions_are_of_the_keys_that_are_left(random_view, scrambled):
    """Heads of one row then hold unequal numbers of keys, some too few for two partitions."""
    view = random_view(rows=3, heads=3, tokens=20)
    gone = torch.rand(view.positions.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    gone[0, 0, 5:] = True
    view, _ = scrambled(dataclasses.replace(view, positions=view.positions.masked_fill(gone, -1)))
    counts = view.present.sum(-1)
    assert len(set(counts.flatten().tolist())) > 2
    for sinks, lag in ((2, 2), (0, 3), (1, 4)):
        assert_same(LagKVPolicy(sinks, lag).score(view), plain_lagkv(view, sinks, lag))


def test_sinks_outlive_the_tail(random_view):
    view = random_view(tokens=16, budget=5)
    slots, _ = keep_indices(LagKVPolicy(sinks=2, lag=4).score(view), view.positions, view.budget, 5)
    assert slots.tolist() == [[[0, 1, 13, 14, 15]] * 2]


def test_constant_channels_and_equal_keys_are_no_nan(random_view):
    view = CacheView.of_prompt(torch.ones(1, 1, 6, 2), budget=3)
    assert LagKVPolicy(sinks=0, lag=3).score(view).mul(3).round().tolist() == [[[0, 1, 2, 3, 3, 3]]]


def test_a_channel_that_is_constant_in_the_next_partition_counts_as_zero(random_view):
    view = random_view(tokens=12, size=4)
    keys = view.keys.clone()
    keys[..., 1] = 2.0
    keys[..., :4, 1] = torch.arange(4.0)
    view = dataclasses.replace(view, keys=keys)
    scores = LagKVPolicy(sinks=0, lag=4).score(view)
    assert_same(scores, plain_lagkv(view, 0, 4))
    assert scores[0, 0, :4].tolist() != [0, 0.25, 0.5, 0.75], "in order of position, as NaN would be"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sinks": -1}, ValueError, "LagKVPolicy.sinks is -1, expected an int >= 0"),
        ({"lag": 0}, ValueError, "LagKVPolicy.lag is 0, expected an int >= 1"),
        ({"lag": 2.0}, TypeError, "LagKVPolicy.lag is 2.0, expected an int >= 1"),
    ],
)
def test_refuses(options, error, message):
    with pytest.raises(error, match=message):
        make_policy("lagkv", **options)
