import dataclasses

import pytest
import torch

from smdlib.policies import H2OPolicy, keep_indices, make_policy, query_window, tracks_attention

INF = float("inf")


def plain_h2o(view, recent=None):
    scores = torch.full(view.positions.shape, -INF)
    for row, heads in enumerate(view.positions.tolist()):
        for head, slots in enumerate(heads):
            protected = int(view.budget[row, head]) // 2 if recent is None else recent
            for slot, position in enumerate(slots):
                if position >= 0:
                    is_recent = position >= int(view.seen[row]) - protected
                    scores[row, head, slot] = INF if is_recent else view.attention[row, head, slot]
    return scores


@pytest.mark.parametrize("recent", [None, 0, 1, 3, 100])
def test_equals_the_definition_wherever_the_keys_are(random_view, scrambled, recent):
    view = random_view(rows=3, lengths=[12, 7, 2])
    view = dataclasses.replace(view, budget=torch.tensor([[1, 4], [5, 6], [7, 12]]))
    for case in (view, scrambled(view)[0]):
        scores = H2OPolicy(recent=recent).score(case)
        assert scores.dtype == torch.float32
        assert torch.equal(scores, plain_h2o(case, recent))


def test_half_heavy_half_recent(random_view):
    view = random_view(heads=1, tokens=6, budget=4)
    view = dataclasses.replace(view, attention=torch.tensor([[[0.1, 3.0, 0.2, 2.0, 0.0, 0.0]]]))
    slots, _ = keep_indices(H2OPolicy().score(view), view.positions, view.budget, 4)
    assert slots.tolist() == [[[1, 3, 4, 5]]]


def test_asks_for_attention_and_not_for_queries(random_view):
    policy = make_policy("h2o")
    assert tracks_attention(policy) is True
    assert query_window(policy) == 0
    with pytest.raises(ValueError, match=r"H2OPolicy needs view.attention at layer 0, got None"):
        policy.score(dataclasses.replace(random_view(), attention=None))


@pytest.mark.parametrize(("recent", "error"), [(-1, ValueError), (0.5, TypeError), (True, TypeError)])
def test_refuses(recent, error):
    with pytest.raises(error, match=f"H2OPolicy.recent is {recent}, expected an int >= 0"):
        make_policy("h2o", recent=recent)
