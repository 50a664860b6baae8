"""Replay by FlexAttention gives the scores, states and gradients of replay by a dense mask.

On the CPU it is traced as for a GPU, and then interpreted; what only a compiled kernel can show is marked `gpu`.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from smdlib import CompressedCache, MaskedAttentionAdapter, ShadowMask
from smdlib.masks import View, flex
from smdlib.masks.attention import REPLAY_ARGUMENT
from smdlib.masks.replay import Replay
from smdlib.testing.parity import BAND
from tests.exactness.test_parity import (
    SCHEDULES,
    TAKES_EAGER_ANYWAY,
    check_exact,
    matrix_id,
    model_of,
    sample_and_score,
)
from tests.exactness.test_shared_prompts import group_batch, losses_and_gradients
from tests.families import FAMILIES, VOCAB, make_model
from tests.masks.test_adapter import repadded
from tests.sampling import ragged_prompts, sample

SUPPORTED = [family for family in FAMILIES if family not in TAKES_EAGER_ANYWAY]
DIFFERENT = ["llama", "mistral", "gemma3", "gpt2"]  # causal, sliding, both, and absolute positions
WIDE = ["qwen3", "gemma3"]  # heads of 16 numbers, as CUDA needs them; causal layers, and sliding ones as well
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture
def layers(monkeypatch) -> list[int]:
    """Number of queries of every layer that is replayed by FlexAttention."""
    calls = []
    inner = flex.limited_attention

    def counted(query, *args):
        calls.append(query.shape[2])
        return inner(query, *args)

    monkeypatch.setattr(flex, "limited_attention", counted)
    return calls


# --- whole rows


@pytest.mark.parametrize(
    ("family", "schedule"),
    [
        (family, schedule)
        for family in SUPPORTED
        for schedule in SCHEDULES[::2]
        if family in DIFFERENT or schedule[0] == 1
    ],
    ids=matrix_id,
)
def test_replay_is_exact(family, schedule, layers):
    check_exact(*sample_and_score(model_of(family), "snapkv", schedule, backend="flex"))
    assert layers == [38] * 3  # nothing else: neither the rollout nor the dense pass


def by_dense_mask(model: PreTrainedModel, *args: Tensor, **kwargs) -> Tensor:
    with MaskedAttentionAdapter(model, "sdpa") as adapter, torch.no_grad():
        return adapter.log_probs(*args, **kwargs)


@pytest.mark.parametrize("family", DIFFERENT)
def test_padding_on_either_side_and_short_records(family, layers):
    model = make_model(family)
    with MaskedAttentionAdapter(model, "flex") as adapter:
        taken = sample(model, "h2o", 6, prompts=ragged_prompts([18, 11], VOCAB), new_tokens=6, evict_every=1)
        whole = taken.shadow
        batches = [
            repadded(taken.tokens, taken.attention_mask, *sides)[:2] for sides in ((0, 0), (5, 0), (0, 7), (3, 4))
        ]
        with torch.no_grad():
            scores = [adapter.log_probs(*batch, whole) for batch in batches]
            short = [adapter.log_probs(*batch, whole.crop(whole.num_tokens - 1)) for batch in batches]
    assert len(layers) == 2 * 4 * 3
    for batch, with_all, with_one_less in zip(batches, scores, short, strict=True):
        expected = by_dense_mask(model, *batch, whole)
        torch.testing.assert_close(with_all, expected, atol=2e-5, rtol=0, equal_nan=True)
        torch.testing.assert_close(with_one_less, expected, atol=2e-5, rtol=0, equal_nan=True)


# --- shared prompts


def states(model: PreTrainedModel, backend: str, batch: TensorDict, share: bool, short: bool = False) -> list[Tensor]:
    shadow = batch["shadow"]
    views = [View(shadow.crop(shadow.num_tokens - 1) if short else shadow), View(None, gradient=False)]
    names = ("tokens", "full"), ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")
    with MaskedAttentionAdapter(model, backend, share_prompts=share) as adapter, torch.no_grad():
        found, per_row = adapter.response_states(*(batch[name] for name in names), views)
    assert per_row == (pytest.approx(2 / 5) if share else 1.0)
    return found


@pytest.mark.parametrize(
    ("family", "policy", "evict_every", "budget"),
    [
        ("llama", "snapkv", None, 0.5),
        ("llama", "random", 1, 9),
        ("qwen3", "h2o", 3, 9),
        ("mistral", "streaming", 1, 6),
        ("gemma3", "h2o", 1, 20),
        ("gpt2", "h2o", 1, 0.5),
    ],
)
def test_responses_on_shared_prompts(family, policy, evict_every, budget, layers):
    model = make_model(family)
    with MaskedAttentionAdapter(model):
        batch = group_batch(model, policy, evict_every, budget=budget)
    expected = states(model, "sdpa", batch, share=True)
    assert not layers
    for share, short in ((True, False), (True, True), (False, False)):
        found = states(model, "flex", batch, share, short)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, atol=2e-5, rtol=1e-5)
    assert (expected[0] - expected[1]).abs().max() > 0.01
    assert layers == [7] * 6 + [batch["tokens", "full"].shape[1]] * 3  # prompts and dense views are left to sdpa


# --- learning


@pytest.fixture
def trainable(request, monkeypatch):
    """Let FlexAttention's own backward pass, as it is traced for a compiler, be interpreted on the CPU."""
    torch._dynamo.reset()
    counters.clear()
    if request.getfixturevalue("device") == "cpu":
        traced = torch.compile(flex._attend, backend="aot_eager", dynamic=False, fullgraph=True)
        monkeypatch.setattr(flex, "_compiled", lambda device_type: traced)
        monkeypatch.setattr(flex, "_without_gradient", lambda tensor: tensor)
        monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)


