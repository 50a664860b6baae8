import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smdlib.policies import Allocation, PyramidAllocation, UniformAllocation, resolve_budget

LENGTHS = torch.tensor([1, 2, 10, 30, 100])


@pytest.mark.parametrize(
    ("budget", "keys"),
    [
        (0.4, [1, 1, 4, 12, 40]),  # kvpress 264: prompts of 1 and 2 tokens keep one
        (0.3, [1, 1, 3, 9, 30]),
        (0.1, [1, 1, 1, 3, 10]),  # 0.1 * 30 is 3.0000000000000004
        (0.07, [1, 1, 1, 3, 7]),  # 0.07 * 100 is 7.000000000000001
        (0.34, [1, 1, 4, 11, 34]),
        (1.0, [1, 2, 10, 30, 100]),
        (1e-12, [1, 1, 1, 1, 1]),
        (1, [1, 1, 1, 1, 1]),
        (64, [64, 64, 64, 64, 64]),
    ],
)
def test_resolve(budget, keys):
    resolved = resolve_budget(budget, LENGTHS)
    assert resolved.dtype == torch.int64
    assert resolved.tolist() == keys


@given(st.integers(1, 100), st.integers(1, 200_000))
def test_percentages_are_exact(percent, length):
    assert resolve_budget(percent / 100, torch.tensor([length])).item() == math.ceil(Fraction(percent, 100) * length)


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (True, TypeError, "budget is True, expected a float in"),
        (None, TypeError, "budget is None"),
        ("0.5", TypeError, "budget is '0.5'"),
        (0, ValueError, "budget is 0, expected at least 1 key"),
        (-3, ValueError, "budget is -3, expected at least 1 key"),
        (0.0, ValueError, r"budget is 0.0, expected a share of the prompt in \(0, 1\]$"),
        (-0.5, ValueError, "budget is -0.5, expected a share"),
        (1.5, ValueError, "budget is 1.5, expected a share.*as a number of keys write 1"),
        (512.0, ValueError, "as a number of keys write 512"),
        (math.nan, ValueError, "budget is nan, expected a share"),
        (math.inf, ValueError, "budget is inf, expected a share"),
    ],
)
def test_resolve_refuses(budget, error, message):
    with pytest.raises(error, match=message):
        resolve_budget(budget, LENGTHS)


def test_uniform():
    keys = UniformAllocation()(torch.tensor([3, 8]), 4, 2)
    assert keys.tolist() == [[[3, 3], [8, 8]]] * 4
    assert keys.dtype == torch.int64


def test_pyramid_by_hand():
    """Mean 100, beta 20: from 195 to 5 in steps of 47.5."""
    keys = PyramidAllocation()(torch.tensor([100, 20]), 5, 2)
    assert keys[:, 0, 0].tolist() == [195, 148, 100, 52, 5]  # 147.5 and 52.5 share one key; the earlier layer gets it
    assert keys[:, 1, 0].tolist() == [39, 30, 20, 10, 1]  # 39, 29.5, 20, 10.5, 1
    assert torch.equal(keys[..., 0], keys[..., 1])
    assert PyramidAllocation(beta=1)(torch.tensor([7]), 3, 1).flatten().tolist() == [7, 7, 7]


def test_pyramid_of_one_layer_is_exact():
    assert PyramidAllocation()(torch.tensor([1, 7]), 1, 2).tolist() == [[[1, 1], [7, 7]]]


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=4), st.integers(1, 64), st.integers(1, 3), st.integers(1, 40)
)
def test_pyramid_holds_the_same_keys_falls_and_follows_the_line(means, layers, heads, beta):
    keys = PyramidAllocation(beta=beta)(torch.tensor(means), layers, heads)
    assert keys.shape == (layers, len(means), heads)
    assert keys.dtype == torch.int64
    assert (keys.sum(0) == torch.tensor(means)[:, None] * layers).all()
    assert (keys >= 1).all()
    assert (keys.diff(dim=0) <= 0).all()
    for row, mean in enumerate(means):
        if mean < beta or layers == 1:
            continue  # the line itself goes below one key
        for layer in range(layers):
            line = mean * (2 - 1 / beta - layer / (layers - 1) * (2 - 2 / beta))
            assert abs(int(keys[layer, row, 0]) - line) < 1 + 1e-6


@pytest.mark.parametrize(("beta", "error"), [(0, ValueError), (2.5, TypeError)])
def test_pyramid_refuses(beta, error):
    with pytest.raises(error, match=f"PyramidAllocation.beta is {beta}, expected an int >= 1"):
        PyramidAllocation(beta=beta)


def test_both_are_allocations():
    assert isinstance(PyramidAllocation(), Allocation)
    assert not isinstance(object(), Allocation)
