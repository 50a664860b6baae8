"""Slots of unequal number against a dictionary, and the bytes that heads of unequal budgets take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smdlib import AdaptiveHeadAllocation, CompressedCache, MaskedAttentionAdapter, ShadowMaskRecorder, make_policy
from smdlib.cache.ragged import PADDING, RaggedSlots, plan_blocks
from smdlib.masks.ragged import block_attention
from tests.cache.allocations import Allocations
from tests.cache.test_slots import BATCH, DIM, HEADS, expected, numbered
from tests.families import VOCAB, make_model
from tests.sampling import feed, kept_positions, ragged_prompts

NEEDS = [[40, 7, 12], [5, 41, 8]]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_blocks_hold_every_pair_once_and_pad_at_most_a_quarter(needs):
    blocks = plan_blocks(needs)
    assert sorted(pair for _, pairs in blocks for pair in pairs) == list(range(len(needs)))
    assert all(size == max(needs[pair] for pair in pairs) for size, pairs in blocks)
    assert sum(size * len(pairs) for size, pairs in blocks) <= 1.25 * sum(needs)
    assert [size for size, _ in blocks] == sorted((size for size, _ in blocks), reverse=True)


def test_blocks_are_few():
    assert len(plan_blocks([100] * 50)) == 1
    assert len(plan_blocks(list(range(20, 181)))) <= 4  # evenly from 0.2 to 1.8 of the mean
    assert len(plan_blocks([10] * 7 + [1000])) == 2


def contents(slots):
    """Per row and head, position to (key, value); what lies in the blocks must agree with the table."""
    held = [[{} for _ in range(HEADS)] for _ in range(slots.batch_size)]
    for block in slots.blocks:
        assert block.keys.shape == block.values.shape
        for place, pair in enumerate(block.pairs.tolist()):
            row, head = divmod(pair, HEADS)
            positions = slots.positions[row, head]
            assert (positions[block.used :] == -1).all()
            for slot in (positions >= 0).nonzero().flatten().tolist():
                position = int(positions[slot])
                assert position not in held[row][head]
                held[row][head][position] = (block.keys[place, slot].tolist(), block.values[place, slot].tolist())
    return held


def filled(tokens=40, counts=((30, 2, 8), (1, 31, 4)), tracks_mass=False):
    """Slots with a reserve of at least 4 behind `counts` keys, and the positions they hold."""
    positions = torch.arange(tokens).expand(BATCH, HEADS, tokens)
    keys, most = numbered(positions), max(map(max, counts))
    index = torch.rand(BATCH, HEADS, tokens).argsort(-1)[..., :most]
    valid = torch.arange(most) < torch.tensor(counts)[..., None]
    index = index.masked_fill(~valid, tokens).sort(-1).values.masked_fill(~valid, 0)
    slots = RaggedSlots(keys, keys, torch.tensor(NEEDS), tracks_mass)
    slots.fill(keys, -keys, positions, positions + 0.5 if tracks_mass else None, index, valid)
    held = [[set(index[row, head][valid[row, head]].tolist()) for head in range(HEADS)] for row in range(BATCH)]
    return slots, held


def test_fill_and_shown():
    torch.manual_seed(0)
    slots, held = filled(tracks_mass=True)
    assert contents(slots) == expected(held)
    assert slots.nbytes <= 1.25 * 2 * DIM * 4 * sum(map(sum, NEEDS))
    keys, values = slots.shown()
    assert keys.shape == (BATCH, HEADS, 31, DIM)
    at = slots.positions[:, :, :31]
    assert torch.equal(keys[at >= 0], numbered(at)[at >= 0]) and torch.equal(values, -keys)
    assert keys.isfinite().all(), "attention multiplies what nobody sees by 0"
    assert torch.equal(slots.mass, torch.where(slots.positions >= 0, slots.positions + 0.5, 0.0))


@pytest.mark.parametrize("seed", range(4))
def test_writing_freeing_growing_and_mapping_equal_a_dictionary(seed):
    torch.manual_seed(seed)
    slots, held = filled(tracks_mass=seed == 0)
    own = [0, 1]  # rows that `numbered` knows
    slots.find_free(4)
    for position in range(40, 80):
        if slots.room == 0:
            index = torch.rand(len(own), HEADS, slots.used).argsort(-1)
            index = (
                torch.where(slots.positions.gather(2, index) >= 0, index, -1).sort(-1, descending=True).values[..., :4]
            )
            for row in range(len(own)):
                for head in range(HEADS):
                    gone = slots.positions[row, head, index[row, head][index[row, head] >= 0]]
                    held[row][head] -= set(gone.tolist())
            slots.free(index.clamp(min=0), index >= 0)
            if position == 52:
                slots.grow(3)
            if position == 60:
                chosen = [[1, 0, 1], [0], [1, 1], [0, 1]][seed]
                slots.map_rows(lambda rows, chosen=chosen: rows[torch.tensor(chosen)])
                held, own = [[set(head) for head in held[row]] for row in chosen], [own[row] for row in chosen]
                assert slots.nbytes <= 1.25 * 2 * DIM * 4 * sum(sum(need) + 9 for row in own for need in [NEEDS[row]])
                slots_of = {tuple(block.keys.shape) for block in slots.blocks}
                assert sum(pairs for pairs, _, _ in slots_of) <= len(own) * HEADS
            slots.find_free(4)
            every = expected_of(held, own)
            assert contents(slots) == every
        at = torch.full((BATCH, HEADS, 1), position)
        key = numbered(at)[own]
        slots.write(key, -key, torch.full((len(own),), position))
        for head in (head for row in held for head in row):
            head.add(position)
        assert contents(slots) == expected_of(held, own)


def expected_of(held, own):
    both = expected([held[own.index(row)] if row in own else [set()] * HEADS for row in range(BATCH)])
    found = [None] * len(own)
    for place, row in enumerate(own):
        alone = expected([held[place] if other == row else [set()] * HEADS for other in range(BATCH)])
        found[place] = alone[row]
    assert both
    return found


def test_extended_puts_a_chunk_behind_and_lets_the_blocks_go():
    slots, _ = filled()
    at = torch.arange(40, 43).expand(BATCH, HEADS, 3)
    keys, values, in_slots = slots.extended(numbered(at), -numbered(at))
    assert not in_slots and keys.shape == (BATCH, HEADS, 34, DIM) and slots.nbytes == 0
    assert torch.equal(keys[:, :, 31:], numbered(at)) and torch.equal(values, -keys)
    before = slots.positions[:, :, :31]
    assert torch.equal(keys[:, :, :31][before >= 0], numbered(before)[before >= 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_attention_is_the_formula(dtype):
    torch.manual_seed(0)
    slots, _ = filled()
    for block in slots.blocks:
        block.keys, block.values = (
            torch.randn(block.keys.shape, dtype=dtype),
            torch.randn(block.values.shape, dtype=dtype),
        )
    query = torch.randn(BATCH, 2 * HEADS, 1, DIM, dtype=dtype)
    visible = (slots.positions[:, :, None, : slots.used] >= 0) & (torch.rand(BATCH, HEADS, 1, slots.used) < 0.8)
    visible[..., 0] = True
    output, mass = block_attention(query, slots.blocks, visible, 0.3, 0.0, want_mass=True)
    keys, values = slots.shown()
    for row in range(BATCH):
        for head in range(HEADS):
            seen, total = visible[row, head, 0], torch.zeros(slots.used)
            for member in (2 * head, 2 * head + 1):
                logits = 0.3 * keys[row, head].float() @ query[row, member, 0].float()
                weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
                total += weights
                tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
                expected_output = (weights @ values[row, head].float()).to(dtype)
                torch.testing.assert_close(output[row, 0, member], expected_output, **tolerance)
            torch.testing.assert_close(mass[row, head], total, rtol=1e-5, atol=1e-5)


# --- the cache


POLICIES = {"snapkv": {"window": 4, "kernel_size": 3}, "h2o": {}, "random": {"recent": 2}, "streaming": {}}
LENGTHS = [61, 23, 40]


def adaptive(model, policy, budget=12, **options):
    return CompressedCache(
        model.config, make_policy(policy, **POLICIES[policy]), budget, allocation=AdaptiveHeadAllocation(), **options
    )


def check_bytes(cache, budget, reserve, rows, dim=12, heads=4):
    """Keys and values take what the allocation says, which is what uniform budgets would take, and a little padding."""
    needed = 0
    for layer in cache.layers:
        assert (layer.budget.sum(-1) == heads * budget).all()
        allocated = int((layer.budget + reserve).sum())
        stored = sum(block.keys.shape[0] * block.keys.shape[1] for block in layer.slots.blocks)
        assert allocated <= stored <= (1 + PADDING) * allocated
        assert layer.slots.nbytes == stored * 2 * dim * 4
        needed += allocated
    assert needed == len(cache.layers) * rows * heads * (budget + reserve)
    assert needed * 2 * dim * 4 <= cache.kv_bytes() <= 1.25 * needed * 2 * dim * 4


@pytest.mark.parametrize("chunks", [[61], [20, 20, 20, 1]], ids=["one-shot", "chunked"])
@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_are_those_of_the_allocation(policy, chunks):
    model = make_model("gpt2")  # 4 KV heads
    ids, mask = ragged_prompts(LENGTHS, VOCAB)
    with MaskedAttentionAdapter(model):
        cache = adaptive(model, policy, evict_every=4, prompt_lengths=mask.sum(1))
        assert cache.kv_bytes() == 0
        for chunk in chunks:
            feed(model, cache, ids, mask, [chunk])
            check_bytes(cache, 12, 4, rows=3)
        for layer in cache.layers:
            for row, length in enumerate(LENGTHS):
                kept = [len(head) for head in kept_positions(cache, layer.layer_idx, row)]
                assert kept == layer.budget[row].tolist() or length * 4 < 12 * 4
        budgets = torch.stack([layer.budget for layer in cache.layers])
        if policy in ("snapkv", "random"):
            assert budgets.max() >= 1.25 * budgets.min(), "the heads must differ, or this shows nothing"
        cache.batch_repeat_interleave(3)
        check_bytes(cache, 12, 4, rows=9)
        cache.batch_select_indices(torch.tensor([8, 3, 4, 0, 0]))
        check_bytes(cache, 12, 4, rows=5)


def test_allocated_storage_is_what_is_reported():
    """All that lives after a prefill: the blocks and the tables; nothing as wide as the largest head but those."""
    model = make_model("gpt2")
    ids, mask = ragged_prompts(LENGTHS, VOCAB)
    with MaskedAttentionAdapter(model), torch.no_grad(), Allocations() as allocations:
        cache = adaptive(model, "random", evict_every=4)
        model(ids, attention_mask=mask, cache=cache, logits_to_keep=1)
    tables = sum(8 * 2 * layer.slots.positions.numel() for layer in cache.layers)  # positions and the like
    assert cache.kv_bytes() <= allocations.live <= cache.kv_bytes() + tables


@pytest.mark.parametrize("evict_every", [None, 1, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_decoding_moves_nothing_and_keeps_the_budgets(policy, evict_every):
    model = make_model("gpt2")
    steps, recorder = 24, ShadowMaskRecorder()
    ids, mask = ragged_prompts([length + steps for length in LENGTHS], VOCAB)
    with MaskedAttentionAdapter(model):
        cache = adaptive(
            model, policy, evict_every=evict_every, recorder=recorder, reserve=None if evict_every else steps
        )
        feed(model, cache, ids, mask, [61])
        blocks = [block for layer in cache.layers for block in layer.slots.blocks]
        at_start = [(block.keys.data_ptr(), block.values.data_ptr()) for block in blocks]
        budgets = [layer.budget.clone() for layer in cache.layers]
        feed(model, cache, ids, mask, [1] * steps)
        assert [(block.keys.data_ptr(), block.values.data_ptr()) for block in blocks] == at_start
        assert cache.growths == 0
        for layer, budget in zip(cache.layers, budgets, strict=True):
            assert torch.equal(layer.budget, budget)
            for row in range(3):
                kept = [len(head) for head in kept_positions(cache, layer.layer_idx, row)]
                assert kept == (budget[row] + (0 if evict_every else steps)).tolist()


def test_beyond_the_reserve_every_head_grows():
    model = make_model("gpt2")
    ids, mask = ragged_prompts([30, 22], VOCAB)
    with MaskedAttentionAdapter(model), pytest.warns(UserWarning, match="CompressedCache grew layer 0"):
        cache = adaptive(model, "snapkv", reserve=3)
        feed(model, cache, ids, mask, [20] + [1] * 10)
    assert cache.growths == 3 * 3
    check_bytes(cache, 12, 3 + 9, rows=2)
