"""The recorder: what it is told comes out, of every row up to its end and not beyond."""

import pytest
import torch

from smdlib import NEVER, CompressedCache, MaskedAttentionAdapter, PyramidAllocation, ShadowMaskRecorder
from smdlib.masks.shadow import check_record
from tests.families import make_model
from tests.sampling import feed, ragged_prompts

OWNER = object()


def told(evictions, seen, columns=None, layers=1, heads=1):
    """A recorder that was told `(layer, row, head, position, query)`, one at a time, and then what was seen."""
    recorder, rows = ShadowMaskRecorder(), len(seen)
    recorder.begin(layers, OWNER)
    for layer in range(layers):
        recorder.observe(OWNER, torch.ones(rows, dtype=torch.int64), 1)
        nothing = torch.zeros(rows, heads, 1, dtype=torch.int64)
        recorder.record(layer, nothing, nothing.bool(), torch.ones(rows, dtype=torch.int64))
    for layer, row, head, position, query in evictions:
        at = torch.full((rows,), query)
        recorder.observe(OWNER, at, max(query, position + 1))
        evicted = torch.zeros(rows, heads, 1, dtype=torch.bool)
        evicted[row, head] = True
        recorder.record(layer, torch.full((rows, heads, 1), position), evicted, at)
    recorder.observe(OWNER, torch.tensor(seen), columns or max(seen))
    return recorder


def entries(mask):
    """All evictions of a mask as `(layer, row, head, position, query)`."""
    gone = (mask.evicted_at != NEVER).nonzero().tolist()
    return sorted(
        (layer, row, head, position, int(mask.evicted_at[row, position, layer, head]))
        for row, position, layer, head in gone
    )


def test_what_was_told_comes_out():
    evictions = [(0, 0, 1, 2, 3), (0, 1, 0, 0, 3), (1, 0, 0, 5, 6), (1, 1, 1, 1, 6)]
    recorder = told(evictions, seen=[8, 7], layers=2, heads=2)
    mask = recorder.shadow_mask()
    assert entries(mask) == evictions
    assert mask.evicted_at.shape == (2, 8, 2, 2) and mask.batch_size == (2,) and mask.evicted_at.dtype is torch.int32


def test_keys_that_stay_leave_no_trace():
    recorder = told([], seen=[6, 6], heads=2)
    positions = torch.arange(6).expand(2, 2, 6)
    recorder.record(0, positions, torch.zeros(2, 2, 6, dtype=torch.bool), torch.tensor([6, 6]))
    assert entries(recorder.shadow_mask([7, 7])) == []


def test_rows_beyond_their_end_leave_no_trace():
    recorder = told([(0, 0, 0, 1, 4), (0, 1, 0, 1, 4), (0, 0, 0, 2, 6), (0, 1, 0, 5, 7)], seen=[8, 8])
    assert entries(recorder.shadow_mask([8, 5])) == [(0, 0, 0, 1, 4), (0, 0, 0, 2, 6), (0, 1, 0, 1, 4)]
    # The query at position 4 is the first that could not see it; a row of 4 tokens has no such query.
    assert entries(recorder.shadow_mask([4, 4])) == []
    assert recorder.shadow_mask([3, 4]).num_tokens == 4


def test_the_last_token_is_never_fed_and_has_its_place():
    recorder = told([(0, 0, 0, 2, 5)], seen=[5])
    assert entries(recorder.shadow_mask()) == []  # no query of the row came after
    mask = recorder.shadow_mask([6])
    assert mask.num_tokens == 6 and entries(mask) == [(0, 0, 0, 2, 5)]


