import dataclasses

import pytest
import torch

from smdlib.policies import RandomPolicy, keep_indices, make_policy

INF = float("inf")


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


@pytest.mark.parametrize("with_generators", [False, True])
def test_a_row_does_not_depend_on_padding_batch_mates_or_slot_order(random_view, row_of, scrambled, with_generators):
    policy = RandomPolicy(recent=3)
    lengths = [12, 7, 2]
    batch = random_view(rows=3, lengths=lengths)

    def score(view, *seeds):
        return policy.score(dataclasses.replace(view, generators=generators(*seeds) if with_generators else None))

    scores = score(batch, 5, 6, 7)
    for row, length in enumerate(lengths):
        assert torch.equal(scores[row : row + 1, :, -length:], score(row_of(batch, row), 5 + row))
        assert (scores[row, :, :-length] == -INF).all()
    moved, slot = scrambled(batch)
    scores_moved = score(moved, 5, 6, 7)
    assert torch.equal(scores_moved.gather(-1, slot), scores)
    assert torch.equal(scores_moved == -INF, moved.positions < 0)


def test_the_numbers_are_the_generators_own_by_position(random_view):
    view = random_view(rows=2, tokens=6, lengths=[6, 4])
    view = dataclasses.replace(view, budget=torch.full_like(view.budget, 3), generators=generators(1, 2))
    scores = RandomPolicy(recent=1).score(view)
    for row, length in enumerate([6, 4]):
        expected = torch.rand(2, length + 1, generator=torch.Generator().manual_seed(1 + row))[:, : length - 1]
        assert torch.equal(scores[row, :, 6 - length : -1], expected)
        assert (scores[row, :, -1] == INF).all()


def test_generators_move_on_so_that_two_evictions_differ(random_view):
    view = dataclasses.replace(random_view(), generators=generators(1))
    policy = RandomPolicy(recent=0)
    assert not torch.equal(policy.score(view), policy.score(view))


def test_without_generators_every_seed_layer_and_length_has_its_own_numbers(random_view):
    """Sums of the three would collide: seed 0, layer 1 with seed 1, layer 0."""
    base = random_view(rows=1, heads=1, tokens=12)
    drawn = set()
    for seed in (0, 1, 2**32, -1):
        for layer in range(3):
            for length in (10, 11, 12):
                view = dataclasses.replace(
                    base, layer_idx=layer, seen=torch.tensor([length]), positions=base.positions.clamp(max=length - 1)
                )
                drawn.add(float(RandomPolicy(recent=0, seed=seed).score(view)[0, 0, 0]))
    assert len(drawn) == 4 * 3 * 3
    assert torch.equal(RandomPolicy(seed=3).score(base), RandomPolicy(seed=3).score(base))


def test_is_uniform_over_the_keys_that_are_not_protected(random_view):
    """Over 400 heads each of the 8 unprotected keys stays with probability 1/2."""
    view = random_view(rows=1, heads=400, group=1, tokens=10, budget=6)
    scores = RandomPolicy(recent=2).score(view)
    slots, _ = keep_indices(scores, view.positions, view.budget, 6)
    counts = slots.flatten().bincount(minlength=10)
    assert counts[8:].tolist() == [400, 400]
    assert (counts[:8] - 200).abs().max() < 4 * (400 * 0.25) ** 0.5  # four standard deviations


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recent": -1}, ValueError, "RandomPolicy.recent is -1, expected an int >= 0"),
        ({"recent": 0.5}, TypeError, "RandomPolicy.recent is 0.5, expected an int >= 0"),
        ({"seed": "a"}, TypeError, "RandomPolicy.seed is 'a', expected an int"),
    ],
)
def test_refuses(options, error, message):
    with pytest.raises(error, match=message):
        make_policy("random", **options)
