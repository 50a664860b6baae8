"""Installing, scoring, and leaving everything else as it was."""

import pytest
import torch
import transformers as hf

from smdlib import CompressedCache, MaskedAttentionAdapter, ShadowMask
from tests.families import FAMILIES, VOCAB, make_model
from tests.sampling import kept_positions, ragged_prompts, sample

# --- installing and removing


@pytest.mark.parametrize("previous", ["sdpa", "eager"])
def test_remove_restores_the_models_attention(previous):
    model = make_model("llama")
    model.set_attn_implementation(previous)
    ids, mask = ragged_prompts([9, 5], VOCAB)
    before = model(ids, attention_mask=mask).logits
    adapter = MaskedAttentionAdapter(model)
    assert model.config._attn_implementation != previous
    adapter.remove()
    assert model.config._attn_implementation == previous
    assert torch.equal(model(ids, attention_mask=mask).logits, before)
    adapter.remove()  # harmless
    assert model.config._attn_implementation == previous


def test_context_manager_removes_even_after_an_error():
    model = make_model("llama")
    with MaskedAttentionAdapter(model) as adapter:
        assert adapter.model is model and model.config._attn_implementation != "sdpa"
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(KeyError), MaskedAttentionAdapter(model):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"


def test_a_removed_adapter_does_not_score():
    model = make_model("llama")
    adapter = MaskedAttentionAdapter(model)
    adapter.remove()
    with pytest.raises(RuntimeError, match=r"was removed from its model, .* install a new one"):
        adapter.log_probs(torch.arange(5)[None])


def test_one_adapter_per_model():
    model, other = make_model("llama"), make_model("qwen3")
    first = MaskedAttentionAdapter(model)
    with pytest.raises(ValueError, match=r"already has a MaskedAttentionAdapter; use that one, or remove\(\) it first"):
        MaskedAttentionAdapter(model)
    with pytest.raises(ValueError, match="already has a MaskedAttentionAdapter"):
        MaskedAttentionAdapter(model, backend="eager")
    MaskedAttentionAdapter(other)  # another model is another matter
    first.remove()
    MaskedAttentionAdapter(model, backend="eager").log_probs(torch.arange(5)[None])


