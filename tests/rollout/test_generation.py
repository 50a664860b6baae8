"""How rows are sampled: one prefill per distinct prompt, the right distribution, and a model that is left as it was."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, StoppingCriteria

from smdlib.rollout import generation
from smdlib.rollout.generation import evaluation_mode
from tests.families import VOCAB, make_model
from tests.rollout.actors import byte_actor, gaps, make_actor, make_prompts, run


def count_forwards(model):
    """``(rows, columns)`` of every forward pass from now on."""
    shapes = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


@pytest.mark.parametrize("policy", [None, "streaming"])
@pytest.mark.parametrize("order", ["AAABBB", "ABABAB", "ABBA", "BA", "AAAA", "ABCACB", "AoBo", "oooA", "oA"])
def test_one_prefill_per_distinct_prompt(order, policy):
    """In any order; all but a prompt's last token at once. ``o`` has one token, and nothing to prefill."""
    prompts = dict(zip("ABCo", make_prompts(14, 9, 11, 1), strict=True))
    actor = make_actor(policy=policy)
    shapes = count_forwards(actor.model)
    rows = run(actor, [prompts[name] for name in order])
    width = max(len(prompts[name]) for name in order)
    assert shapes == [(len(set(order)), width - 1), *[(len(order), 1)] * 6]
    for row, name in zip(rows, order, strict=True):
        assert torch.equal(row["tokens", "prompt"], prompts[name])
        assert gaps(actor, row)[0] < 1e-4
    for first, second in itertools.combinations(rows, 2):  # the samples of a prompt are different ones
        assert not torch.equal(first["tokens", "response"], second["tokens", "response"])


@pytest.mark.parametrize("policy", [None, "snapkv"])
def test_prompts_of_one_token_only(policy):
    actor = make_actor(policy=policy)
    shapes = count_forwards(actor.model)
    first, second = make_prompts(1, 1)
    rows = run(actor, [first, second, first])
    assert shapes == [(3, 1)] * 6
    assert all(gaps(actor, row)[0] < 1e-4 for row in rows)


@pytest.mark.parametrize("policy", [None, "h2o"])
@pytest.mark.parametrize("lengths", [(9,), (1,), (9, 4)])
def test_one_new_token(lengths, policy):
    actor = make_actor(policy=policy, max_new_tokens=1)
    for row, size in zip(run(actor, make_prompts(*lengths)), lengths, strict=True):
        assert row["log_probs", "full"].isfinite().tolist() == [False] * size + [True]
        assert row["shadow"].num_tokens == size + 1 and gaps(actor, row)[0] < 1e-4


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.8])
def test_draws_are_of_the_full_softmax(temperature):
    """The same seed draws the same tokens from softmax(logits / temperature), logits of plain uncached passes."""
    prompts = make_prompts(9, 4, 9)
    rows = run(make_actor(policy=None, temperature=temperature, max_new_tokens=12), prompts, seed=5)
    plain = make_model("llama")
    sequences = list(prompts)
    torch.manual_seed(5)
    for _ in range(12):
        with torch.no_grad():
            logits = torch.stack([plain(one[None]).logits[0, -1] for one in sequences])
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1)
        sequences = [torch.cat([one, token]) for one, token in zip(sequences, drawn, strict=True)]
    assert [row["tokens", "full"].tolist() for row in rows] == [one.tolist() for one in sequences]


def test_greedy_takes_the_largest():
    (row,) = run(make_actor(policy=None, do_sample=False), make_prompts(9))
    plain, sequence = make_model("llama"), make_prompts(9)[0]
    for _ in range(6):
        with torch.no_grad():
            sequence = torch.cat([sequence, plain(sequence[None]).logits[0, -1].argmax()[None]])
    assert torch.equal(row["tokens", "full"], sequence)


OWN = {
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.3,
    "temperature": 0.6,
    "repetition_penalty": 1.5,
    "suppress_tokens": list(range(20, 90)),
    "no_repeat_ngram_size": 1,
    "min_new_tokens": 20,
    "max_new_tokens": 2,
    "num_beams": 2,
    "typical_p": 0.5,
    "bad_words_ids": [[30]],
    "do_sample": False,
    "cache_implementation": "static",
    "eos_token_id": 96,
    "stop_strings": ["w"],
    "return_dict_in_generate": True,
    "output_logits": True,
}


@pytest.mark.parametrize("policy", [None, "h2o"])
def test_the_models_own_generation_config_does_not_leak_in(policy):
    prompts = make_prompts(9, 4)
    expected = run(make_actor(policy=policy), prompts)
    model = make_model("llama")
    own = GenerationConfig(**OWN)
    model.generation_config = own
    actor = make_actor(model=model, policy=policy)
    for row, other in zip(run(actor, prompts), expected, strict=True):
        assert torch.equal(row["tokens", "full"], other["tokens", "full"])
        assert torch.equal(row["log_probs", "response"], other["log_probs", "response"])
    assert model.generation_config is own and own.to_diff_dict().items() >= OWN.items()


