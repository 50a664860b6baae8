"""Cases from public bug reports against other cache compressors, by number; exactness of rollout and replay."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from smdlib import (
    CompressedCache,
    EvictionPolicy,
    MaskedAttentionAdapter,
    PyramidAllocation,
    ShadowMaskRecorder,
    make_policy,
)
from smdlib.cache.layer import cache_layer_of
from smdlib.masks import NEVER, adapter, attention
from tests.families import VOCAB, make_model
from tests.sampling import feed, kept_positions, parity, ragged_prompts, sample, scored

POLICIES: dict[str, dict[str, Any]] = {
    "streaming": {},
    "recent": {},
    "random": {"recent": 2},
    "snapkv": {"window": 4, "kernel_size": 3},
    "h2o": {},
}
LENGTHS = [26, 9, 17]
SAME = {"rtol": 0, "atol": 1e-4}


def policy_of(name: str) -> EvictionPolicy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `recent` warns of missing sinks
        return make_policy(name, **POLICIES[name])


@dataclass
class Call:
    """One layer's attention of one forward pass, as the attention function got it."""

    layer: int
    queries: int
    keys: int
    visible: Tensor | None
    positions: Tensor | None  # [B, H, K] in a rollout


@pytest.fixture
def calls(monkeypatch) -> list[Call]:
    """Everything that adapters installed from now on hand to the inner attention functions."""
    seen: list[Call] = []

    def note(layer: int, query: Tensor, key: Tensor, visible: Tensor | None) -> None:
        cached, positions = cache_layer_of(key), None
        if cached is not None and cached.slots is not None and cached.slots.used == key.shape[2]:
            positions = cached.slots.positions[:, :, : key.shape[2]].clone()
        seen.append(Call(layer, query.shape[2], key.shape[2], visible, positions))

    def watch(inner: Callable[..., Any]) -> Callable[..., Any]:
        def attention(module, query, key, value, visible, *args, **kwargs):
            note(module.layer_idx, query, key, visible)
            return inner(module, query, key, value, visible, *args, **kwargs)

        return attention

    decode = attention.decode_attention

    def watched_decode(query, key, value, visible, *args):
        note(cache_layer_of(key).layer_idx, query, key, visible)
        return decode(query, key, value, visible, *args)

    monkeypatch.setattr(attention, "decode_attention", watched_decode)
    for name, inner in {"sdpa": "fused_attention", "eager": "eager_attention"}.items():
        watched = watch(getattr(attention, inner))
        monkeypatch.setattr(attention, inner, watched)
        monkeypatch.setitem(adapter._BACKENDS, name, partial(attention.shadow_attention, inner=watched))
    return seen


