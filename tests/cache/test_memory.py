"""Storage is allocated once, eviction frees slots in place, and the bytes are those of the arithmetic."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from smdlib import CompressedCache, MaskedAttentionAdapter, PyramidAllocation, ShadowMaskRecorder, make_policy
from smdlib.masks.attention import attention_mass
from tests.cache.allocations import Allocations
from tests.families import make_model
from tests.sampling import feed, kept_positions, parity, ragged_prompts, sample

POLICIES = ("streaming", "recent", "random", "snapkv", "h2o")


def llama(layers=2, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=heads * head_dim,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def policy_of(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RecentPolicy without sinks")
        return make_policy(name)


# --- the measure itself


def test_allocations_follow_storages_not_tensors():
    there = torch.ones(500)
    with Allocations() as allocations:
        whole = torch.ones(1000)
        view = whole[3:]
        assert allocations.live == 4000
        del whole
        assert allocations.live == 4000, "a view keeps its storage"
        other = view + there[0]
        assert allocations.live == 4000 + 3988
        del view
        assert (allocations.live, allocations.peak) == (3988, 7988)
        there.add_(1)
        tail = there[5:]
        assert allocations.live == 3988, "storage that was there before is not new"
        del other, tail
        assert allocations.live == 0


# --- addresses


@pytest.mark.parametrize("evict_every", [None, 1, 4])
def test_case_12_storage_addresses_are_constant_over_200_decode_steps(evict_every):
    model, steps, prompt = llama(head_dim=4), 200, 24
    recorder = ShadowMaskRecorder()
    cache = CompressedCache(
        model.config,
        "h2o",
        12,
        evict_every=evict_every,
        reserve=200 if evict_every is None else None,
        recorder=recorder,
    )
    ids, mask = ragged_prompts([prompt, 17], vocab=32)
    with MaskedAttentionAdapter(model):
        feed(model, cache, ids, mask, [prompt])

        def addresses():
            parts = [
                (layer.slots.keys, layer.slots.values, layer.slots.positions, layer.slots.mass)
                for layer in cache.layers
            ]
            return [[part.data_ptr() for part in layer] for layer in parts]

        at_start, bytes_at_start = addresses(), cache.kv_bytes()
        ids = torch.cat([ids, torch.randint(32, (2, steps))], 1)
        mask = torch.cat([mask, torch.ones(2, steps, dtype=mask.dtype)], 1)
        for _ in range(steps):
            feed(model, cache, ids, mask, [1])
            assert addresses() == at_start
    assert (cache.growths, cache.kv_bytes()) == (0, bytes_at_start)
    kept = 12 + (steps if evict_every is None else 0)
    assert all(
        len(head) == kept for layer in range(2) for row in range(2) for head in kept_positions(cache, layer, row)
    )
    gone = recorder.shadow_mask([prompt + steps + 1, 17 + steps + 1]).evicted_at[0] <= prompt + steps
    assert gone.sum(0).eq(prompt + steps - kept).all()


# --- peaks


def commits_measured(cache, allocations):
    """Append, for every `commit`, the number of queries, and the bytes above what lived before (at the peak, after)."""
    taken = []
    for layer in cache.layers:

        def commit(query, *args, inner=layer.commit):
            start = allocations.restart_peak()
            inner(query, *args)
            taken.append((query.shape[2], allocations.peak - start, allocations.live - start))

        layer.commit = commit
    return taken


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", POLICIES)
def test_case_12_eviction_allocates_less_than_one_layer(policy, dtype, batch):
    """At the peak, everything included: in a prefill the new slots themselves, in decoding the scores."""
    heads, dim, prompt, budget, steps = 4, 64, 384, 192, 4
    model = llama(heads=2 * heads, kv_heads=heads, head_dim=dim, dtype=dtype)
    cache = CompressedCache(model.config, policy_of(policy), budget, evict_every=2, recorder=ShadowMaskRecorder())
    ids = torch.randint(32, (batch, prompt + steps))
    per_key = 2 * batch * heads * dim * dtype.itemsize
    with MaskedAttentionAdapter(model), torch.no_grad(), Allocations() as allocations:
        taken = commits_measured(cache, allocations)
        model(ids[:, :prompt], cache=cache, logits_to_keep=1)
        for step in range(prompt, prompt + steps):
            model(ids[:, step : step + 1], cache=cache)
    prefills = [(peak, after) for queries, peak, after in taken if queries > 1]
    decodes = [(peak, after) for queries, peak, after in taken if queries == 1]
    assert (len(prefills), len(decodes)) == (2, 2 * steps)
    for peak, after in prefills:
        assert peak < per_key * prompt
        assert after >= per_key * (budget + 2), "the measure must see the slots"
    # Storage at rest grows by nothing; a step without eviction needs next to nothing.
    assert all(after < per_key for _, after in decodes)
    assert all(peak < per_key * (budget + 2) for peak, _ in decodes)
    assert all(peak < 2 * per_key for peak, _ in decodes[:2])  # the first step does not evict


def test_prefill_releases_what_is_not_kept():
    """After each layer's attention only its slots are left of its keys; two layers' prompts are never there at once."""
    batch, prompt, budget = 2, 512, 64
    model = llama(layers=4, head_dim=64)
    cache = CompressedCache(model.config, "streaming", budget, evict_every=1)
    with MaskedAttentionAdapter(model), torch.no_grad(), Allocations() as allocations:
        model(torch.randint(32, (batch, prompt)), cache=cache, logits_to_keep=1)
        left = allocations.live
    positions = 4 * batch * 2 * (budget + 1) * 8  # int64 per slot
    assert cache.kv_bytes() <= left < cache.kv_bytes() + positions * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
def test_attention_mass_takes_less_than_one_layer(masked, batch, dtype):
    kv_heads, group, tokens, dim = 2, 4, 512, 64
    query = torch.randn(batch, kv_heads * group, tokens, dim, dtype=dtype)
    key = torch.randn(batch, kv_heads, tokens, dim, dtype=dtype)
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(batch, 1, -1, -1) if masked else None
    for queries, seen in ((query, visible), (query[:, :, -1:], None if visible is None else visible[:, :, -1:])):
        if queries.shape[2] == 1 and seen is None:
            seen = torch.ones(batch, 1, 1, tokens, dtype=torch.bool)
        with Allocations() as allocations:
            attention_mass(queries, key, seen, scaling=0.25)
        assert 0 < allocations.peak < 2 * key.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_mass_is_the_formula(dtype):
    torch.manual_seed(0)
    query, key = torch.randn(2, 6, 70, 8, dtype=dtype), torch.randn(2, 3, 70, 8, dtype=dtype)
    visible = torch.rand(2, 3, 70, 70) < 0.5
    visible[:, :, 3] = False  # a query that sees nothing
    for queries, seen in ((query, visible), (query[:, :, 5:6], visible[:, :, 5:6]), (query, None)):
        mask = torch.ones(70, 70, dtype=torch.bool).tril().expand(2, 3, -1, -1) if seen is None else seen
        expected = torch.zeros(2, 3, 70)
        for row in range(2):
            for head in range(6):
                logits = 0.25 * queries[row, head].float() @ key[row, head // 2].float().T
                weights = logits.masked_fill(~mask[row, head // 2], -torch.inf).softmax(-1)
                expected[row, head // 2] += weights.nan_to_num(0.0).sum(0)
        torch.testing.assert_close(attention_mass(queries, key, seen, scaling=0.25), expected, rtol=1e-5, atol=1e-5)


MOVES = ("aten.cat", "aten.stack", "aten.gather", "aten.index", "aten.take", "aten.clone", "aten.copy_", "aten.repeat")


@pytest.mark.parametrize("evict_every", [None, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_of_the_size_of_the_keys_is_moved_in_a_decode_step(policy, evict_every):
    batch, heads, dim, budget = 2, 2, 64, 192
    model = llama(head_dim=dim)
    cache = CompressedCache(model.config, policy_of(policy), budget, evict_every=evict_every, reserve=16)
    with MaskedAttentionAdapter(model), torch.no_grad():
        model(torch.randint(32, (batch, 256)), cache=cache)
        model(torch.randint(32, (batch, 1)), cache=cache)
        with Allocations() as allocations:
            model(torch.randint(32, (batch, 1)), cache=cache)
    key_bytes = batch * heads * budget * dim * 4
    moved = [op for op in allocations.operators if op.name.startswith(MOVES) and op.output_bytes >= key_bytes / 2]
    assert not moved
    if policy != "snapkv" or evict_every is None:  # its logits, 32 queries by all keys, are as large as the keys
        assert max(op.allocated for op in allocations.operators) < key_bytes / 4
    assert any(op.name.startswith("aten.scatter_") for op in allocations.operators), "the new key is written in place"


# --- bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_case_9_bytes_count_kv_heads_not_query_heads(heads, kv_heads, dtype):
    model = llama(layers=3, heads=heads, kv_heads=kv_heads, head_dim=16, dtype=dtype)
    cache = CompressedCache(model.config, "snapkv", 10, evict_every=4, reserve=6)
    assert cache.kv_bytes() == 0
    ids, mask = ragged_prompts([40, 33], vocab=32)
    with MaskedAttentionAdapter(model), torch.no_grad(), Allocations() as allocations:
        model(ids, attention_mask=mask, cache=cache)
    assert cache.kv_bytes() == 2 * 3 * 2 * kv_heads * (10 + 6) * 16 * dtype.itemsize
    assert sum(layer.slots.keys.nbytes + layer.slots.values.nbytes for layer in cache.layers) == cache.kv_bytes()
    assert allocations.live >= cache.kv_bytes()


def test_bytes_of_a_share_are_those_of_the_longest_prompt():
    model = llama()
    ids, mask = ragged_prompts([40, 11], vocab=32)
    cache = CompressedCache(model.config, "streaming", 0.3, reserve=5)
    with MaskedAttentionAdapter(model):
        feed(model, cache, ids, mask, [40])
    assert cache.kv_bytes() == 2 * 2 * 2 * 2 * (12 + 5) * 16 * 4


def test_bytes_of_a_pyramid_are_those_of_its_layers():
    model, allocation = llama(layers=4), PyramidAllocation()
    cache = CompressedCache(model.config, "streaming", 10, allocation=allocation, evict_every=1)
    ids, mask = ragged_prompts([40, 30], vocab=32)
    with MaskedAttentionAdapter(model):
        feed(model, cache, ids, mask, [40])
    per_layer = allocation(torch.tensor([10]), 4, 2)[:, 0, 0].tolist()
    assert len(set(per_layer)) == 4 and sum(per_layer) == 40
    assert cache.kv_bytes() == 2 * 2 * 2 * sum(budget + 1 for budget in per_layer) * 16 * 4


def test_bytes_of_a_group_are_those_of_its_rows():
    model = llama()
    cache = CompressedCache(model.config, "h2o", 10, evict_every=1)
    ids, mask = ragged_prompts([40, 30], vocab=32)
    with MaskedAttentionAdapter(model):
        feed(model, cache, ids, mask, [40])
        alone = cache.kv_bytes()
        cache.batch_repeat_interleave(3)
        assert cache.kv_bytes() == 3 * alone == 2 * 2 * (2 * 3) * 2 * (10 + 1) * 16 * 4
        cache.batch_select_indices(torch.tensor([0, 5]))
        assert cache.kv_bytes() == alone


# --- sinks and growth


def test_case_7_without_sinks_there_is_a_warning():
    with pytest.warns(UserWarning, match=r"RecentPolicy without sinks evicts the first tokens.*set sinks=4"):
        CompressedCache(llama().config, "recent", 8)


def test_case_7_with_sinks_they_never_leave():
    model, steps = llama(head_dim=4), 120
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policies = [make_policy("recent", sinks=3), make_policy("streaming", sinks=3)]
    for policy in policies:
        cache = CompressedCache(model.config, policy, 8, evict_every=1)
        ids, mask = ragged_prompts([24, 13], vocab=32)
        ids = torch.cat([ids, torch.randint(32, (2, steps))], 1)
        mask = torch.cat([mask, torch.ones(2, steps, dtype=mask.dtype)], 1)
        with MaskedAttentionAdapter(model):
            feed(model, cache, ids, mask, [24, *[1] * steps])
        for row, seen in enumerate((24 + steps, 13 + steps)):
            for layer in range(2):
                assert kept_positions(cache, layer, row) == [[0, 1, 2, *range(seen - 5, seen)]] * 2


def test_a_response_beyond_the_reserve_grows_by_blocks_and_is_still_exact():
    model = make_model("llama")
    with MaskedAttentionAdapter(model) as adapter:
        with pytest.warns(
            UserWarning, match=r"grew layer 0 to 18 slots .* longer than reserve=4.*reserve=max_new_tokens"
        ) as seen:
            taken = sample(model, "snapkv", 10, prompts=ragged_prompts([30, 22], 97), new_tokens=12, reserve=4)
        assert len([warning for warning in seen if "CompressedCache grew" in str(warning.message)]) == 1
        # 11 tokens are fed: 4 fit, then two blocks of 4 in each of the 3 layers.
        assert taken.cache.growths == 2 * 3
        assert taken.cache.kv_bytes() == 2 * 3 * 2 * 2 * (10 + 4 + 8) * 12 * 4
        shadow, dense = parity(model, adapter, taken)
    assert shadow < 1e-4 < 1e-2 < dense


@pytest.mark.parametrize("evict_every", [None, 1, 4])
def test_a_response_within_the_reserve_never_grows(evict_every):
    model = make_model("llama")
    with MaskedAttentionAdapter(model), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        taken = sample(
            model, "snapkv", 10, prompts=ragged_prompts([30, 22], 97), new_tokens=13, evict_every=evict_every
        )
    assert taken.cache.growths == 0
