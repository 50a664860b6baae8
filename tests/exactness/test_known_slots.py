"""What the cache knows about its slots without looking saves operations, and changes nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from smdlib import CompressedCache, MaskedAttentionAdapter, ShadowMaskRecorder, make_policy
from smdlib.cache.table import SlotTable
from smdlib.policies import CacheView, StepAllocation
from tests.families import make_model
from tests.sampling import POLICIES, feed, ragged_prompts

SCHEDULES = {"every token": (1, None), "every 3": (3, None), "room to spare": (2, 7), "after the prompt": (None, 2)}


def run(name, family, evict_every, reserve, lengths=(19, 14), budget=9, allocation=None):
    """Logits of 14 decoded tokens, the record, and how many slots were looked at in each step."""
    model, recorder = make_model(family), ShadowMaskRecorder()
    generators = [torch.Generator().manual_seed(row) for row in range(len(lengths))] if name == "random" else None
    cache = CompressedCache(
        model.config,
        make_policy(name, **POLICIES[name]),
        budget,
        evict_every=evict_every,
        reserve=reserve,
        recorder=recorder,
        allocation=allocation,
        generators=generators,
    )
    ids, mask = ragged_prompts([length + 14 for length in lengths], vocab=48)
    width, used = ids.shape[1] - 14, []
    with MaskedAttentionAdapter(model):
        logits = [feed(model, cache, ids, mask, [width])]
        for column in range(width, ids.shape[1]):
            with torch.no_grad():
                out = model(
                    input_ids=ids[:, column : column + 1], attention_mask=mask[:, : column + 1], cache=cache
                ).logits
            logits.append(out)
            used.append([layer.slots.used for layer in cache.layers])
    return torch.cat([part[:, -1:] for part in logits], 1), recorder.shadow_mask(), used


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_the_same_as_with_a_look_at_every_slot(monkeypatch, name, schedule):
    evict_every, reserve = SCHEDULES[schedule]
    logits, shadow, _ = run(name, "llama", evict_every, reserve)
    monkeypatch.setattr(SlotTable, "full", property(lambda slots: False))
    plain_logits, plain_shadow, _ = run(name, "llama", evict_every, reserve)
    assert torch.equal(shadow.evicted_at, plain_shadow.evicted_at)
    torch.testing.assert_close(logits, plain_logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma3", "mistral", "gpt_oss", "gpt2"])
def test_the_same_for_models_with_patterns_of_their_own(monkeypatch, family):
    logits, shadow, _ = run("h2o", family, 1, 3)
    monkeypatch.setattr(SlotTable, "full", property(lambda slots: False))
    plain_logits, plain_shadow, _ = run("h2o", family, 1, 3)
    assert torch.equal(shadow.evicted_at, plain_shadow.evicted_at)
    torch.testing.assert_close(logits, plain_logits, rtol=0, atol=1e-5)


def test_the_same_where_budgets_shrink(monkeypatch):
    allocation = StepAllocation(every=3, factor=0.7, least=0.4)
    logits, shadow, _ = run("streaming", "llama", 2, 4, allocation=allocation, budget=12)
    monkeypatch.setattr(SlotTable, "full", property(lambda slots: False))
    plain_logits, plain_shadow, _ = run("streaming", "llama", 2, 4, allocation=allocation, budget=12)
    assert torch.equal(shadow.evicted_at, plain_shadow.evicted_at)
    torch.testing.assert_close(logits, plain_logits, rtol=0, atol=1e-5)


def test_freed_slots_are_taken_before_new_ones():
    """However much room there is, attention looks at no more slots than the budget and the tokens since."""
    _, _, used = run("h2o", "llama", 2, 50)
    assert {slots for layers in used for slots in layers} == {10, 11}


def test_all_rows_as_full_as_each_other_are_known_without_a_look(monkeypatch):
    """Otherwise the equalities above compare the slow path with itself."""
    known = []
    full = SlotTable.full.fget
    monkeypatch.setattr(SlotTable, "full", property(lambda slots: known.append(full(slots)) or known[-1]))
    run("streaming", "llama", 1, None)
    assert sum(known) > 14 * 2
    known.clear()
    run("streaming", "llama", 1, None, lengths=(19, 5))  # one row below its budget for a while
    assert not any(known[:10])


def test_a_view_with_other_positions_does_not_inherit_what_was_known():
    view = CacheView.of_prompt(torch.zeros(1, 1, 4, 2), budget=2)
    view = dataclasses.replace(view, gapless=view.positions)
    assert view.all_present
    other = dataclasses.replace(view, positions=torch.tensor([[[0, -1, 2, 3]]]))
    assert not other.all_present
    assert other.protect(torch.ones(1, 1, 4), torch.zeros(1, 1, 4).bool())[0, 0].tolist() == [1, -torch.inf, 1, 1]
