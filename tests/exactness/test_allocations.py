"""The promise with budgets that differ from layer to layer and from head to head, and what these take."""

from __future__ import annotations

import pytest
import torch

from smdlib import (
    AdaptiveHeadAllocation,
    CompressedCache,
    MaskedAttentionAdapter,
    PyramidAllocation,
    ShadowMaskRecorder,
)
from smdlib.cache.ragged import RaggedSlots
from smdlib.masks import NEVER
from tests.exactness.test_group_sampling import GROUP, NEW, SAME, check_replay, generate
from tests.exactness.test_parity import POLICIES, SCHEDULES, check_exact, model_of, policy_of, sample_and_score
from tests.families import FAMILIES, VOCAB, make_model
from tests.sampling import Sample, feed, kept_positions, ragged_prompts, scored

ALLOCATIONS = {"pyramid": PyramidAllocation(beta=4), "adaptive": AdaptiveHeadAllocation()}


def check_storage(taken: Sample) -> None:
    """Layers hold what uniform budgets would take, wherever the keys went, and at most a quarter more."""
    for layer in taken.cache.layers:
        slots, reserve = layer.slots, layer.settings.reserve
        assert isinstance(slots, RaggedSlots)
        mean = layer.budget.double().mean(-1)
        allocated = int((layer.budget + reserve).sum())
        assert allocated == round(float((mean + reserve).sum()) * layer.budget.shape[1])
        stored = sum(block.keys.shape[0] * block.keys.shape[1] for block in slots.blocks)
        assert allocated <= stored <= 1.25 * allocated
        assert slots.nbytes == 2 * 4 * stored * slots.blocks[0].keys.shape[2]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: "every{}-chunk{}-keep{}".format(*schedule))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_replay_is_exact_with_unequal_budgets(allocation, policy, schedule):
    taken, shadow, dense = sample_and_score(model_of("llama"), policy, schedule, allocation=ALLOCATIONS[allocation])
    check_exact(taken, shadow, dense)
    if allocation == "adaptive":
        check_storage(taken)


@pytest.mark.parametrize("schedule", [SCHEDULES[0], SCHEDULES[3], SCHEDULES[5]], ids=["None", "1-chunked", "4-chunked"])
@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_replay_is_exact_with_adaptive_heads_in_every_family(family, policy, schedule):
    taken, shadow, dense = sample_and_score(model_of(family), policy, schedule, allocation=AdaptiveHeadAllocation())
    check_exact(taken, shadow, dense)
    check_storage(taken)


@pytest.mark.parametrize("schedule", [SCHEDULES[0], SCHEDULES[3]], ids=["None", "1-chunked"])
@pytest.mark.parametrize("policy", POLICIES)
def test_adaptive_heads_are_exact_with_eager_attention(policy, schedule):
    """Eager attention gets the heads padded to equal width, one layer at a time, instead of block by block."""
    allocation = AdaptiveHeadAllocation()
    check_exact(*sample_and_score(model_of("llama"), policy, schedule, backend="eager", allocation=allocation))


def test_heads_differ_where_scores_do():
    """In four heads, or the tests above would not show unequal ones; the record says the same as the slots."""
    model = make_model("gpt2")
    ids, mask = ragged_prompts([60, 44], VOCAB)
    recorder = ShadowMaskRecorder()
    with MaskedAttentionAdapter(model):
        cache = CompressedCache(
            model.config, policy_of("snapkv"), 12, allocation=AdaptiveHeadAllocation(), evict_every=1, recorder=recorder
        )
        feed(model, cache, ids, mask, [50] + [1] * 10)
    budgets = torch.stack([layer.budget for layer in cache.layers])
    assert budgets.sum(-1).eq(4 * 12).all()
    assert budgets.max() >= 1.5 * budgets.min()
    record = recorder.shadow_mask().evicted_at
    for layer in range(3):
        for row, length in enumerate([60, 44]):
            kept = kept_positions(cache, layer, row)
            assert [len(head) for head in kept] == budgets[layer, row].tolist()
            full = recorder._layers[layer][row, :, :length]  # the last eviction came after the last query
            assert kept == [(head == NEVER).nonzero().flatten().tolist() for head in full]
    assert (record[0] < NEVER).any()


@pytest.mark.parametrize("evict_every", [None, 1, 4])
@pytest.mark.parametrize("policy", ["random", "snapkv", "h2o"])
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_group_is_sampled_from_one_prefill_with_adaptive_heads(family, policy, evict_every):
    model = make_model(family)
    ids, mask = ragged_prompts([29, 18], VOCAB)
    recorder = ShadowMaskRecorder()
    with MaskedAttentionAdapter(model) as adapter:
        cache = CompressedCache(
            model.config,
            policy_of(policy),
            0.5,
            allocation=AdaptiveHeadAllocation(),
            evict_every=evict_every,
            recorder=recorder,
            prompt_lengths=mask.sum(1),
            reserve=NEW,
        )
        feed(model, cache, ids, mask, [28])
        alone = [kept_positions(cache, layer, row) for layer in range(3) for row in range(2)]
        cache.batch_repeat_interleave(GROUP)
        assert [kept_positions(cache, layer, row) for layer in range(3) for row in (0, GROUP)] == alone
        many_ids, many_mask = ids.repeat_interleave(GROUP, 0), mask.repeat_interleave(GROUP, 0)
        tokens, sampled = generate(model, many_ids, many_mask, cache)
        check_replay(adapter, tokens, many_mask, sampled, recorder)


@pytest.mark.parametrize("policy", ["random", "snapkv", "h2o"])
def test_selected_rows_go_on_with_adaptive_heads(policy):
    """Selected amid decoding, with tokens in the reserve; then a second turn, which decides the budgets anew."""
    model = make_model("gpt2")
    ids, mask = ragged_prompts([44, 33, 38], VOCAB)
    chosen = torch.tensor([2, 0, 2])
    recorder = ShadowMaskRecorder()
    with MaskedAttentionAdapter(model) as adapter:
        cache = CompressedCache(
            model.config, policy_of(policy), 7, allocation=AdaptiveHeadAllocation(), evict_every=4, recorder=recorder
        )
        feed(model, cache, ids, mask, [24] + [1] * 6)
        cache.batch_select_indices(chosen)
        before = torch.stack([layer.budget for layer in cache.layers])
        logits = feed(model, cache, ids[chosen], mask[chosen], [1] * 5)
        assert torch.equal(before, torch.stack([layer.budget for layer in cache.layers])), "fixed while decoding"
        logits = torch.cat([logits, feed(model, cache, ids[chosen], mask[chosen], [4])], 1)
        assert not torch.equal(before, torch.stack([layer.budget for layer in cache.layers])), "decided anew"
        logits = torch.cat([logits, feed(model, cache, ids[chosen], mask[chosen], [1] * 5)], 1)
        with torch.no_grad():
            replayed = adapter.log_probs(ids[chosen], mask[chosen], recorder.shadow_mask())[:, 31:]
            dense = adapter.log_probs(ids[chosen], mask[chosen])[:, 31:]
    sampled = scored(logits, ids[chosen][:, 30:])
    torch.testing.assert_close(sampled, replayed, **SAME)
    assert (sampled - dense).abs().amax(1).min() > 0.1
