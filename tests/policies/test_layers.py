from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smdlib.policies import Allocation, LayerAllocation, UniformAllocation


def test_by_hand():
    keys = LayerAllocation([3, 2, 1])(torch.tensor([10, 1, 4]), 3, 2)
    assert keys.dtype == torch.int64
    assert keys[..., 0].T.tolist() == [[15, 10, 5], [1, 1, 1], [6, 4, 2]]
    assert torch.equal(keys[..., 0], keys[..., 1])
    # 8 keys as 100 : 1 : 1 leave both small layers one key, and the first the rest.
    assert LayerAllocation([100, 1, 1])(torch.tensor([3]), 3, 1).flatten().tolist() == [7, 1, 1]
    assert isinstance(LayerAllocation([1]), Allocation)


@settings(deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), st.lists(st.integers(1, 3000), min_size=1, max_size=3))
def test_holds_the_same_keys_in_proportion(shares, means):
    keys = LayerAllocation(shares)(torch.tensor(means), len(shares), 2)
    assert keys.shape == (len(shares), len(means), 2)
    assert (keys >= 1).all()
    assert (keys.sum(0) == torch.tensor(means)[:, None] * len(shares)).all()
    for row in range(len(means)):
        own = keys[:, row, 0].tolist()
        above = [i for i, key in enumerate(own) if key > 1]
        unit = (
            Fraction(sum(own[i] for i in above)) / sum((Fraction(shares[i]) for i in above), Fraction(0))
            if above
            else 0
        )
        for i in above:
            assert abs(own[i] - Fraction(shares[i]) * unit) < 2
        for i in range(len(own)):
            for j in range(len(own)):
                assert shares[i] <= shares[j] or own[i] >= own[j]


def test_equal_shares_are_uniform_and_only_ratios_matter():
    means = torch.tensor([7, 50])
    assert torch.equal(LayerAllocation([0.1] * 5)(means, 5, 2), UniformAllocation()(means, 5, 2))
    assert torch.equal(LayerAllocation([3, 2, 1])(means, 3, 1), LayerAllocation([0.75, 0.5, 0.25])(means, 3, 1))


@pytest.mark.parametrize(
    ("shares", "error", "message"),
    [
        ([], ValueError, "LayerAllocation.shares is empty"),
        ([1, 0], ValueError, "LayerAllocation.shares has 0, expected a number above 0"),
        ([1, float("nan")], ValueError, "has nan"),
        ([1, float("inf")], ValueError, "has inf"),
        (["1"], TypeError, "has '1', expected a number above 0"),
    ],
)
def test_refuses(shares, error, message):
    with pytest.raises(error, match=message):
        LayerAllocation(shares)


def test_a_model_of_another_depth_is_refused():
    with pytest.raises(ValueError, match="LayerAllocation has 2 shares for a model of 3 layers"):
        LayerAllocation([1, 2])(torch.tensor([4]), 3, 1)
