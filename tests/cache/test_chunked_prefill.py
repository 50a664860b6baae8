"""A prompt in chunks under one budget: what a layer holds meanwhile, where, and what is allocated on the way."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from smdlib import CompressedCache, MaskedAttentionAdapter, ShadowMaskRecorder, make_policy
from tests.cache.allocations import Allocations
from tests.families import VOCAB, make_model
from tests.sampling import feed, kept_positions, parity, ragged_prompts, sample, scored

LAYERS, HEADS, DIM, BATCH = 3, 2, 32, 2
BUDGET, CHUNK, PROMPT = 96, 32, 256
SLOT = 2 * BATCH * HEADS * DIM * 4  # bytes of one slot of a layer, keys and values
POLICIES = {"streaming": {}, "random": {}, "snapkv": {"window": 8, "kernel_size": 3}, "h2o": {}}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=2 * HEADS * DIM,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2 * HEADS,
        num_key_value_heads=HEADS,
        head_dim=DIM,
    )
    return LlamaForCausalLM(config).eval()


def storages(cache: CompressedCache) -> dict[int, int]:
    """Address and bytes of everything that holds keys or values at this moment, handed out or at rest."""
    tensors = [
        part for layer in cache.layers if layer.slots is not None for part in (layer.slots.keys, layer.slots.values)
    ]
    tensors += [
        part for layer in cache.layers if layer._step is not None for part in (layer._step.keys, layer._step.values)
    ]
    return {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in tensors}


def addresses(cache: CompressedCache) -> list[list[int]]:
    parts = [(layer.slots.keys, layer.slots.values, layer.slots.positions) for layer in cache.layers]
    return [[part.data_ptr() for part in layer] for layer in parts]


@torch.no_grad()
def prefill(policy: str, reserve: int, **options):
    """Slots of all layers while each layer attends, chunk by chunk; bytes that each update and commit allocated."""
    model = llama()
    cache = CompressedCache(model.config, make_policy(policy, **POLICIES[policy]), BUDGET, reserve=reserve, **options)
    held, updates, commits = [], [], []
    ids = torch.randint(32, (BATCH, PROMPT))
    with MaskedAttentionAdapter(model), Allocations() as allocations:
        for layer in cache.layers:

            def update(*args, inner=layer.update, **kwargs):
                start = allocations.restart_peak()
                result = inner(*args, **kwargs)
                updates.append(allocations.peak - start)
                held.append(sum(storages(cache).values()) / SLOT)
                return result

            def commit(*args, inner=layer.commit):
                start = allocations.restart_peak()
                inner(*args)
                commits.append(allocations.peak - start)

            layer.update, layer.commit = update, commit
        at = []
        for start in range(0, PROMPT, CHUNK):
            model(ids[:, start : start + CHUNK], cache=cache, logits_to_keep=1)
            at.append(addresses(cache))
            assert cache.kv_bytes() == LAYERS * (BUDGET + reserve) * SLOT, "whatever a chunk took is gone"
    return held, updates, commits, at


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_within_the_reserve_are_written_in_place(policy):
    held, updates, commits, at = prefill(policy, reserve=CHUNK)
    later = slice(LAYERS, None)  # from the second chunk on; the first finds no slots yet
    assert len(held) == LAYERS * PROMPT // CHUNK
    assert set(held[later]) == {LAYERS * (BUDGET + CHUNK)}, "every layer holds budget + chunk, and nothing else"
    assert max(updates[later]) == 0
    # Moving the kept keys to the front takes a copy of one head's keys, or what the policy needs for its scores.
    assert max(commits[later]) < SLOT * (BUDGET + CHUNK)
    if policy == "streaming":
        assert max(commits[later]) < SLOT * BUDGET
    assert all(chunk == at[0] for chunk in at), "nothing is reallocated"


def test_a_chunk_beyond_the_reserve_costs_a_copy_of_one_layer_at_a_time():
    reserve = 4
    held, updates, _, at = prefill("streaming", reserve)
    later = slice(LAYERS, None)
    # Chunks 2 and 3 find less than a full budget.
    offered = [min(BUDGET, CHUNK * chunk) + CHUNK for chunk in range(1, PROMPT // CHUNK) for _ in range(LAYERS)]
    expected = [LAYERS * (BUDGET + reserve) + (0 if keys <= BUDGET + reserve else keys) for keys in offered]
    assert held[later] == expected
    assert max(updates) == (BUDGET + CHUNK) * SLOT
    assert all(chunk == at[0] for chunk in at), "the slots themselves stay where they are"


@pytest.mark.parametrize("policy", POLICIES)
def test_in_place_equals_the_copy(policy):
    """Keys kept, record and log-probs do not depend on where a chunk was put."""
    model = make_model("llama")
    ids, mask = ragged_prompts([60, 37], VOCAB)
    results = []
    with MaskedAttentionAdapter(model):
        for reserve in (4, 12):  # chunks of 12 do not fit, or do
            recorder = ShadowMaskRecorder()
            cache = CompressedCache(
                model.config,
                make_policy(policy, **POLICIES[policy]),
                16,
                evict_every=2,
                reserve=reserve,
                recorder=recorder,
            )
            logits = feed(model, cache, ids, mask, [12] * 4 + [1] * 12)
            kept = [kept_positions(cache, layer, row) for layer in range(3) for row in range(2)]
            results.append((scored(logits, ids), kept, recorder.shadow_mask().evicted_at))
    real = (mask[:, 1:] * mask[:, :-1]).bool()  # padding sees nothing that would mean anything
    torch.testing.assert_close(results[0][0][real], results[1][0][real], rtol=0, atol=1e-5)
    assert results[0][1] == results[1][1]
    assert torch.equal(results[0][2], results[1][2])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_chunks_in_place_are_replayed_exactly(family, policy):
    model = make_model(family)
    with MaskedAttentionAdapter(model) as adapter:
        taken = sample(
            model,
            make_policy(policy, **POLICIES[policy]),
            10,
            prompts=ragged_prompts([41, 22], VOCAB),
            chunk=9,
            reserve=9,
            evict_every=3,
        )
        shadow, dense = parity(model, adapter, taken)
    assert taken.cache.growths == 0
    assert shadow <= 1e-4 < 0.01 < dense


@torch.no_grad()
def test_eviction_every_128_tokens_reallocates_nothing():
    """R-KV's schedule: 128 tokens are decoded into the reserve, then as many keys leave where they are."""
    every, budget, batch = 128, 64, 2
    model = llama()
    cache = CompressedCache(model.config, make_policy("h2o"), budget, evict_every=every, recorder=ShadowMaskRecorder())
    ids = torch.randint(32, (batch, 80 + 3 * every))
    with MaskedAttentionAdapter(model):
        model(ids[:, :80], cache=cache, logits_to_keep=1)
        at_start, kept = addresses(cache), []
        with Allocations() as allocations:
            for step in range(80, ids.shape[1]):
                allocations.operators.clear()
                model(ids[:, step : step + 1], cache=cache)
                assert addresses(cache) == at_start
                assert max(op.allocated for op in allocations.operators) < SLOT * (budget + every) / 4
                kept.append(len(kept_positions(cache, 0, 0)[0]))
    assert kept == [*range(budget + 1, budget + every), budget] * 3
    assert cache.growths == 0
    assert cache.kv_bytes() == LAYERS * (budget + every) * SLOT
