"""Budgets that shrink while decoding: the keys that are left, their storage, and the replay."""

from __future__ import annotations

import math

import pytest
import torch

from smdlib import NEVER, CompressedCache, MaskedAttentionAdapter, PolicyError, ShadowMaskRecorder
from smdlib.policies import AdaptiveHeadAllocation, PyramidAllocation, StepAllocation
from tests.families import make_model
from tests.sampling import parity, ragged_prompts, sample


@pytest.mark.parametrize("policy", ["streaming", "snapkv", "h2o"])
@pytest.mark.parametrize("evict_every", [1, 3])
@pytest.mark.parametrize("inner", [{}, {"allocation": PyramidAllocation()}], ids=["uniform", "pyramid"])
def test_replay(policy, evict_every, inner):
    model = make_model("llama")
    adapter = MaskedAttentionAdapter(model)
    allocation = StepAllocation(every=2, factor=0.6, least=0.3, **inner)
    taken = sample(
        model, policy, 12, prompts=ragged_prompts([30, 17], model.config.vocab_size), evict_every=evict_every,
        allocation=allocation, new_tokens=12,
    )  # fmt: skip
    replayed, dense = parity(model, adapter, taken)
    assert replayed < 1e-4 < dense


def test_keys_left_after_every_token():
    model = make_model("llama")
    ids, _ = ragged_prompts([40], model.config.vocab_size)
    recorder = ShadowMaskRecorder()
    with MaskedAttentionAdapter(model), torch.no_grad():
        cache = CompressedCache(
            model.config, "streaming", 20, evict_every=1, recorder=recorder,
            allocation=StepAllocation(every=3, factor=0.5, least=0.2),
        )  # fmt: skip
        model(input_ids=ids, cache=cache)
        slots = cache.layers[0].slots
        address, size = slots.keys.data_ptr(), cache.kv_bytes()
        for decoded in range(1, 14):
            model(input_ids=ids[:, :1], cache=cache)
            budget = max(1, math.floor(20 * max(0.2, 0.5 ** (decoded // 3))))
            for layer in cache.layers:
                held = (layer.slots.positions >= 0).sum(-1)
                assert held.tolist() == [[budget] * held.shape[1]], decoded
                # Streaming keeps 4 sinks and then the newest.
                kept = sorted(layer.slots.positions[0, 0][layer.slots.positions[0, 0] >= 0].tolist())
                newest = range(40 + decoded - (budget - 4), 40 + decoded)
                assert kept == [0, 1, 2, 3, *newest]
        assert (slots.keys.data_ptr(), cache.kv_bytes()) == (address, size)
    shadow = recorder.shadow_mask()
    # All but the sinks, and the last token, which left after the last query.
    assert int((shadow.evicted_at[0, :, 0, 0] < NEVER).sum()) == 53 - 4 - 1


def test_rows_that_are_repeated_keep_shrinking():
    model = make_model("llama")
    ids, _ = ragged_prompts([24], model.config.vocab_size)
    with MaskedAttentionAdapter(model), torch.no_grad():
        cache = CompressedCache(
            model.config, "recent", 10, evict_every=1, allocation=StepAllocation(every=1, factor=0.5)
        )
        model(input_ids=ids, cache=cache)
        cache.batch_repeat_interleave(3)
        model(input_ids=ids[:, :1].expand(3, -1), cache=cache)
        assert (cache.layers[0].slots.positions >= 0).sum(-1).tolist() == [[5, 5]] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": 2, "factor": 1.5}, "factor is 1.5"),
        ({"every": 2, "least": 0}, "least is 0"),
    ],
)
def test_bad_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        StepAllocation(**options)


def test_allocations_that_decide_by_scores_are_refused():
    with pytest.raises(TypeError, match="AdaptiveHeadAllocation"):
        StepAllocation(every=2, allocation=AdaptiveHeadAllocation())


class Growing(StepAllocation):
    """Wants more than it was given."""

    def after(self, budget, decoded):
        return budget + 1


def test_budgets_cannot_grow():
    model = make_model("llama")
    ids, _ = ragged_prompts([24], model.config.vocab_size)
    with MaskedAttentionAdapter(model), torch.no_grad():
        cache = CompressedCache(model.config, "recent", 10, evict_every=1, allocation=Growing(every=1))
        model(input_ids=ids, cache=cache)
        with pytest.raises(PolicyError, match="Growing after 1 decoded tokens: budgets must lie between 1"):
            model(input_ids=ids[:, :1], cache=cache)


@pytest.mark.parametrize(
    ("allocation", "error", "message"),
    [
        (StepAllocation(every=2), ValueError, "without evict_every"),
        (PyramidAllocation, TypeError, "an object such as PyramidAllocation"),
        ("adaptive", TypeError, "an object such as PyramidAllocation"),
    ],
)
def test_allocations_that_would_have_no_effect_or_cannot_be_asked(allocation, error, message):
    with pytest.raises(error, match=message):
        CompressedCache(make_model("llama").config, "snapkv", 8, allocation=allocation)
