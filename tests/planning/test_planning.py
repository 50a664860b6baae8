"""Every number of a plan is what the library allocates: compared with measured bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import DeepseekV3Config, GPT2Config, LlamaConfig, Qwen3Config

from smdlib import (
    AdaptiveHeadAllocation,
    PyramidAllocation,
    SMDLoss,
    SparseActor,
    UnsupportedModelError,
    group_advantage,
)
from smdlib.cache import CompressedCache
from smdlib.masks import ShadowMaskRecorder
from smdlib.masks.shared import PromptPass
from smdlib.planning import human_bytes, plan_memory
from smdlib.planning.geometry import read_geometry
from smdlib.rollout import generation
from smdlib.testing import byte_tokenizer, tiny_model
from tests.families import make_model
from tests.rollout.actors import word_tokenizer

PROMPT, RESPONSE, GROUP, PROMPTS = 40, 12, 3, 2

QWEN3_4B = Qwen3Config(
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    hidden_size=2560,
    intermediate_size=9728,
    vocab_size=151936,
    dtype="bfloat16",
)


def tensors(thing: Any) -> list[Tensor]:
    return [value for value in vars(thing).values() if isinstance(value, Tensor)]


def measure(monkeypatch, actor: SparseActor, prompt: int = PROMPT, group: int = GROUP) -> tuple[dict[str, int], Any]:
    """Sample a batch, and return the bytes that live at the end of sampling."""
    made = {}

    def keep(kind):
        def make(*args, **kwargs):
            made[kind] = kind(*args, **kwargs)
            return made[kind]

        return make

    monkeypatch.setattr(generation, "CompressedCache", kept := type("Kept", (CompressedCache,), {}))
    init = kept.__init__

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made[CompressedCache] = self

    kept.__init__ = noted
    monkeypatch.setattr(generation, "ShadowMaskRecorder", keep(ShadowMaskRecorder))
    prompts = (torch.arange(prompt) + torch.arange(PROMPTS)[:, None]).remainder(90).repeat_interleave(group, 0)
    batch = actor(TensorDict({("tokens", "prompt"): prompts}, batch_size=[len(prompts)]))
    cache, recorder = made[CompressedCache], made[ShadowMaskRecorder]
    assert cache.growths == 0
    stored = sum(tensor.nbytes for layer in cache.layers for tensor in tensors(layer.slots))
    rings = sum(tensor.nbytes for layer in cache.layers if layer.queries for tensor in tensors(layer.queries))
    return {
        "kv_sparse": cache.kv_bytes(),
        "slots": stored + rings - cache.kv_bytes(),
        "record": sum(table.nbytes for table in recorder._layers) + sum(ids.nbytes for ids in recorder._ids),
        "mask": sum(row["shadow"].nbytes for row in batch.unbind(0)),
        "kv_row": int(batch[0]["kv_bytes"]),
    }, batch


def actor_of(policy, budget, *, model=None, tokenizer=None, response=RESPONSE, **options) -> SparseActor:
    return SparseActor(
        model or tiny_model(),
        tokenizer or byte_tokenizer(),
        policy=policy,
        budget=budget,
        generate_kwargs={"max_new_tokens": response, "eos_token_id": None},
        **options,
    )


def planned(actor: SparseActor, prompt: int = PROMPT, response: int = RESPONSE, group: int = GROUP, **options):
    eviction = actor.eviction
    if eviction is not None:
        options |= {"policy": eviction.policy, "allocation": eviction.allocation, "evict_every": eviction.evict_every}
    budget = 1.0 if eviction is None else eviction.budget
    return plan_memory(actor.model.config, prompt, response, group, budget, prompts=PROMPTS, **options)


def check_sampling(monkeypatch, actor, prompt=PROMPT, response=RESPONSE, group=GROUP, **options):
    measured, _ = measure(monkeypatch, actor, prompt, group)
    plan = planned(actor, prompt, response, group, **options)
    found = {name: getattr(plan, name) for name in ("kv_sparse", "slots", "record", "mask")}
    assert found == {name: measured[name] for name in found}
    assert plan.kv_sparse == measured["kv_row"] * group * PROMPTS


@pytest.mark.parametrize("evict_every", [None, 1, 5, 40])
@pytest.mark.parametrize("budget", [0.4, 7, 64])
@pytest.mark.parametrize("policy", ["streaming", "snapkv", "h2o"])
def test_sampling_takes_what_was_planned(monkeypatch, policy, budget, evict_every):
    check_sampling(monkeypatch, actor_of(policy, budget, evict_every=evict_every))


def test_pyramid_budgets_are_planned_layer_by_layer(monkeypatch):
    model = tiny_model(num_hidden_layers=4)
    actor = actor_of("h2o", 0.5, model=model, allocation=PyramidAllocation(), evict_every=3)
    check_sampling(monkeypatch, actor)
    assert planned(actor).budgets == (39, 26, 14, 1)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3", "gpt2"])
def test_other_families(monkeypatch, family):
    check_sampling(monkeypatch, actor_of("snapkv", 0.5, model=make_model(family), tokenizer=word_tokenizer()))


def test_bfloat16_halves_the_keys(monkeypatch):
    model = tiny_model().to(torch.bfloat16)
    check_sampling(monkeypatch, actor_of("snapkv", 0.5, model=model), dtype="bfloat16")


def test_a_prompt_of_one_token(monkeypatch):
    check_sampling(monkeypatch, actor_of("streaming", 4, evict_every=2), prompt=1, group=1)


@pytest.mark.parametrize(("budget", "evict_every"), [(8, 30), (300, 297)], ids=["often", "just below the budget"])
def test_tables_of_long_responses_grow_as_planned(monkeypatch, budget, evict_every):
    """The recorder's tables hold 256 columns more than at the last eviction, or half as many again."""
    actor = actor_of("streaming", budget, response=310, evict_every=evict_every)
    check_sampling(monkeypatch, actor, prompt=3, response=310)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_dense_sampling_takes_what_was_planned(family):
    """Layers with a sliding window hold no more than that, also without smdlib."""
    actor = actor_of(None, None, model=make_model(family), tokenizer=word_tokenizer())
    prompts = torch.arange(PROMPT).repeat(PROMPTS * GROUP, 1)
    batch = actor(TensorDict({("tokens", "prompt"): prompts}, batch_size=[len(prompts)]))
    assert planned(actor).kv_dense == sum(int(row["kv_bytes"]) for row in batch.unbind(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_learner_takes_what_was_planned(monkeypatch, dtype):
    actor = actor_of("snapkv", 0.5, model=tiny_model().to(dtype))
    _, batch = measure(monkeypatch, actor)
    batch["advantage"] = group_advantage(torch.randn(len(batch)), GROUP)[:, None]
    seen: dict[str, int] = {"states": 0}
    seal, states_of = PromptPass.seal, SparseActor.response_states

    def sealed(self):
        seal(self)
        seen["prompt_kv"] = sum(part.nbytes for part in (*self.keys.values(), *self.values.values()))

    def states(self, *args):
        found = states_of(self, *args)
        seen["states"] += sum(state.nbytes for state in found[0])
        return found

    monkeypatch.setattr(PromptPass, "seal", sealed)
    monkeypatch.setattr(SparseActor, "response_states", states)
    SMDLoss(actor)(batch)
    tokens = torch.stack([row["tokens", "full"] for row in batch.unbind(0)])
    plan = planned(actor, dtype=dtype)
    assert (plan.prompt_kv, plan.states) == (seen["prompt_kv"], seen["states"])
    assert plan.logits_full == actor.model(tokens).logits.nbytes
    assert plan.mask == sum(row["shadow"].nbytes for row in batch.unbind(0))


@pytest.mark.parametrize("tokens", [6, 700, 5000])
def test_a_block_of_logits_is_what_the_fused_head_makes(monkeypatch, tokens):
    from smdlib.losses import fused_head, linear_log_probs

    vocabulary, made = 3000, []
    logits = fused_head._Blocks.logits
    monkeypatch.setattr(fused_head._Blocks, "logits", lambda *args: made.append(logits(*args)) or made[-1])
    linear_log_probs(torch.zeros(tokens, 4), torch.zeros(vocabulary, 4), torch.zeros(tokens, dtype=torch.int64))
    plan = plan_memory(LlamaConfig(vocab_size=vocabulary), prompt=9, response=tokens, group=1, budget=4)
    assert plan.logits_block == max(part.nbytes for part in made)


# --- configurations alone


def test_qwen3_4b_by_hand():
    """36 layers, 8 KV heads of 128 in bf16: 147,456 bytes a token."""
    plan = plan_memory(QWEN3_4B, prompt=8192, response=1024, group=8, budget=0.25, policy="snapkv")
    token = 36 * 8 * 128 * 2 * 2
    assert token == 147456
    assert plan.kv_dense == 8 * (8192 + 1023) * token
    assert plan.kv_sparse == 8 * (2048 + 1024) * token
    assert plan.mask == 8 * (8192 + 1024) * 36 * 8 * 4
    assert plan.mask / (8 * (8192 + 1024) * token) == pytest.approx(0.0078, abs=1e-4)  # 0.8 % of the KV cache
    assert plan.logits_full == 8 * (8192 + 1024) * 151936 * 2
    assert plan.prompt_kv == 8191 * token
    assert plan.states == 2 * 8 * 1024 * 2560 * 2


def test_the_text_reads():
    text = str(plan_memory(QWEN3_4B, prompt=8192, response=1024, group=8, budget=0.25))
    assert text.startswith("8 rows of 9216 tokens, 2048 keys per KV head\n")
    assert "keys and values" in text and "10.9 GB    3.62 GB" in text
    assert "padding" not in text, "a line without bytes is left out"


def test_gpt2_names_its_sizes_otherwise():
    sizes = read_geometry(GPT2Config())
    assert (sizes.layers, sizes.kv_heads, sizes.head_size, sizes.hidden, sizes.vocabulary) == (12, 12, 64, 768, 50257)
    assert sizes.dtype == torch.float32


@pytest.mark.parametrize("evict_every", [None, 3])
def test_heads_that_win_their_budgets_stay_within_the_padding(monkeypatch, evict_every):
    model = tiny_model(num_attention_heads=8, num_key_value_heads=8)
    actor = actor_of("snapkv", 0.5, model=model, allocation=AdaptiveHeadAllocation(), evict_every=evict_every)
    measured, _ = measure(monkeypatch, actor)
    plan = planned(actor)
    assert plan.kv_sparse <= measured["kv_sparse"] <= plan.kv_sparse + plan.kv_padding
    assert plan.mask == measured["mask"]


def test_heads_that_win_their_budgets_may_be_padded():
    class ByScores:
        def __call__(self, budget, layers, heads):
            return budget[None, :, None].repeat(layers, 1, heads)

        def from_scores(self, scores, positions, budget):
            return budget

    config = LlamaConfig()
    plan = plan_memory(config, 64, 16, 2, 0.5, allocation=ByScores())
    uniform = plan_memory(config, 64, 16, 2, 0.5)
    assert (plan.kv_sparse, plan.kv_padding) == (uniform.kv_sparse, uniform.kv_sparse // 4)
    assert "padding of unequal heads" in str(plan) and uniform.kv_padding == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": 0}, "prompt is 0"),
        ({"response": 1.5}, r"response is 1\.5"),
        ({"group": True}, "group is True"),
        ({"prompts": -1}, "prompts is -1"),
        ({"evict_every": 0}, "evict_every is 0"),
        ({"budget": 1.5}, r"budget is 1\.5, expected a share"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"dtype": "brainfloat"}, "dtype is 'brainfloat'"),
        ({"policy": "snapk"}, "unknown policy 'snapk'"),
    ],
)
def test_numbers_out_of_range_are_refused(change, message):
    settings = {"prompt": 16, "response": 4, "group": 2, "budget": 0.5} | change
    with pytest.raises(ValueError, match=message):
        plan_memory(LlamaConfig(), **settings)


def test_an_architecture_that_cannot_be_replayed_is_refused():
    with pytest.raises(UnsupportedModelError, match="multi-head latent attention"):
        plan_memory(DeepseekV3Config(), 16, 4, 2, 0.5)


def test_bytes_as_people_read_them():
    counts = [0, 999, 1000, 12_345, 999_400, 10**9, 123 * 10**9, 5 * 10**15]
    expected = ["0 B", "999 B", "1.00 kB", "12.3 kB", "999 kB", "1.00 GB", "123 GB", "5000 TB"]
    assert [human_bytes(count) for count in counts] == expected
