"""knorm and keydiff, which look at nothing but keys."""

import math

import pytest
import torch

from smdlib.policies import CacheView, KeyDiffPolicy, KnormPolicy, keep_indices, query_window, tracks_attention

INF = float("inf")


def norm(vector):
    return math.sqrt(sum(x * x for x in vector))


def plain(view, score_of):
    """Scores by `score_of(key, all present keys)` in Python floats, one row, head and key at a time."""
    scores = torch.full(view.positions.shape, -INF)
    for row, heads in enumerate(view.positions.tolist()):
        for head, positions in enumerate(heads):
            present = [slot for slot, position in enumerate(positions) if position >= 0]
            keys = [view.keys[row, head, slot].tolist() for slot in present]
            for slot, key in zip(present, keys, strict=True):
                scores[row, head, slot] = score_of(key, keys)
    return scores


def minus_norm(key, keys):
    return -norm(key)


def minus_cosine_to_mean(key, keys):
    anchor = [sum(k[i] / norm(k) for k in keys) / len(keys) for i in range(len(key))]
    return -sum(a * b for a, b in zip(key, anchor, strict=True)) / norm(key) / norm(anchor)


CASES = [(KnormPolicy(), minus_norm), (KeyDiffPolicy(), minus_cosine_to_mean)]


@pytest.mark.parametrize(("policy", "score_of"), CASES)
def test_equals_the_definition_wherever_the_keys_are(random_view, scrambled, policy, score_of):
    for dtype in (torch.float32, torch.bfloat16):
        view = random_view(rows=3, lengths=[12, 7, 1], dtype=dtype)
        for case in (view, scrambled(view)[0]):
            scores = policy.score(case)
            assert scores.dtype == torch.float32
            torch.testing.assert_close(scores, plain(case, score_of), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", [KnormPolicy(), KeyDiffPolicy()])
def test_asks_for_nothing(policy):
    assert (query_window(policy), tracks_attention(policy)) == (0, False)


def test_keydiff_takes_keys_of_zero_length(random_view):
    """They point nowhere: no cosine, no part in the mean."""
    keys = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 0.0]]).view(1, 1, 3, 2)
    assert KeyDiffPolicy().score(CacheView.of_prompt(keys, budget=2)).tolist() == [[[-1, 0, -1]]]
    assert KeyDiffPolicy().score(CacheView.of_prompt(keys * 0, budget=2)).tolist() == [[[0, 0, 0]]]


def test_keydiff_does_not_look_at_length(random_view):
    view = random_view()
    longer = CacheView.of_prompt(view.keys * torch.rand(1, 2, 12, 1).add(0.5), budget=5)
    torch.testing.assert_close(KeyDiffPolicy().score(longer), KeyDiffPolicy().score(view), rtol=1e-5, atol=1e-6)


def test_knorm_keeps_the_short_keys():
    view = CacheView.of_prompt(torch.tensor([3.0, 1.0, -2.0, 0.5]).view(1, 1, 4, 1), budget=2)
    assert keep_indices(KnormPolicy().score(view), view.positions, view.budget, 2)[0].tolist() == [[[1, 3]]]