@DEVICES
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "activation checkpointing"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "whole"])
@pytest.mark.parametrize("family", WIDE)
def test_losses_and_gradients_are_those_of_the_dense_mask(family, share, checkpointing, device, layers, trainable):
    model = make_model(family)
    with MaskedAttentionAdapter(model):
        batch = group_batch(model, "h2o", evict_every=1).to(device)
    evicted_at = batch["shadow"].evicted_at
    assert not torch.equal(evicted_at[..., 0], evicted_at[..., 1])  # heads have lost different keys
    model = model.to(device)
    with MaskedAttentionAdapter(model, "sdpa") as adapter:
        losses, expected, _ = losses_and_gradients(adapter, batch, share)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    with MaskedAttentionAdapter(model, "flex") as adapter:
        mine, gradients, _ = losses_and_gradients(adapter, batch, share)
    assert len(layers) == 3 * (1 + checkpointing)
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(mine, losses, rtol=1e-4, atol=1e-5)
    assert gradients.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((gradients[name] - gradient).abs().max()) <= 1e-4 * largest, name


def test_learning_on_the_cpu_is_refused():
    model = make_model("llama")
    with MaskedAttentionAdapter(model, "flex") as adapter:
        batch = group_batch(model)
        with pytest.raises(RuntimeError, match=r"no backward on the CPU: learn there with .*backend='sdpa'"):
            losses_and_gradients(adapter, batch, share=True)
        tokens, mask = batch["tokens", "full"], batch["masks", "all_attention_mask"]
        with pytest.raises(RuntimeError, match="no backward on the CPU"):
            adapter.log_probs(tokens, mask, batch["shadow"])
        assert adapter.log_probs(tokens, mask).requires_grad  # sdpa