def test_two_models_with_different_backends_side_by_side():
    models = [make_model("llama"), make_model("llama")]
    ids = ragged_prompts([9], VOCAB)[0]
    adapters = [
        MaskedAttentionAdapter(model, backend) for model, backend in zip(models, ("sdpa", "eager"), strict=True)
    ]
    assert [adapter.backend for adapter in adapters] == ["sdpa", "eager"]
    scores = [adapter.log_probs(ids) for adapter in adapters]
    torch.testing.assert_close(*scores, equal_nan=True, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "backend"), [("llama", "sdpa"), ("gpt2", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")]
)
def test_auto_chooses_the_models_own_eager_attention_where_sdpa_cannot(family, backend):
    assert MaskedAttentionAdapter(make_model(family)).backend == backend


def test_a_model_loaded_with_eager_attention_keeps_it():
    model = make_model("llama")
    model.set_attn_implementation("eager")
    assert MaskedAttentionAdapter(model).backend == "eager"


# --- everything else computes what it did


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_dense_logits_are_those_of_the_model(family):
    model = make_model(family)
    ids, mask = ragged_prompts([20, 13], VOCAB)
    backend = MaskedAttentionAdapter(model)
    model.set_attn_implementation(backend.backend)  # soft-capping and sinks need eager attention, with or without us
    before = model(ids, attention_mask=mask).logits[mask.bool()]
    alone = model(ids[:1]).logits
    model.set_attn_implementation("sdpa" if backend._previous == "sdpa" else "eager")
    with MaskedAttentionAdapter(model):
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], before, atol=2e-5, rtol=0)
        torch.testing.assert_close(model(ids[:1]).logits, alone, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("chunk", [None, 8])
def test_generate_with_another_cache_is_that_of_the_model(family, chunk):
    model = make_model(family)
    ids, mask = ragged_prompts([20, 13], VOCAB)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": VOCAB + 1}
    options |= {"return_dict_in_generate": True, "output_logits": True, "prefill_chunk_size": chunk}
    adapter = MaskedAttentionAdapter(model)
    backend = adapter.backend
    adapter.remove()
    model.set_attn_implementation(backend)
    before = model.generate(ids, attention_mask=mask, **options)
    with MaskedAttentionAdapter(model, backend):
        caches = [{}, {"cache": hf.DynamicCache(config=model.config)}]
        for cache in caches if chunk else [*caches, {"cache_implementation": "static"}]:
            after = model.generate(ids, attention_mask=mask, **options, **cache)
            assert torch.equal(after.sequences, before.sequences)
            torch.testing.assert_close(torch.stack(after.logits), torch.stack(before.logits), atol=5e-5, rtol=0)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(("backend", "kind"), [("sdpa", "bool"), ("sdpa", "additive"), ("eager", "additive")])
def test_a_mask_of_the_callers_own_means_what_it_meant(backend, heads, kind):
    model = make_model("llama")
    model.set_attn_implementation(backend)
    ids = ragged_prompts([9], VOCAB)[0]
    own = torch.ones(9, 9).tril(-2).bool() | torch.eye(9).bool()
    own = own.expand(1, heads, 9, 9).clone()
    own[:, 0, 5, 1] = False
    if kind == "additive":
        own = torch.where(own, 0.0, torch.finfo(torch.float32).min)
    before = model(ids, attention_mask=own).logits
    with MaskedAttentionAdapter(model, backend):
        torch.testing.assert_close(model(ids, attention_mask=own).logits, before, atol=1e-5, rtol=0)


# --- scoring


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_log_probs_are_the_plain_formula(family, temperature):
    model = make_model(family)
    ids, mask = ragged_prompts([12, 7], VOCAB)
    with MaskedAttentionAdapter(model) as adapter, torch.no_grad():
        scores = adapter.log_probs(ids, mask, temperature=temperature)
        assert scores.dtype is torch.float32 and scores.shape == ids.shape
        for row, length in enumerate((12, 7)):
            tokens = ids[row, 12 - length :]
            log_probs = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
            expected = log_probs[:-1].gather(-1, tokens[1:, None]).squeeze(-1)
            torch.testing.assert_close(scores[row, 12 - length + 1 :], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature):
    with (
        MaskedAttentionAdapter(make_model("llama")) as adapter,
        pytest.raises(ValueError, match="must be above 0, not"),
    ):
        adapter.log_probs(torch.arange(5)[None], temperature=temperature)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_nan_where_there_is_no_log_prob(dtype):
    ids = torch.randint(VOCAB, (3, 8))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 0]])
    with MaskedAttentionAdapter(make_model("llama")) as adapter, torch.no_grad():
        known = adapter.log_probs(ids, mask.to(dtype)).isfinite()
        assert torch.equal(known, mask.bool() & torch.roll(mask, 1, 1).bool() & (torch.arange(8) > 0))
        assert torch.equal(adapter.log_probs(ids).isnan(), (torch.arange(8) == 0).expand(3, 8))
        assert adapter.log_probs(ids[:, :1]).isnan().all()


def test_bf16_models_score_in_float32():
    model = make_model("llama").to(torch.bfloat16)
    with MaskedAttentionAdapter(model) as adapter, torch.no_grad():
        assert adapter.log_probs(torch.arange(9)[None]).dtype is torch.float32


def test_padding_has_no_gradient():
    model = make_model("llama")
    ids, mask = ragged_prompts([9, 4], VOCAB)
    with MaskedAttentionAdapter(model) as adapter:
        for masked in (None, ShadowMask.dense(2, 9, 3, 2)):
            model.zero_grad()
            adapter.log_probs(ids, mask, masked).nan_to_num().sum().backward()
            gradient = model.get_input_embeddings().weight.grad
            assert gradient.isfinite().all() and gradient[0].eq(0).all()  # token 0 is only ever padding here


