"""The order of the prompts: every epoch a permutation, and `start` skips exactly."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from smdlib.rollout.order import epoch_order, row_at

sizes, seeds = st.integers(1, 60), st.integers(0, 2**63)


@given(sizes, seeds, st.integers(0, 1000))
def test_every_epoch_is_a_permutation(size, seed, epoch):
    assert sorted(epoch_order(size, seed, epoch).tolist()) == list(range(size))


@given(sizes, st.none() | seeds, st.integers(0, 5))
def test_rows_of_an_epoch_are_those_of_its_order(size, seed, epoch):
    rows = [row_at(epoch * size + index, size, seed) for index in range(size)]
    assert rows == (list(range(size)) if seed is None else epoch_order(size, seed, epoch).tolist())


@given(sizes, seeds)
def test_the_order_does_not_depend_on_what_was_asked_before(size, seed):
    forwards = [row_at(position, size, seed) for position in range(3 * size)]
    epoch_order.cache_clear()
    backwards = [row_at(position, size, seed) for position in reversed(range(3 * size))]
    assert forwards == backwards[::-1]


def test_epochs_and_seeds_differ():
    orders = {tuple(epoch_order(30, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert tuple(range(30)) not in orders


def test_every_row_comes_first_equally_often():
    firsts = np.bincount([epoch_order(4, seed, 0)[0] for seed in range(4000)], minlength=4)
    assert np.abs(firsts - 1000).max() < 4 * np.sqrt(4000 * 0.25 * 0.75)  # 4 standard deviations


def test_the_order_stays_what_it_was():
    """A run resumed with another version of NumPy, or of this library, must draw the same prompts."""
    digest = hashlib.sha256(epoch_order(1000, 7, 3).astype("<i8").tobytes()).hexdigest()
    assert digest == "160278cb88d645cb32d9c289e687b1a986c6d1a89154881b7488fc8858704447"