@pytest.mark.gpu
@pytest.mark.parametrize("family", WIDE)
def test_bfloat16(family):
    model = make_model(family)
    with MaskedAttentionAdapter(model):
        taken = sample(model, "h2o", 0.4, prompts=ragged_prompts([150, 60], VOCAB), new_tokens=12, evict_every=1)
    model = model.to("cuda", torch.bfloat16)
    tokens, mask, shadow = (thing.to("cuda") for thing in (taken.tokens, taken.attention_mask, taken.shadow))
    expected = by_dense_mask(model, tokens, mask, shadow)
    with MaskedAttentionAdapter(model, "flex") as adapter, torch.no_grad():
        mine = adapter.log_probs(tokens, mask, shadow)
        dense = adapter.log_probs(tokens, mask)
    assert (mine - expected).nan_to_num().abs().max() <= BAND < (dense - expected).nan_to_num().abs().max()


# --- one kernel


@DEVICES
@pytest.mark.parametrize("family", WIDE)
def test_one_kernel_serves_layers_lengths_and_batches(family, device, layers):
    """Causal and sliding layers alike. Keys of whole rows lie in memory as keys put together do not: two kernels."""
    model = make_model(family)
    batches = []
    with MaskedAttentionAdapter(model):
        for length, rows in ((9, 2), (20, 3), (40, 2), (70, 4)):
            taken = sample(model, "snapkv", 0.4, prompts=ragged_prompts([length] * rows, VOCAB), new_tokens=5)
            batches.append([thing.to(device) for thing in (taken.tokens, taken.attention_mask, taken.shadow)])
        groups = [group_batch(model, new=new).to(device) for new in (7, 9)]
    model = model.to(device)
    torch._dynamo.reset()
    counters.clear()
    with MaskedAttentionAdapter(model, "flex") as adapter, torch.no_grad():
        for batch in batches:
            adapter.log_probs(*batch)
    assert counters["stats"]["unique_graphs"] == 1
    for batch in groups:
        states(model, "flex", batch, share=True)
    assert counters["stats"]["unique_graphs"] == 2
    assert len(layers) == 3 * 6


# --- installing


@pytest.mark.parametrize("again", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_copies_replay_as_well(again):
    model = make_model("llama")
    adapter = MaskedAttentionAdapter(model, "flex")
    ids, mask = ragged_prompts([9, 5], VOCAB)
    shadow = sample(model, "streaming", 4, prompts=(ids, mask), new_tokens=2).shadow.crop(9)
    twin = again(adapter)
    assert twin.installed and twin.backend == "flex"
    with torch.no_grad():
        scores = [one.log_probs(ids, mask, shadow) for one in (adapter, twin)]
    assert torch.equal(*(score.nan_to_num() for score in scores))


def test_removing_gives_the_models_attention_back_also_to_a_copy():
    model = make_model("llama")
    adapter = MaskedAttentionAdapter(model, "flex")
    twin = copy.deepcopy(model)  # its adapter stayed behind
    adapter.remove()
    assert model.config._attn_implementation == "sdpa"
    with MaskedAttentionAdapter(twin) as other:
        assert other.backend == "sdpa"
    assert twin.config._attn_implementation == "sdpa"


def test_a_cache_and_a_record_at_once_are_refused(layers):
    model = make_model("llama")
    ids, mask = ragged_prompts([14, 9], VOCAB)
    replay = Replay(ShadowMask.dense(2, 14, 3, 2), torch.tensor([0, 5]), torch.tensor([14, 9]), 14)
    with MaskedAttentionAdapter(model, "flex"), pytest.raises(ValueError, match="replayed without a cache"):
        model(ids, attention_mask=mask, cache=CompressedCache(model.config, "h2o", 6), **{REPLAY_ARGUMENT: replay})
    assert not layers


def test_rollouts_are_those_of_sdpa(layers):
    model = make_model("mistral")
    sampled = []
    for backend in ("sdpa", "flex"):
        with MaskedAttentionAdapter(model, backend):
            taken = sample(model, "h2o", 6, prompts=ragged_prompts([18, 11], VOCAB), new_tokens=6, evict_every=2)
        sampled.append(taken)
    assert not layers
    assert torch.equal(sampled[0].tokens, sampled[1].tokens)
    assert torch.equal(sampled[0].shadow.evicted_at, sampled[1].shadow.evicted_at)