def repadded(ids, mask, left: int, right: int):
    """The rows of a left-padded batch with other padding, whose token ids are arbitrary."""
    lengths = mask.sum(1).tolist()
    width = left + max(lengths) + right
    new_ids = torch.randint(VOCAB, (len(lengths), width))
    new_mask = torch.zeros(len(lengths), width, dtype=mask.dtype)
    spans = []
    for row, length in enumerate(lengths):
        start = left if right else width - length
        new_ids[row, start : start + length] = ids[row, mask[row].bool()]
        new_mask[row, start : start + length] = 1
        spans.append(slice(start, start + length))
    return new_ids, new_mask, spans


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gemma3", "gpt_oss"])
def test_case_25_padding_changes_no_log_prob(family):
    model = make_model(family)
    with MaskedAttentionAdapter(model) as adapter, torch.no_grad():
        taken = sample(model, "snapkv", 6, prompts=ragged_prompts([18, 11], VOCAB), new_tokens=6, evict_every=1)
        for shadow in (None, taken.shadow):
            reference = adapter.log_probs(taken.tokens, taken.attention_mask, shadow)
            reference = [row[mask.bool()] for row, mask in zip(reference, taken.attention_mask, strict=True)]
            for left, right in ((0, 0), (5, 0), (0, 1), (0, 7), (3, 4)):
                ids, mask, spans = repadded(taken.tokens, taken.attention_mask, left, right)
                scores = adapter.log_probs(ids, mask, shadow)
                for row, span in enumerate(spans):
                    torch.testing.assert_close(scores[row, span], reference[row], atol=2e-5, rtol=0, equal_nan=True)
        # A mask with room to spare, as it comes from a buffer of longer rows.
        longer = adapter.log_probs(ids, mask, taken.shadow.pad(ids.shape[1]))
        torch.testing.assert_close(longer, scores, atol=1e-6, rtol=0, equal_nan=True)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("padding", [0, 5])
def test_case_25_padding_changes_no_record(family, padding):
    model = make_model(family)
    ids, _ = ragged_prompts([15], VOCAB)
    mask = torch.cat([torch.zeros(1, padding, dtype=torch.int64), torch.ones(1, 15, dtype=torch.int64)], 1)
    padded = torch.cat([torch.full((1, padding), 7), ids], 1)
    with MaskedAttentionAdapter(model) as adapter, torch.no_grad():
        alone = sample(model, "h2o", 6, prompts=(ids, torch.ones_like(ids)), new_tokens=8, evict_every=1)
        other = sample(model, "h2o", 6, prompts=(padded, mask), new_tokens=8, evict_every=1)
        assert torch.equal(alone.tokens, other.tokens[:, padding:])
        assert torch.equal(alone.shadow.evicted_at, other.shadow.evicted_at)
        assert kept_positions(alone.cache, 1, 0) == kept_positions(other.cache, 1, 0)
        torch.testing.assert_close(other.sampled[:, padding:], alone.sampled, atol=2e-5, rtol=0, equal_nan=True)
        scores = [adapter.log_probs(taken.tokens, taken.attention_mask, taken.shadow) for taken in (alone, other)]
    torch.testing.assert_close(scores[1][:, padding:], scores[0], atol=2e-5, rtol=0, equal_nan=True)


def test_a_dense_record_gives_dense_log_probs():
    model = make_model("llama")
    ids, mask = ragged_prompts([12, 7], VOCAB)
    with MaskedAttentionAdapter(model) as adapter, torch.no_grad():
        dense = adapter.log_probs(ids, mask)
        masked = adapter.log_probs(ids, mask, ShadowMask.dense(2, 12, 3, 2))
    torch.testing.assert_close(masked, dense, atol=1e-5, rtol=0, equal_nan=True)


def test_a_full_budget_samples_densely():
    model = make_model("llama")
    ids, mask = ragged_prompts([12, 7], VOCAB)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": VOCAB + 1}
    before = model.generate(ids, attention_mask=mask, **options)
    with MaskedAttentionAdapter(model):
        after = model.generate(ids, attention_mask=mask, cache=CompressedCache(model.config, "snapkv", 1.0), **options)
    assert torch.equal(before, after)