class Boom(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise RuntimeError("boom")


def test_an_exception_restores_the_model():
    model = make_model("llama")
    actor = make_actor(model=model, stopping_criteria=[Boom()])
    own = model.generation_config
    actor.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    with pytest.raises(RuntimeError, match="boom"):
        run(actor, make_prompts(5))
    assert model.generation_config is own
    assert [module.training for module in model.modules()] == modes and len(set(modes)) == 2


def test_train_mode_and_activation_checkpointing():
    """Both would drop the cache; sampling is in eval mode, and every module's own mode comes back."""
    prompts = make_prompts(9, 4, 9, vocab=250)
    expected = run(byte_actor(), prompts)
    actor = byte_actor()
    actor.model.activation_checkpointing_enable()
    actor.train()
    actor.model.model.layers[0].eval()  # frozen
    modes = [module.training for module in actor.modules()]
    for row, other in zip(run(actor, prompts), expected, strict=True):
        assert torch.equal(row["tokens", "full"], other["tokens", "full"])
        assert gaps(actor, row)[0] < 1e-4
    assert [module.training for module in actor.modules()] == modes and len(set(modes)) == 2
    assert all(layer.gradient_checkpointing for layer in actor.model.model.layers)


def test_dropout_is_off_while_sampling_and_refused_while_scoring():
    expected = run(make_actor("gpt2"), make_prompts(9, 4))
    actor = make_actor("gpt2")
    actor.train()
    rows = run(actor, make_prompts(9, 4))
    for row, other in zip(rows, expected, strict=True):
        assert torch.equal(row["log_probs", "response"], other["log_probs", "response"])
    with pytest.raises(ValueError, match=r"scoring in train mode with dropout .*Call model.eval\(\)"):
        gaps(actor, rows[0])
    actor.eval()
    assert gaps(actor, rows[0])[0] < 1e-4


def test_evaluation_mode_restores_every_module():
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1))).train()
    model[1][0].eval()
    modes = [module.training for module in model.modules()]
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes


def test_seeds():
    actor = make_actor("mistral", "random", evict_every=2)
    prompts = make_prompts(14, 9, 14)
    first, again, other = run(actor, prompts, seed=3), run(actor, prompts, seed=3), run(actor, prompts, seed=4)
    for one, same, different in zip(first, again, other, strict=True):
        assert torch.equal(one["tokens", "full"], same["tokens", "full"])
        assert torch.equal(one["log_probs", "response"], same["log_probs", "response"])
        assert torch.equal(one["shadow"].evicted_at, same["shadow"].evicted_at)
        assert not torch.equal(one["tokens", "full"], different["tokens", "full"])


def test_weights_and_gradients_are_left_alone():
    actor = make_actor()
    actor.model.model.embed_tokens.weight.requires_grad_(False)
    prompts = make_prompts(9, 4)
    loss = actor.log_probs(prompts[0][None])[0, 1:].sum()
    loss.backward()
    before = {
        name: (one.detach().clone(), one.requires_grad, None if one.grad is None else one.grad.clone())
        for name, one in actor.named_parameters()
    }
    recording = []
    actor.model.model.register_forward_hook(lambda *_: recording.append(torch.is_grad_enabled()))
    rows = run(actor, prompts)
    assert recording == [False] * 7  # the prefill, too
    for name, one in actor.named_parameters():
        value, wanted, gradient = before[name]
        assert torch.equal(one, value) and one.requires_grad == wanted
        assert (gradient is None and one.grad is None) or torch.equal(one.grad, gradient)
    assert all(not row["log_probs", "full"].requires_grad for row in rows)
    assert torch.is_grad_enabled()


def test_the_cache_is_as_large_as_it_has_to_be(monkeypatch):
    """Budget and response, allocated once; the cache is gone with the call."""
    caches = []

    class Spy(generation.CompressedCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            caches.append(self)

    actors = [make_actor(budget=5, evict_every=every, max_new_tokens=9) for every in (None, 3)]
    monkeypatch.setattr(generation, "CompressedCache", Spy)
    for actor, slots in zip(actors, (5 + 9, 5 + 3), strict=True):
        rows = run(actor, make_prompts(20, 9, 20, 30))
        assert caches[-1].growths == 0
        assert sum(row["kv_bytes"].item() for row in rows) == caches[-1].kv_bytes() == 4 * 3 * 2 * slots * 2 * 12 * 4


def test_dense_sampling_uses_the_models_own_cache(monkeypatch):
    made = []

    class Spy(DynamicCache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(generation, "DynamicCache", Spy)
    rows = run(make_actor("mistral", None, max_new_tokens=4), make_prompts(20, 9))
    # A sliding window of 12 keeps 11 keys for the next token.
    assert [layer.keys.shape[2] for layer in made[0].layers] == [11] * 3
    assert rows[0]["kv_bytes"].item() == 3 * 2 * 11 * 2 * 12 * 4


def test_padding_tokens_the_model_does_not_know():
    """Tokenizers often have a padding token beyond the model's vocabulary."""
    actor = make_actor(eos_token_id=[10**6, 40])
    actor.tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert actor.tokenizer.pad_token_id == VOCAB
    other = make_actor(tokenizer=actor.tokenizer, eos_token_id=[10**6, 40], max_new_tokens=20)
    rows = run(other, make_prompts(9, 4, 5))
    assert all(gaps(other, row)[0] < 1e-4 for row in rows)
