"""Fixed slots against a dictionary from position to key."""

import pytest
import torch

from smdlib.cache.slots import KVSlots

BATCH, HEADS, DIM = 2, 3, 4


def numbered(positions):
    """Keys `[B, H, N, D]` that say which row, head and position they belong to; values are their negatives."""
    rows = torch.arange(positions.shape[0])[:, None, None, None]
    heads = torch.arange(positions.shape[1])[None, :, None, None]
    channels = torch.arange(DIM)[None, None, None]
    return (rows * 10_000 + heads * 1_000 + positions[..., None] * 10 + channels).float()


def contents(slots):
    """Per row and head, position to (key, value), and nothing beyond `used`."""
    assert (slots.positions[:, :, slots.used :] == -1).all()
    held = [[{} for _ in range(HEADS)] for _ in range(slots.keys.shape[0])]
    for row, head, slot in (slots.positions >= 0).nonzero().tolist():
        position = int(slots.positions[row, head, slot])
        assert position not in held[row][head]
        held[row][head][position] = (slots.keys[row, head, slot].tolist(), slots.values[row, head, slot].tolist())
    return held


def expected(positions):
    """What `contents` gives for sets of positions `[B][H]`."""
    return [
        [
            {
                position: (key.tolist(), (-key).tolist())
                for position in chosen
                for key in [numbered(torch.full((row + 1, head + 1, 1), position))[row, head, 0]]
            }
            for head, chosen in enumerate(per_head)
        ]
        for row, per_head in enumerate(positions)
    ]


def filled(tokens, kept, size, tracks_mass=False, counts=None):
    """Slots that hold `counts[row][head]` (by default `kept`) of `tokens` keys, and the sets of positions."""
    positions = torch.arange(tokens).expand(BATCH, HEADS, tokens)
    keys = numbered(positions)
    index = torch.rand(BATCH, HEADS, tokens).argsort(-1)[..., :kept].sort(-1).values
    count = torch.full((BATCH, HEADS, 1), kept) if counts is None else torch.tensor(counts)[..., None]
    valid = torch.arange(kept) < count
    slots = KVSlots(keys, keys, size, tracks_mass)
    mass = positions.float() + 0.5 if tracks_mass else None
    slots.fill(keys, -keys, positions, mass, index.where(valid, 0), valid)
    held = [
        [set(chosen[ok].tolist()) for chosen, ok in zip(*pair, strict=True)] for pair in zip(index, valid, strict=True)
    ]
    return slots, held


def test_fill_packs_the_chosen_keys_to_the_front():
    slots, held = filled(tokens=9, kept=4, size=6, counts=[[4, 2, 0], [1, 3, 4]])
    assert contents(slots) == expected(held)
    assert slots.used == 4 and slots.size == 6
    assert [
        [(row[:n] >= 0).all().item() for row, n in zip(*pair, strict=True)]
        for pair in zip(slots.positions, [[4, 2, 0], [1, 3, 4]], strict=True)
    ] == [[True] * 3] * 2


def test_fill_replaces_what_was_there():
    slots, _ = filled(tokens=9, kept=6, size=6)
    positions = torch.arange(20, 24).expand(BATCH, HEADS, 4)
    index = torch.tensor([1, 3]).expand(BATCH, HEADS, 2)
    slots.fill(
        numbered(positions), -numbered(positions), positions, None, index, torch.ones_like(index, dtype=torch.bool)
    )
    assert contents(slots) == expected([[{21, 23}] * HEADS] * BATCH)
    assert slots.used == 2


@pytest.mark.parametrize("seed", range(6))
def test_writing_freeing_and_growing_equal_a_dictionary(seed):
    torch.manual_seed(seed)
    slots, held = filled(tokens=8, kept=5, size=8, counts=[[5, 2, 0], [1, 5, 3]])
    slots.find_free(3)
    for position in range(8, 40):
        if slots.room == 0:
            if position % 3 == 0:
                slots.grow(2)
                slots.find_free(2)
            else:
                index = torch.rand(BATCH, HEADS, slots.used).argsort(-1)[..., :4]
                valid = torch.rand(BATCH, HEADS, 4) < 0.8
                valid[..., :2] = True
                for row in range(BATCH):
                    for head in range(HEADS):
                        gone = slots.positions[row, head, index[row, head][valid[row, head]]]
                        held[row][head] -= set(gone.tolist())
                slots.free(index, valid)
                slots.find_free(int((slots.positions < 0).sum(-1).min()))
                assert contents(slots) == expected(held)
            if slots.room == 0:
                slots.grow(1)
                slots.find_free(1)
        at = torch.full((BATCH, HEADS, 1), position)
        slots.write(numbered(at), -numbered(at), torch.full((BATCH,), position))
        for head in (head for row in held for head in row):
            head.add(position)
        assert contents(slots) == expected(held)