@pytest.mark.parametrize("as_type", [list, torch.tensor, lambda ends: torch.tensor(ends, dtype=torch.int32)])
def test_lengths_are_a_list_or_a_tensor(as_type):
    assert told([], seen=[4, 4]).shadow_mask(as_type([5, 2])).num_tokens == 5


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([4], r"lengths has shape \(1,\), but the record holds 2 rows"),
        ([[4, 4]], r"lengths has shape \(1, 2\), but the record holds 2 rows"),
        ([6, 4], r"between 1 and the tokens seen \+ 1 \(\[5, 5\]\), not \[6, 4\].*without padding"),
        ([4, 0], r"between 1 and the tokens seen \+ 1 \(\[5, 5\]\), not \[4, 0\]"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        told([], seen=[4, 4]).shadow_mask(lengths)


def test_before_use_there_is_nothing():
    recorder = ShadowMaskRecorder()
    with pytest.raises(RuntimeError, match=r"nothing recorded yet: pass this recorder to a CompressedCache"):
        recorder.shadow_mask()
    CompressedCache(make_model("llama").config, "streaming", 4, recorder=recorder)
    with pytest.raises(RuntimeError, match="nothing recorded yet"):
        recorder.shadow_mask()


def test_a_new_cache_starts_a_new_record():
    recorder = told([(0, 0, 0, 1, 2)], seen=[3])
    CompressedCache(make_model("llama").config, "streaming", 4, recorder=recorder)
    with pytest.raises(RuntimeError, match="nothing recorded yet"):
        recorder.shadow_mask()


@pytest.mark.parametrize("tokens", [255, 256, 257, 258, 300, 700])
def test_the_table_grows_with_the_response(tokens):
    """Around the table's width, with an eviction early, at its end, and none since."""
    early = [(0, 0, 0, 0, 1)]
    late = [(0, 0, 0, position, tokens - 1) for position in (1, tokens // 2, tokens - 2)]
    assert entries(told([*early, *late], seen=[tokens]).shadow_mask([tokens + 1])) == sorted(early + late)
    quiet = told(early, seen=[tokens]).shadow_mask([tokens + 1])
    assert entries(quiet) == early and quiet.num_tokens == tokens + 1
    check_record(quiet.evicted_at)


def test_layers_that_evict_at_different_times_have_one_record():
    evictions = [(0, 0, 0, 0, 1), (1, 0, 0, 3, 400)]
    recorder = told(evictions, seen=[401], layers=2)
    assert entries(recorder.shadow_mask()) == evictions


@pytest.mark.parametrize("evict_every", [None, 1])
def test_a_response_longer_than_the_table_in_a_model(evict_every):
    """The first layers of a pyramid never evict after the prompt, the last does at every token."""
    model, steps = make_model("llama"), 280
    recorder, allocation = ShadowMaskRecorder(), PyramidAllocation()
    cache = CompressedCache(
        model.config, "streaming", 200, allocation=allocation, evict_every=evict_every, reserve=300, recorder=recorder
    )
    ids, mask = ragged_prompts([8 + steps], 97)
    with MaskedAttentionAdapter(model):
        feed(model, cache, ids, mask, [8, *[1] * steps])
    record = recorder.shadow_mask([8 + steps + 1]).evicted_at
    check_record(record)
    budgets = allocation(torch.tensor([200]), 3, 2)[:, 0, 0]
    gone = (8 + steps - budgets).clamp(min=0) if evict_every else torch.zeros(3)
    assert torch.equal((record != NEVER).sum(1)[0], gone[:, None].expand(3, 2).long())
    assert evict_every is None or (gone[0] == 0 and gone[2] > 0)


def test_rows_are_repeated_and_selected():
    recorder = told([(0, 0, 0, 1, 3), (0, 1, 0, 2, 3)], seen=[5, 4])
    recorder.map_rows(lambda rows: rows[[1, 1, 0]])
    assert entries(recorder.shadow_mask()) == [(0, 0, 0, 2, 3), (0, 1, 0, 2, 3), (0, 2, 0, 1, 3)]
    ShadowMaskRecorder().map_rows(lambda rows: rows[[0]])  # nothing to map yet


def test_reset_of_the_cache_starts_again():
    model, recorder = make_model("llama"), ShadowMaskRecorder()
    cache = CompressedCache(model.config, "streaming", 6, evict_every=1, recorder=recorder)
    ids, mask = ragged_prompts([14, 9], 97)
    with MaskedAttentionAdapter(model):
        first = feed(model, cache, ids, mask, [12, 1, 1])
        record = recorder.shadow_mask()
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.kv_bytes() == 0
        with pytest.raises(RuntimeError, match="nothing recorded yet"):
            recorder.shadow_mask()
        assert torch.equal(feed(model, cache, ids, mask, [12, 1, 1]), first)
    assert torch.equal(recorder.shadow_mask().evicted_at, record.evicted_at)