@pytest.mark.parametrize("evict_every", [None, 1, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_case_05_padded_row_is_the_row_alone(family, policy, evict_every):
    model = make_model(family)
    ids, mask = ragged_prompts(LENGTHS, VOCAB)
    response = torch.randint(12, VOCAB, (len(LENGTHS), 10), generator=torch.Generator().manual_seed(5))
    ids, mask = torch.cat([ids, response], 1), torch.cat([mask, torch.ones_like(response)], 1)

    def run(ids: Tensor, mask: Tensor) -> tuple[Tensor, CompressedCache, Tensor]:
        recorder = ShadowMaskRecorder()
        cache = CompressedCache(
            model.config, policy_of(policy), 0.4, evict_every=evict_every, recorder=recorder, reserve=10
        )
        logits = feed(model, cache, ids, mask, [ids.shape[1] - 10] + [1] * 10)
        return logits.log_softmax(-1), cache, recorder.shadow_mask().evicted_at

    with MaskedAttentionAdapter(model):
        together, cache, record = run(ids, mask)
        for row, length in enumerate(LENGTHS):
            start, end = max(LENGTHS) - length, length + 10
            alone, cache_alone, record_alone = run(ids[row : row + 1, start:], mask[row : row + 1, start:])
            torch.testing.assert_close(together[row, start:], alone[0], **SAME)
            assert torch.equal(record[row, :end], record_alone[0])
            assert (record[row, end:] == NEVER).all()
            for layer in range(3):
                kept = kept_positions(cache, layer, row)
                assert kept == kept_positions(cache_alone, layer, 0)
                budget = -(-length * 2 // 5) + (10 if evict_every is None else 10 % evict_every)
                assert [len(head) for head in kept] == [budget] * len(kept)


@pytest.mark.parametrize(
    ("budget", "evict_every"),
    [
        (0.4, None),
        (0.4, 1),
        (0.4, 4),
        (12, None),
        (12, 1),
        (12, 4),
    ],
)
def test_case_05_a_row_with_its_generator_does_not_depend_on_its_batch(budget, evict_every):
    model = make_model("llama")
    ids, mask = ragged_prompts([26, 19], VOCAB)  # columns: prompt 16, decoded 10; the second prompt has 9 tokens

    def run(rows: list[int], start: int) -> Tensor:
        recorder = ShadowMaskRecorder()
        cache = CompressedCache(
            model.config,
            policy_of("random"),
            budget,
            evict_every=evict_every,
            recorder=recorder,
            reserve=10,
            generators=[torch.Generator().manual_seed(row) for row in rows],
        )
        feed(model, cache, ids[rows, start:], mask[rows, start:], [16 - start] + [1] * 10)
        return recorder.shadow_mask().evicted_at

    with MaskedAttentionAdapter(model):
        together = run([0, 1], 0)
        assert torch.equal(together[:1], run([0], 0))
        assert torch.equal(together[1:, :19], run([1], 7))


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_case_06_position_after_evictions_is_the_true_index(family, explicit):
    model = make_model(family)
    ids = torch.randint(12, VOCAB, (2, 32), generator=torch.Generator().manual_seed(0))
    positions: list[list[int]] = []
    if family == "llama":

        def hook(module, args, kwargs):
            positions.append(kwargs["position_ids"][0].tolist())

        handle = model.model.rotary_emb.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        handle = model.transformer.wpe.register_forward_pre_hook(lambda _, args: positions.append(args[0][0].tolist()))
    recorder = ShadowMaskRecorder()
    with MaskedAttentionAdapter(model) as installed, torch.no_grad():
        cache = CompressedCache(model.config, "streaming", 6, evict_every=1, recorder=recorder)
        logits = []
        for start, stop in [(0, 20), *((at, at + 1) for at in range(20, 32))]:
            extra = {"position_ids": torch.arange(start, stop).expand(2, -1)} if explicit else {}
            logits.append(model(ids[:, start:stop], cache=cache, **extra).logits)
            assert cache.get_seq_length() == stop
            assert len(kept_positions(cache, 2, 0)[0]) == 6
        handle.remove()
        replayed = installed.log_probs(ids, shadow_mask=recorder.shadow_mask())
    assert positions == [list(range(20)), *([at] for at in range(20, 32))]
    torch.testing.assert_close(scored(torch.cat(logits, 1), ids), replayed[:, 1:], **SAME)


def test_case_06_absolute_positions_of_padded_rows():
    """GPT-2 adds the position: each row must count its own tokens, after evictions too, in `generate` as well."""
    model = make_model("gpt2")
    positions: list[list[int]] = []
    model.transformer.wpe.register_forward_pre_hook(lambda _, args: positions.append(args[0][:, -1].tolist()))
    with MaskedAttentionAdapter(model):
        sample(model, "streaming", 6, prompts=ragged_prompts(LENGTHS, VOCAB), new_tokens=5, evict_every=1)
    assert positions == [[length - 1 + step for length in LENGTHS] for step in range(5)]


@pytest.mark.parametrize("name", POLICIES)
def test_case_08_same_policy_object_in_two_generations(name):
    model = make_model("llama")
    policy = policy_of(name)
    first_prompts, second_prompts = ragged_prompts([30, 11], VOCAB, seed=1), ragged_prompts(LENGTHS, VOCAB, seed=2)
    with MaskedAttentionAdapter(model):
        first = sample(model, policy, 0.4, prompts=first_prompts, evict_every=2)
        second = sample(model, policy, 0.4, prompts=second_prompts, evict_every=2)
        fresh = sample(model, policy_of(name), 0.4, prompts=second_prompts, evict_every=2)
    # 30 and 26 tokens keep 12 and 11 keys, plus a reserve of 2.
    assert first.cache.kv_bytes() == 3 * 2 * 2 * 2 * (12 + 2) * 12 * 4
    assert second.cache.kv_bytes() == 3 * 3 * 2 * 2 * (11 + 2) * 12 * 4
    assert first.shadow.retention(first.lengths).max() < 0.9
    assert second.shadow.retention(second.lengths).max() < 0.9
    assert torch.equal(second.tokens, fresh.tokens)
    assert torch.equal(second.shadow.evicted_at, fresh.shadow.evicted_at)
    assert torch.equal(second.sampled[second.response_mask], fresh.sampled[fresh.response_mask])


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("evict_every", [None, 1])
@pytest.mark.parametrize("policy", ["streaming", "snapkv", "h2o"])
def test_case_10_layers_of_different_length(policy, evict_every, backend):
    model = make_model("llama")
    allocation = PyramidAllocation(beta=4)
    budgets = allocation(torch.tensor([8]), 3, 2)[:, 0, 0].tolist()
    assert budgets == [14, 8, 2]
    with MaskedAttentionAdapter(model, backend=backend) as installed:
        taken = sample(
            model,
            policy_of(policy),
            8,
            prompts=ragged_prompts([26, 21], VOCAB),
            new_tokens=12,
            evict_every=evict_every,
            allocation=allocation,
        )
        shadow, dense = parity(model, installed, taken)
    assert shadow <= 1e-4
    assert dense > 0.1
    response = 11 if evict_every is None else 0  # the last token is never fed
    for layer, budget in enumerate(budgets):
        assert taken.cache.layers[layer].slots.size == budget + (evict_every or 12)
        for row in range(2):
            assert [len(head) for head in kept_positions(taken.cache, layer, row)] == [budget + response] * 2
        # The record says the same: what the last query saw is what was kept before it, and itself.
        seen = taken.shadow[0].visible(layer, [36]).sum(-1).flatten().tolist()
        assert seen == [budget + (response or 1)] * 2


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("evict_every", [None, 1, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_case_11_mask_width_is_key_width_in_every_layer(policy, evict_every, backend, calls):
    model = make_model("llama")
    budget, new = 8, 24
    with MaskedAttentionAdapter(model, backend=backend) as installed:
        taken = sample(
            model,
            policy_of(policy),
            budget,
            prompts=ragged_prompts([14, 20], VOCAB),
            new_tokens=new,
            evict_every=evict_every,
            allocation=PyramidAllocation(beta=4),
        )
        rollout = list(calls)
        shadow, dense = parity(model, installed, taken)
    assert shadow <= 1e-4
    assert dense > 0.1
    assert [call.layer for call in rollout] == [0, 1, 2] * new
    for call in rollout[3:]:
        assert call.queries == 1
        assert call.keys <= taken.cache.layers[call.layer].slots.size
        # Visible is what is there: no causal or padding rule hides a kept key of this model.
        assert call.positions is not None
        if call.visible is None:  # all that is there, and nothing else is
            assert (call.positions >= 0).all()
            continue
        assert call.visible.shape == (2, 2, 1, call.keys)
        assert torch.equal(call.visible[:, :, 0], call.positions >= 0)
    assert taken.cache.growths == 0


WINDOW = 32


def windowed_mistral(window: int | None = WINDOW) -> hf.PreTrainedModel:
    """Mistral with this window, its weights those of any other window."""
    model = make_model("mistral")
    config = model.config.to_dict() | {"sliding_window": window}
    other = hf.MistralForCausalLM(hf.MistralConfig(**config)).eval()
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("chunk", [None, 12])
@pytest.mark.parametrize("evict_every", [None, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_case_13_window_of_the_model_and_eviction_both_hold(policy, evict_every, chunk, calls):
    model = windowed_mistral()
    lengths = [40, 36]
    with MaskedAttentionAdapter(model) as installed:
        taken = sample(
            model,
            policy_of(policy),
            0.7,
            prompts=ragged_prompts(lengths, VOCAB),
            new_tokens=8,
            chunk=chunk,
            evict_every=evict_every,
        )
        rollout = list(calls)
        calls.clear()
        shadow, dense = parity(model, installed, taken)
    assert shadow <= 1e-4
    assert dense > 0.1
    unwindowed = windowed_mistral(None)
    with MaskedAttentionAdapter(unwindowed) as installed:
        without_window, _ = parity(unwindowed, installed, taken)
    tokens = max(taken.lengths)
    age = torch.arange(tokens)[:, None] - torch.arange(tokens)
    expected = [taken.shadow.visible(layer) & (age < WINDOW) for layer in range(3)]  # [B, H, T, T]
    if policy != "recent" or chunk is None or evict_every is None:  # else all kept keys lie within the window
        assert any((taken.shadow.visible(layer) & (age >= WINDOW)).any() for layer in range(3))
        assert without_window > 0.01
    for call in calls[:3]:  # the masked replay, left-padded
        for row, length in enumerate(taken.lengths.tolist()):
            start = taken.tokens.shape[1] - length
            found = call.visible[row, :, start:, start:]
            assert torch.equal(found, expected[call.layer][row, :, :length, :length])
    decoding = [call for call in rollout if call.positions is not None and call.queries == 1]
    assert len(decoding) == 3 * 7
    for step, call in enumerate(decoding):
        for row, length in enumerate(lengths):
            for head in range(2):
                found = call.positions[row, head][call.visible[row, head, 0]].sort().values
                assert torch.equal(found, expected[call.layer][row, head, length + step // 3].nonzero()[:, 0])


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("policy", POLICIES)
def test_case_14_every_prefill_chunk_is_compressed(policy, backend):
    model = make_model("llama")
    ids, mask = ragged_prompts([25, 25, 19], VOCAB)
    recorder = ShadowMaskRecorder()
    budgets = [10, 10, 8]  # 0.4 of each whole prompt, from the first chunk on
    with MaskedAttentionAdapter(model, backend=backend) as installed, torch.no_grad():
        cache = CompressedCache(
            model.config, policy_of(policy), 0.4, recorder=recorder, reserve=4, prompt_lengths=mask.sum(1)
        )
        logits, sizes = [], []
        for chunk in [8, 8, 8, 1]:  # the last chunk is one token, and prompt
            logits.append(feed(model, cache, ids, mask, [chunk]))
            sizes.append(cache.kv_bytes())
            tokens = (cache.get_seq_length() - (25 - mask.sum(1))).tolist()
            for layer in range(3):
                for row, budget in enumerate(budgets):
                    kept = kept_positions(cache, layer, row)
                    assert [len(head) for head in kept] == [min(budget, tokens[row])] * 2
                    if policy in ("snapkv", "recent", "streaming"):
                        assert {tokens[row] - 1} == {head[-1] for head in kept}
        assert sizes == [3 * 2 * 3 * 2 * (10 + 4) * 12 * 4] * 4
        replayed = installed.log_probs(ids, mask, recorder.shadow_mask())[:, 1:]
        dense = installed.log_probs(ids, mask)[:, 1:]
    found, known = scored(torch.cat(logits, 1), ids), replayed.isfinite()
    assert known.sum(1).tolist() == [24, 24, 18]
    torch.testing.assert_close(found[known], replayed[known], **SAME)
    assert (found - dense)[known].abs().max() > 0.1
    # Each chunk evicted: what left did so for the first query of the next chunk. (Rows of 25 tokens.)
    evicted_at = recorder.shadow_mask(lengths=[26, 26, 20]).evicted_at[:2]
    assert evicted_at[evicted_at < NEVER].unique().tolist() == [16, 24, 25]


def test_case_14_a_token_that_is_not_known_as_prompt_is_decoding():
    model = make_model("llama")
    ids, mask = ragged_prompts([17], VOCAB)
    with MaskedAttentionAdapter(model):
        cache = CompressedCache(model.config, "streaming", 6, reserve=4)
        feed(model, cache, ids, mask, [8, 8, 1])
    assert kept_positions(cache, 0, 0) == [[0, 1, 2, 3, 14, 15, 16]] * 2
