"""Attention of one query against softmax written out."""

import pytest
import torch

from smdlib.masks.decoding import decode_attention


@pytest.mark.parametrize("masked", ["none", "all heads alike", "per head"])
def test_output_and_mass(masked):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 1, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    shape = {"none": None, "all heads alike": (2, 1, 1, 5), "per head": (2, 3, 1, 5)}[masked]
    visible = None if shape is None else torch.rand(shape) > 0.4
    output, mass = decode_attention(query, key, value, visible, scaling=0.7, want_mass=True)
    expected = torch.zeros(2, 3, 5)
    for row in range(2):
        for head in range(6):
            own = head // 2
            seen = torch.ones(5).bool() if visible is None else visible.expand(2, 3, 1, 5)[row, own, 0]
            weights = [float(torch.exp(0.7 * query[row, head, 0] @ key[row, own, k])) * bool(seen[k]) for k in range(5)]
            weights = torch.tensor(weights) / max(sum(weights), 1e-30)
            torch.testing.assert_close(output[row, 0, head], weights @ value[row, own])
            expected[row, own] += weights
    torch.testing.assert_close(mass, expected)


def test_a_query_that_sees_nothing():
    one = torch.ones(1, 1, 3, 4)
    output, mass = decode_attention(one[:, :, :1], one, one, torch.zeros(1, 1, 1, 3).bool(), 1.0, want_mass=True)
    assert output.eq(0).all() and mass.eq(0).all()
