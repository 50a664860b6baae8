import dataclasses
import math

import pytest
import torch

from smdlib.policies import TOVAPolicy, keep_indices, make_policy, query_window, tracks_attention

INF = float("inf")


def plain_tova(view):
    """The definition, one query head and one key at a time, in Python floats."""
    rows, heads, slots = view.positions.shape
    query_heads = view.queries.shape[1]
    scores = torch.full((rows, heads, slots), -INF)
    for row in range(rows):
        newest = int(view.seen[row]) - 1
        weight: dict[int, float] = {}
        for query_head in range(query_heads):
            head = query_head * heads // query_heads
            query = view.queries[row, query_head, -1].tolist()
            exps = {}
            for slot, position in enumerate(view.positions[row, head].tolist()):
                if position >= 0:
                    key = view.keys[row, head, slot].tolist()
                    exps[position] = math.exp(view.scaling * sum(q * k for q, k in zip(query, key, strict=True)))
            for position, value in exps.items():
                weight[position] = weight.get(position, 0.0) + value / sum(exps.values()) / query_heads
        for head in range(heads):
            for slot, position in enumerate(view.positions[row, head].tolist()):
                if position >= 0:
                    scores[row, head, slot] = INF if position == newest else weight[position]
    return scores


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [1, 4])
def test_equals_the_definition_wherever_the_keys_are(random_view, scrambled, window):
    view = random_view(rows=3, window=window, lengths=[12, 7, 1])
    for case in (view, scrambled(view)[0]):
        assert_same(TOVAPolicy().score(case), plain_tova(case))


def test_all_heads_keep_the_same_tokens(random_view, scrambled):
    view, _ = scrambled(random_view(rows=2, heads=3))
    slots, _ = keep_indices(TOVAPolicy().score(view), view.positions, view.budget, 5)
    kept = view.positions.gather(-1, slots)
    assert torch.equal(kept, kept[:, :1].expand_as(kept))
    assert len({tuple(row[0].tolist()) for row in kept}) == 2


def test_a_key_that_one_head_has_lost_has_no_weight_there(random_view, scrambled):
    view = random_view(rows=2, heads=3, tokens=16)
    gone = torch.rand(view.positions.shape, generator=torch.Generator().manual_seed(3)) < 0.4
    gone[..., -1] = False
    view, _ = scrambled(dataclasses.replace(view, positions=view.positions.masked_fill(gone, -1)))
    assert_same(TOVAPolicy().score(view), plain_tova(view))


def test_asks_for_the_newest_query(random_view):
    policy = make_policy("tova")
    assert (query_window(policy), tracks_attention(policy)) == (1, False)
    with pytest.raises(ValueError, match=r"TOVAPolicy needs the last 1 queries at layer 0, view.queries has 0"):
        policy.score(dataclasses.replace(random_view(), queries=None))
