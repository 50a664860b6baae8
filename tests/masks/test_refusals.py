"""What cannot be exact is refused, in words that say why."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from transformers.models.llama import modeling_llama as llama

from smdlib import (
    NEVER,
    CompressedCache,
    MaskedAttentionAdapter,
    PolicyError,
    ShadowMask,
    ShadowMaskRecorder,
    UnsupportedModelError,
)
from tests.families import VOCAB, make_model
from tests.sampling import parity, ragged_prompts, sample

GENERATE = {"max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": VOCAB + 1}


@pytest.fixture
def model():
    return make_model("llama")


@pytest.fixture
def adapter(model):
    return MaskedAttentionAdapter(model)


@pytest.fixture
def prompts():
    return ragged_prompts([14, 9], VOCAB)


def streaming(model, budget=6, **options):
    return CompressedCache(model.config, "streaming", budget, **options)


# --- decoding that is not sampling


def test_beam_search(model, adapter, prompts):
    ids, mask = prompts
    with pytest.raises(ValueError, match=r"beam search swaps the pasts of rows.*Use num_beams=1"):
        model.generate(ids, attention_mask=mask, cache=streaming(model), num_beams=2, do_sample=False, **GENERATE)


@pytest.mark.parametrize("kind", ["assistant_model", "prompt_lookup_num_tokens"])
def test_assisted_decoding(model, adapter, prompts, kind):
    helper = {"assistant_model": make_model("llama", seed=1)} if kind == "assistant_model" else {kind: 2}
    with pytest.raises(ValueError, match="requires a cache that can be cropped"):
        model.generate(prompts[0][:1], cache=streaming(model), **helper, **GENERATE)


def test_crop(model, adapter, prompts):
    cache = streaming(model)
    with torch.no_grad():
        model(prompts[0], cache=cache)
    with pytest.raises(ValueError, match=r"cannot be cropped: keys that were evicted meanwhile would have to return"):
        cache.crop(-1)


def test_copies_of_rows_that_have_generators(model, adapter, prompts):
    cache = CompressedCache(model.config, "random", 6, generators=[torch.Generator(), torch.Generator()])
    with torch.no_grad():
        model(prompts[0], cache=cache)
    for change in (lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices(torch.tensor([0]))):
        with pytest.raises(ValueError, match="copies of a generator would draw the same numbers"):
            change()


# --- architectures


SMALL = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LATENT = r"uses multi-head latent attention \(kv_lora_rank=\d+\).*a mask per KV head does not describe it"
LINEAR = r"mixes in linear-attention or state-space layers \[.*{}.*\]: their state cannot forget one key"
CONFIGS = {
    "DeepseekV3Config": ({}, LATENT),
    "DeepseekV2Config": ({}, LATENT),
    "Qwen3NextConfig": ({}, LINEAR.format("'linear_attention'")),
    "JambaConfig": ({}, LINEAR.format("'linear_attention'")),
    "Lfm2Config": ({"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, LINEAR.format("'conv'")),
    "FalconH1Config": ({}, LINEAR.format("'hybrid'")),
    "MambaConfig": ({}, LINEAR.format("'linear_attention'")),
    "T5Config": ({}, "is an encoder-decoder model; smdlib evicts keys of decoder-only models"),
    "BartConfig": ({}, "is an encoder-decoder model"),
    "Gemma3nTextConfig": ({}, r"shares keys between layers \(num_kv_shared_layers=15\)"),
    "DeepseekV4Config": ({}, r"mixes in unknown layers \["),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_architectures_without_an_exact_mask(name):
    if not hasattr(hf, name):
        pytest.skip(f"transformers {hf.__version__} has no {name}")
    options, message = CONFIGS[name]
    with pytest.raises(UnsupportedModelError, match=f"^{name} {message}"):
        CompressedCache(getattr(hf, name)(**options), "streaming", 6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: hf.T5ForConditionalGeneration(hf.T5Config(**SMALL, d_model=32, d_kv=16, d_ff=32, num_layers=2)),
            "encoder",
        ),
        (lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])), "conv"),
        (
            lambda: hf.DeepseekV2ForCausalLM(
                hf.DeepseekV2Config(
                    **SMALL, intermediate_size=32, n_routed_experts=2, num_experts_per_tok=1, first_k_dense_replace=2
                )
            ),
            "latent",
        ),
        (
            lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=32, hidden_size=32, n_layer=2, n_head=2)),
            "AttentionInterface",
        ),
        (
            lambda: hf.MptForCausalLM(hf.MptConfig(vocab_size=32, d_model=32, n_layers=2, n_heads=2)),
            "AttentionInterface",
        ),
    ],
    ids=["t5", "lfm2", "deepseek_v2", "bloom", "mpt"],
)
def test_models_without_an_exact_mask_get_no_adapter(build, message):
    model = build()
    previous = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=message):
        MaskedAttentionAdapter(model)
    assert model.config._attn_implementation == previous


def test_a_key_and_a_value_of_unequal_shapes(model):
    with pytest.raises(UnsupportedModelError, match=r"keys \(1, 2, 3, 4\) and values \(1, 2, 3, 8\) of unequal shapes"):
        streaming(model).update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 8), 0)


def test_a_model_that_attends_twice_to_the_keys_of_a_step(prompts):
    model = hf.DiffLlamaForCausalLM(hf.DiffLlamaConfig(**SMALL | {"vocab_size": VOCAB}, intermediate_size=32)).eval()
    with (
        MaskedAttentionAdapter(model),
        pytest.raises(UnsupportedModelError, match="more than once to the keys of one step"),
    ):
        model(prompts[0], cache=streaming(model))


def test_a_model_that_computes_with_its_mask(prompts):
    config = hf.DogeConfig(**SMALL | {"vocab_size": VOCAB}, intermediate_size=32)
    model = hf.DogeForCausalLM(config).eval()
    with MaskedAttentionAdapter(model), pytest.raises(AttributeError, match="computes with its mask on the way"):
        model(prompts[0], attention_mask=prompts[1])


# --- attention back-ends


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention", "paged|sdpa"])
def test_models_loaded_with_a_backend_that_takes_no_mask(model, implementation):
    model.config._attn_implementation_internal = implementation  # as loading it would have, with the kernels at hand
    message = (
        rf"loaded with attn_implementation='{implementation.replace('|', '.')}', which cannot take a mask per KV head"
    )
    with pytest.raises(ValueError, match=message):
        MaskedAttentionAdapter(model)


@pytest.mark.parametrize("backend", ["flash_attention_2", "flex_attention", "SDPA"])
def test_backends_that_take_no_mask(model, backend):
    with pytest.raises(
        ValueError, match=f"backend '{backend}' cannot take one mask per KV head; use 'auto', 'sdpa', 'eager' or 'flex'"
    ):
        MaskedAttentionAdapter(model, backend=backend)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_fused_attention_for_soft_capping_or_sinks(family, backend, prompts):
    model = make_model(family)
    with (
        MaskedAttentionAdapter(model, backend=backend) as adapter,
        pytest.raises(
            ValueError, match=r"which fused attention cannot compute; install the adapter with backend='eager'"
        ),
    ):
        adapter.log_probs(*prompts)


def test_something_that_is_no_model():
    with pytest.raises(TypeError, match="must be a transformers model, not Linear"):
        MaskedAttentionAdapter(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"must be a transformers configuration such as model\.config, not dict"):
        CompressedCache({}, "streaming", 6)


# --- a cache that nobody evicts from


def test_a_cache_without_an_adapter(model, prompts):
    ids, mask = prompts
    with pytest.raises(RuntimeError, match=r"attended to without a MaskedAttentionAdapter\. Install one first"):
        model.generate(ids, attention_mask=mask, cache=streaming(model), **GENERATE)


@pytest.mark.parametrize("with_mask", [True, False])
def test_a_cache_without_an_adapter_in_a_model_of_one_layer(prompts, with_mask):
    config = hf.LlamaConfig(**SMALL | {"vocab_size": VOCAB, "num_hidden_layers": 1}, intermediate_size=32)
    model, cache = hf.LlamaForCausalLM(config).eval(), CompressedCache(config, "streaming", 6)
    ids, mask = prompts
    model(ids[:, :8], attention_mask=mask[:, :8] if with_mask else None, cache=cache)
    with pytest.raises(RuntimeError, match="layer 0 of a CompressedCache was attended to without"):
        model(ids[:, 8:9], attention_mask=mask[:, :9] if with_mask else None, cache=cache)


def test_a_cache_whose_adapter_was_removed(model, adapter, prompts):
    cache = streaming(model)
    with torch.no_grad():
        model(prompts[0], cache=cache)
        adapter.remove()
        model(prompts[0][:, :1], cache=cache)
        with pytest.raises(RuntimeError, match="keep it installed while the cache is in use"):
            model(prompts[0][:, :1], cache=cache)
        with pytest.raises(RuntimeError, match="without a MaskedAttentionAdapter"):
            cache.batch_repeat_interleave(2)


@pytest.mark.parametrize(("prompt", "with_mask"), [(9, True), (9, False), (1, True)])
def test_a_cache_that_gradient_checkpointing_drops(model, adapter, prompt, with_mask):
    """With gradients, transformers drops a cache in train mode; the next call must not sample from nothing."""
    model.train()
    model.activation_checkpointing_enable()
    recorder = ShadowMaskRecorder()
    cache, ids = streaming(model, recorder=recorder), ragged_prompts([prompt + 1], VOCAB)[0]
    masks = [torch.ones(1, prompt), torch.ones(1, prompt + 1)] if with_mask else [None, None]
    model(ids[:, :prompt], attention_mask=masks[0], cache=cache)
    with pytest.raises(RuntimeError, match="nothing recorded yet"):
        recorder.shadow_mask()
    message = r"the model dropped (the cache|it)[.:] [Gg]radient checkpointing in train mode does that"
    with pytest.raises(ValueError if with_mask else RuntimeError, match=message):
        model(ids[:, prompt:], attention_mask=masks[1], cache=cache)


def test_sampling_in_train_mode_with_checkpointing_is_exact_without_gradients(model, adapter, prompts):
    model.train()
    model.activation_checkpointing_enable()
    taken = sample(model, "streaming", 6, prompts=prompts, new_tokens=6, evict_every=1)
    assert (taken.shadow.evicted_at < NEVER).any()
    shadow, dense = parity(model, adapter, taken)
    assert shadow < 1e-4 < 1e-2 < dense


# --- randomness


@pytest.mark.parametrize("rate", ["attn_pdrop", "embd_pdrop", "resid_pdrop"])
def test_case_23_dropout_in_train_mode(prompts, rate):
    ids, mask = prompts
    config = hf.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0) | {rate: 0.1},
    )
    model = hf.GPT2LMHeadModel(config).eval()
    adapter = MaskedAttentionAdapter(model)
    adapter.log_probs(ids, mask)
    model.train()
    message = rf"in train mode with dropout \(\{{'{rate}': 0\.1\}}\) cannot be repeated exactly.*Call model\.eval\(\)"
    with pytest.raises(ValueError, match="sampling " + message):
        model.generate(ids, attention_mask=mask, cache=streaming(model), **GENERATE)
    with pytest.raises(ValueError, match="scoring " + message):
        adapter.log_probs(ids, mask)
    with pytest.raises(ValueError, match="scoring " + message):
        adapter.log_probs(ids, mask, ShadowMask.dense(2, 14, 2, 2))
    model(ids, attention_mask=mask)  # not ours to judge


def test_case_23_without_dropout_train_mode_is_exact(prompts):
    config = hf.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    model = hf.GPT2LMHeadModel(config).train()  # the dropouts of its heads for other tasks do not matter
    adapter = MaskedAttentionAdapter(model)
    taken = sample(model, "streaming", 6, prompts=prompts, new_tokens=6, evict_every=1)
    assert parity(model, adapter, taken)[0] < 1e-4


# --- masks of the caller


def test_a_4d_mask_in_a_rollout(model, adapter, prompts):
    own = torch.ones(2, 1, 14, 14).tril().bool()
    with pytest.raises(
        ValueError, match=r"LlamaAttention \(layer 0\) got a mask of type Tensor .*Pass a 2D attention_mask"
    ):
        model(prompts[0], attention_mask=own, cache=streaming(model))


def test_a_4d_mask_in_a_replay(adapter, prompts):
    own = torch.ones(2, 1, 14, 14).tril().bool()
    for shadow in (None, ShadowMask.dense(2, 14, 3, 2)):
        with pytest.raises(
            ValueError, match=r"attention_mask \(2, 1, 14, 14\) and input_ids \(2, 14\) differ in shape"
        ):
            adapter.log_probs(prompts[0], own, shadow)


@pytest.mark.parametrize("kind", ["right padding", "a hole"])
def test_padding_that_a_cache_cannot_continue(model, adapter, prompts, kind):
    ids, mask = prompts
    mask = mask.flip(1) if kind == "right padding" else mask.index_fill(1, torch.tensor([7]), 0)
    with pytest.raises(ValueError, match=r"needs left padding: attention_mask must be zeros followed by ones"):
        model.generate(ids, attention_mask=mask, cache=streaming(model), **GENERATE)


def test_an_attention_mask_of_the_new_tokens_only(model, adapter, prompts):
    cache = streaming(model)
    with torch.no_grad():
        model(prompts[0], cache=cache)
    with pytest.raises(ValueError, match="covers 1 columns, but the cache and the new tokens are 15"):
        model(prompts[0][:, :1], attention_mask=torch.ones(2, 1), cache=cache)


@pytest.mark.parametrize("kind", ["a hole", "an empty row"])
def test_rows_without_positions_in_a_replay(adapter, prompts, kind):
    ids, mask = prompts
    mask = mask.clone()
    if kind == "a hole":
        mask[0, 4] = 0
    else:
        mask[1] = 0
    with pytest.raises(
        ValueError, match=r"one contiguous run of real tokens in every row.*holes in the middle and empty rows"
    ):
        adapter.log_probs(ids, mask)


def test_input_ids_of_one_row_without_batch(adapter):
    with pytest.raises(ValueError, match=r"input_ids must be \[B, T\], not of shape \(5,\)"):
        adapter.log_probs(torch.arange(5))


# --- records


def wrong(evicted_at):
    return ShadowMask(evicted_at=evicted_at, batch_size=evicted_at.shape[:-3])


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (
            ShadowMask.dense(2, 12, 3, 2),
            ValueError,
            r"covers 12 tokens, but the longest row has 14 tokens in 14 columns",
        ),
        (ShadowMask.dense(2, 15, 3, 2), ValueError, r"covers 15 tokens, .* Expected 14 \(or 13: .*\), up to 14"),
        (
            ShadowMask.dense(2, 14, 2, 2),
            ValueError,
            r"has 2 layers and 2 KV heads, the model has 3 and 2.*another model",
        ),
        (ShadowMask.dense(2, 14, 3, 4), ValueError, r"has 3 layers and 4 KV heads, the model has 3 and 2"),
        (ShadowMask.dense(3, 14, 3, 2), ValueError, r"of shape \(3, 14, 3, 2\) does not fit 2 rows"),
        (ShadowMask.dense(14, 3, 2), ValueError, r"of shape \(14, 3, 2\) does not fit 2 rows; expected \[B, T, L, H\]"),
        (ShadowMask.dense(1, 2, 14, 3, 2), ValueError, r"does not fit 2 rows"),
        (
            torch.full((2, 14, 3, 2), NEVER, dtype=torch.int32),
            TypeError,
            "shadow_mask must be a ShadowMask, not Tensor",
        ),
        (wrong(torch.full((2, 14, 3, 2), NEVER)), ValueError, r"must be int32 .*, not torch\.int64"),
        (wrong(torch.zeros(2, 14, 3, 2, dtype=torch.int32)), ValueError, "a key is gone before its own query"),
    ],
)
def test_records_that_do_not_fit(adapter, prompts, mask, error, message):
    with pytest.raises(error, match=message):
        adapter.log_probs(*prompts, mask)


def test_a_record_without_the_last_token_fits(adapter, prompts):
    dense = adapter.log_probs(*prompts)
    masked = adapter.log_probs(*prompts, ShadowMask.dense(2, 13, 3, 2))
    torch.testing.assert_close(masked, dense, atol=1e-5, rtol=0, equal_nan=True)


class DeafLayer(llama.LlamaDecoderLayer):
    """Hands attention what it knows, and drops the rest."""

    def forward(
        self, hidden_states, attention_mask=None, position_ids=None, cache=None, position_embeddings=None, **kwargs
    ):
        return super().forward(
            hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            position_embeddings=position_embeddings,
        )


class DeafLlama(hf.LlamaForCausalLM):
    """A model whose layers drop extra keyword arguments."""

    def __init__(self, config, deaf=None):
        super().__init__(config)
        for index in range(config.num_hidden_layers) if deaf is None else deaf:
            layer = self.model.layers[index]
            self.model.layers[index] = DeafLayer(config, index)
            self.model.layers[index].load_state_dict(layer.state_dict())


@pytest.mark.parametrize(("deaf", "named"), [(None, r"\[0, 1, 2\]"), ([1], r"\[1\]")])
def test_a_model_that_drops_extra_arguments_samples_but_is_not_replayed(prompts, deaf, named):
    torch.manual_seed(0)
    model = DeafLlama(
        make_model("llama").config.__class__(**SMALL | {"vocab_size": VOCAB, "num_hidden_layers": 3}), deaf
    ).eval()
    adapter = MaskedAttentionAdapter(model)
    adapter.log_probs(*prompts)  # dense needs nothing handed down
    taken = sample(model, "streaming", 6, prompts=prompts, new_tokens=4)
    with pytest.raises(UnsupportedModelError, match=rf"layers {named} of DeafLlama ran without the shadow mask"):
        adapter.log_probs(taken.tokens, taken.attention_mask, taken.shadow)


def test_a_cache_and_a_record_at_once(model, adapter, prompts):
    from smdlib.masks.attention import REPLAY_ARGUMENT
    from smdlib.masks.replay import Replay

    ids, mask = prompts
    replay = Replay(ShadowMask.dense(2, 14, 3, 2), torch.tensor([0, 5]), torch.tensor([14, 9]), 14)
    with pytest.raises(ValueError, match="replayed without a cache; pass either a CompressedCache or a record"):
        model(ids, attention_mask=mask, cache=streaming(model), **{REPLAY_ARGUMENT: replay})


# --- policies of third parties


class Broken:
    """Scores by position, spoilt; from the second layer on, so that the message has a layer to name."""

    def __init__(self, spoil):
        self.spoil = spoil

    def score(self, view):
        scores = view.positions.float()
        return self.spoil(scores) if view.layer_idx else scores


@pytest.mark.parametrize("evict_every", [None, 1])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda scores: scores.masked_fill(scores == 3, torch.nan),
            "keys score NaN, expected a number; the first is position 3",
        ),
        (lambda scores: scores.mean(1), r"scores have shape \[2, 14\], expected \[B, H, K\] = \[2, 2, 14\]"),
        (lambda scores: scores.double(), "scores are torch.float64, expected torch.float32"),
        (
            lambda scores: scores.masked_fill(scores < 11, -torch.inf),
            r"3 keys of row 0, KV head 0 score above -inf, expected at least 6",
        ),
        (lambda scores: scores.tolist(), "score returned list, expected a tensor"),
    ],
    ids=["nan", "shape", "dtype", "too few", "type"],
)
def test_a_broken_policy_is_named_with_its_layer(model, adapter, prompts, spoil, message, evict_every):
    ids, mask = prompts
    cache = CompressedCache(model.config, Broken(spoil), 6, evict_every=evict_every)
    with pytest.raises(PolicyError, match=f"policy Broken at layer 1: .*{message}"):
        model.generate(ids, attention_mask=mask, cache=cache, **GENERATE)


def test_a_policy_that_breaks_while_decoding(model, adapter, prompts):
    ids, mask = prompts

    class BreaksLater:
        def score(self, view):
            late = int(view.seen.max()) > 16 and view.layer_idx == 2
            return torch.full_like(view.positions, torch.nan, dtype=torch.float32) if late else view.positions.float()

    cache = CompressedCache(model.config, BreaksLater(), 6, evict_every=1)
    with pytest.raises(PolicyError, match=r"policy BreaksLater at layer 2: \d+ keys score NaN"):
        model.generate(ids, attention_mask=mask, cache=cache, **GENERATE)


# --- options of the cache


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": 0}, ValueError, "budget is 0, expected at least 1 key"),
        ({"budget": -3}, ValueError, "budget is -3, expected at least 1 key"),
        ({"budget": 0.0}, ValueError, r"budget is 0\.0, expected a share of the prompt in \(0, 1\]"),
        (
            {"budget": 1.5},
            ValueError,
            r"budget is 1\.5, expected a share of the prompt in \(0, 1\], as a number of keys write 1",
        ),
        ({"budget": float("nan")}, ValueError, "budget is nan, expected a share"),
        ({"budget": True}, TypeError, "budget is True, expected a float"),
        ({"budget": "0.5"}, TypeError, "budget is '0.5', expected a float"),
        ({"evict_every": 0}, ValueError, "evict_every must be a positive int or None, not 0"),
        ({"evict_every": -1}, ValueError, "evict_every must be a positive int or None, not -1"),
        ({"evict_every": True}, ValueError, "evict_every must be a positive int or None, not True"),
        ({"evict_every": 1.0}, ValueError, r"evict_every must be a positive int or None, not 1\.0"),
        ({"reserve": 0}, ValueError, "reserve must be a positive int or None, not 0"),
        (
            {"evict_every": 4, "reserve": 3},
            ValueError,
            r"reserve=3 slots cannot hold the 4 tokens decoded between two evictions",
        ),
        ({"policy": "oldest"}, ValueError, "unknown policy 'oldest', available: .*snapkv"),
        ({"policy": object()}, TypeError, "expected a policy's name or an object with a method score"),
    ],
)
def test_options_out_of_range(model, options, error, message):
    with pytest.raises(error, match=message):
        CompressedCache(model.config, **{"policy": "streaming", "budget": 6} | options)


def test_prompt_lengths_of_another_batch(model, adapter, prompts):
    ids, mask = prompts
    with pytest.raises(ValueError, match="prompt_lengths has 3 entries for a batch of 2 rows"):
        model.generate(ids, attention_mask=mask, cache=streaming(model, prompt_lengths=[14, 9, 2]), **GENERATE)


def test_case_23_dropout_that_the_configuration_does_not_know(prompts):
    ids, mask = prompts
    model = make_model("llama").train()
    layer = model.model.layers[1].mlp
    layer.down_proj = torch.nn.Sequential(torch.nn.Dropout(0.1), layer.down_proj)
    with MaskedAttentionAdapter(model) as adapter:
        with pytest.raises(
            ValueError, match=r"sampling with active dropout \(model.layers.1.mlp.down_proj.0 and 0 more"
        ):
            model(ids, attention_mask=mask, cache=streaming(model))
        with pytest.raises(ValueError, match="scoring with active dropout"):
            adapter.log_probs(ids, mask)
        assert adapter.eval().log_probs(ids, mask).shape == ids.shape