def test_write_takes_the_lowest_empty_slot_and_the_rows_own_position():
    slots, _ = filled(tokens=8, kept=3, size=6)
    before = slots.positions.clone()
    slots.free(torch.tensor([1]).expand(BATCH, HEADS, 1), torch.tensor([[True, False, True], [False] * 3])[..., None])
    slots.find_free(2)
    key = torch.full((BATCH, HEADS, 1, DIM), 7.0)
    slots.write(key, key, torch.tensor([8, 5]))
    taken = [[1, 3, 1], [3, 3, 3]]
    for row, slot_of_head in enumerate(taken):
        for head, slot in enumerate(slot_of_head):
            assert slots.positions[row, head, slot] == [8, 5][row]
            before[row, head, slot] = [8, 5][row]
    assert torch.equal(slots.positions, before)
    assert slots.used == 4


def test_freeing_moves_nothing():
    slots, held = filled(tokens=8, kept=5, size=6)
    keys, values, addresses = (
        slots.keys.clone(),
        slots.values.clone(),
        (slots.keys.data_ptr(), slots.positions.data_ptr()),
    )
    slots.free(torch.tensor([0, 3]).expand(BATCH, HEADS, 2), torch.tensor([True, False]).expand(BATCH, HEADS, 2))
    assert torch.equal(slots.keys, keys) and torch.equal(slots.values, values)
    assert (slots.keys.data_ptr(), slots.positions.data_ptr()) == addresses
    assert (slots.positions >= 0).sum(-1).eq(4).all() and len(held[0][0]) == 5


def test_attention_mass_moves_with_its_key_and_a_new_key_starts_at_zero():
    slots, _ = filled(tokens=9, kept=4, size=7, tracks_mass=True, counts=[[4, 2, 0], [1, 3, 4]])
    present = slots.positions >= 0
    assert torch.equal(slots.mass, torch.where(present, slots.positions + 0.5, 0.0))
    slots.free(torch.zeros(BATCH, HEADS, 1, dtype=torch.int64), torch.ones(BATCH, HEADS, 1, dtype=torch.bool))
    slots.find_free(3)
    new = torch.zeros(BATCH, HEADS, 1, DIM)
    slots.write(new, new, torch.tensor([9, 9]))
    assert (slots.mass[slots.positions == 9] == 0).all()
    slots.mass += 1.0
    slots.grow(3)
    assert (
        slots.mass.shape == (BATCH, HEADS, 10) and (slots.mass[..., :7] >= 1).all() and (slots.mass[..., 7:] == 0).all()
    )


def test_rows_are_repeated_and_selected_with_everything_they_have():
    slots, held = filled(tokens=8, kept=4, size=7, tracks_mass=True)
    slots.free(torch.full((BATCH, HEADS, 1), 2), torch.tensor([True, False])[:, None, None].expand(BATCH, HEADS, 1))
    for chosen in held[0]:
        chosen.remove(sorted(chosen)[2])
    slots.find_free(3)
    slots.map_rows(lambda rows: rows[torch.tensor([1, 1, 0])])
    at = torch.full((3, HEADS, 1), 8)
    key = numbered(at)[torch.tensor([1, 1, 0])]
    slots.write(key, -key, torch.tensor([8, 8, 8]))
    own = expected([[chosen | {8} for chosen in row] for row in held])
    assert contents(slots) == [own[1], own[1], own[0]]
    assert slots.mass.shape == (3, HEADS, 7)


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes(dtype, itemsize):
    empty = torch.zeros(BATCH, HEADS, 0, DIM, dtype=dtype)
    slots = KVSlots(empty, empty, size=11, tracks_mass=True)
    assert slots.nbytes == 2 * BATCH * HEADS * 11 * DIM * itemsize
    assert slots.keys.dtype is slots.values.dtype is dtype
    assert slots.mass.dtype is torch.float32 and slots.positions.dtype is torch.int64
