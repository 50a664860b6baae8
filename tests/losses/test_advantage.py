"""Group advantages against the formula."""

from __future__ import annotations

import pytest
import torch

from smdlib import group_advantage


def test_standardized_advantage_is_the_formula():
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, 2.0, 2.0, 0.0, 1.0])
    expected = []
    for group in rewards.reshape(2, 4).tolist():
        mean = sum(group) / 4
        deviation = (sum((value - mean) ** 2 for value in group) / 3) ** 0.5
        expected += [(value - mean) / (deviation + 1e-6) for value in group]
    torch.testing.assert_close(group_advantage(rewards, 4), torch.tensor(expected))


def test_centred_advantage_sums_to_zero_and_keeps_the_scale():
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.1])
    centred = group_advantage(rewards, 4, standardize=False)
    torch.testing.assert_close(centred, rewards - 0.4)


@pytest.mark.parametrize("size", [3, 7, 11, 13])
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1.0, 1e8, -0.3])
def test_case_16_equal_rewards_give_exactly_zero(value, size):
    # Some of these means are off by a rounding, which standardizing would blow up to 1.
    assert (group_advantage(torch.full((2 * size,), value), size) == 0).all()


def test_case_28_group_of_one_is_an_error():
    with pytest.raises(ValueError, match="group_size=1: a sample is compared"):
        group_advantage(torch.ones(4), 1)


def test_rewards_must_divide_into_groups():
    with pytest.raises(ValueError, match="do not divide into groups of 4"):
        group_advantage(torch.ones(6), 4)
