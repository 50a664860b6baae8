"""`check_parity` measures what it says, on any schedule, and leaves the model as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from smdlib import MaskedAttentionAdapter, PyramidAllocation, ShadowMaskRecorder
from smdlib.testing import Parity, byte_tokenizer, check_parity, tiny_model

PROMPTS = torch.arange(80).reshape(2, 40)


@pytest.mark.parametrize("chunk", [None, 9, 39], ids=["one call", "chunks", "a last chunk of one token"])
@pytest.mark.parametrize("evict_every", [None, 1, 5])
def test_parity_holds(evict_every, chunk):
    mask = torch.ones_like(PROMPTS)
    mask[1, :7] = 0
    options = {"new_tokens": 12, "evict_every": evict_every, "chunk": chunk, "allocation": PyramidAllocation()}
    parity = check_parity(tiny_model(), "h2o", 12, PROMPTS, mask, **options)
    assert parity.holds and parity.conclusive
    assert parity.mean_gap <= parity.gap <= 1e-4 < 0.01 < parity.mean_dense_gap <= parity.dense_gap
    assert parity.sampled_tokens == 24
    assert parity.kv_bytes > 0


def test_the_share_of_evicted_keys_is_counted():
    parity = check_parity(tiny_model(), "streaming", 10, PROMPTS, new_tokens=10)
    assert parity.evicted == pytest.approx(30 / 50)  # of 40 + 10 keys a head


def test_nothing_evicted_is_not_conclusive():
    parity = check_parity(tiny_model(), "streaming", 40, PROMPTS, new_tokens=8)
    assert (parity.evicted, parity.holds, parity.conclusive) == (0.0, True, False)
    assert parity.dense_gap <= 1e-4


def test_a_record_that_misses_evictions_does_not_hold(monkeypatch):
    record = ShadowMaskRecorder.record
    monkeypatch.setattr(ShadowMaskRecorder, "record", lambda s, i, at, gone, seen: record(s, i, at, gone & False, seen))
    parity = check_parity(tiny_model(), "streaming", 10, PROMPTS, new_tokens=8)
    assert not parity.holds and parity.gap > 0.01


def test_nan_does_not_hold():
    parity = check_parity(tiny_model(), "streaming", 10, PROMPTS, new_tokens=4)
    assert not replace(parity, gap=float("nan")).holds
    assert isinstance(parity, Parity)


def test_half_precision_has_a_band():
    model = tiny_model().to(torch.bfloat16)
    assert check_parity(model, "snapkv(window=4)", 0.4, PROMPTS, new_tokens=4).tolerance == 0.15
    assert check_parity(model, "snapkv(window=4)", 0.4, PROMPTS, new_tokens=4, tolerance=0.3).tolerance == 0.3


def test_the_model_stays_as_it_was():
    model = tiny_model().train()
    implementation, state = model.config._attn_implementation, torch.get_rng_state()
    check_parity(model, "streaming", 10, PROMPTS, new_tokens=4)
    assert model.training and all(module.training for module in model.modules())
    assert model.config._attn_implementation == implementation
    assert torch.equal(torch.get_rng_state(), state)


def test_an_adapter_that_is_there_is_used_and_stays():
    model = tiny_model()
    adapter = MaskedAttentionAdapter(model)
    assert check_parity(model, "streaming", 10, PROMPTS, new_tokens=4).holds
    assert adapter.installed


def test_the_seed_decides_the_sample():
    first, again, other = (
        check_parity(tiny_model(), "streaming", 10, PROMPTS, new_tokens=8, seed=seed).shadow.token_ids
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_progress_is_told():
    told = []
    check_parity(
        tiny_model(), "streaming", 10, PROMPTS, new_tokens=3, chunk=20, progress=lambda *what: told.append(what)
    )
    assert told == [
        ("reading the prompt", 0, 40),
        ("reading the prompt", 20, 40),
        ("sampling", 1, 3),
        ("sampling", 2, 3),
        ("sampling", 3, 3),
        ("scoring with the record", 0, 2),
        ("scoring with every key", 1, 2),
        ("done", 2, 2),
    ]


def test_the_tiny_model_speaks_the_tokenizers_bytes():
    tokenizer, state = byte_tokenizer(), torch.get_rng_state()
    assert tiny_model().config.vocab_size == len(tokenizer) == 259
    assert torch.equal(torch.get_rng_state(), state)
    assert tokenizer.decode(tokenizer("naïve ☃")["input_ids"]) == "naïve ☃"
    assert byte_tokenizer(pad_is_eos=True).pad_token_id == tokenizer.eos_token_id == 257
    weights = [next(tiny_model(seed).parameters()) for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
