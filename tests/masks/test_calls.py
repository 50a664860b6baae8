"""Calls that contradict the cache are refused, and positions that were left out are the right ones."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers as hf

from smdlib import CompressedCache, MaskedAttentionAdapter, ShadowMaskRecorder, make_policy
from tests.families import VOCAB, make_model
from tests.sampling import ragged_prompts

LENGTHS = [20, 11]
SNAPKV = {"window": 4, "kernel_size": 3}


@pytest.fixture
def prompts():
    return ragged_prompts(LENGTHS, VOCAB)


def cache_of(model, recorder=None, **options):
    return CompressedCache(model.config, make_policy("snapkv", **SNAPKV), 0.4, recorder=recorder, **options)


def longer(ids, mask, tokens=1):
    more = torch.full((len(ids), tokens), 20)
    return torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)


@torch.no_grad()
def gap(adapter, logits, tokens, mask, recorder):
    """Largest difference between the sampler's next-token distributions and the replayed ones, in nats."""
    lengths = mask.sum(1)
    replayed = adapter(tokens, mask, recorder.shadow_mask(lengths))[:, -logits.shape[1] :]
    return float((logits.log_softmax(-1) - replayed.log_softmax(-1)).abs().max())


@pytest.mark.parametrize("given", [(), ("prefill",), ("decode",)], ids=["never", "prefill only", "decode only"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gpt_neox"])
@torch.no_grad()
def test_position_ids_that_are_left_out_are_the_unpadded_ones(family, given, prompts):
    model, recorder = make_model(family), ShadowMaskRecorder()
    with MaskedAttentionAdapter(model) as adapter:
        cache = cache_of(model, recorder)
        ids, mask = prompts
        own = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if "prefill" in given else {}
        model(input_ids=ids, attention_mask=mask, cache=cache, **own)
        ids, mask = longer(ids, mask)
        own = {"position_ids": mask.sum(1, keepdim=True) - 1} if "decode" in given else {}
        logits = model(input_ids=ids[:, -1:], attention_mask=mask, cache=cache, **own).logits
        assert gap(adapter, logits, ids, mask, recorder) < 1e-4


@torch.no_grad()
def test_group_flow_of_the_docstring(prompts):
    model, recorder = make_model("gpt2"), ShadowMaskRecorder()
    ids, mask = prompts
    with MaskedAttentionAdapter(model) as adapter:
        cache = cache_of(model, recorder, prompt_lengths=mask.sum(1))
        model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], cache=cache)
        cache.batch_repeat_interleave(3)
        ids, mask = ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0)
        out = model.generate(
            input_ids=ids, attention_mask=mask, cache=cache, max_new_tokens=5, min_new_tokens=5, do_sample=True,
            output_logits=True, return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
        _, mask = longer(ids, mask, 5)
        lengths = mask.sum(1)
        replayed = adapter(out.sequences, mask, recorder.shadow_mask(lengths))[:, -6:-1].log_softmax(-1)
        assert (torch.stack(out.logits, 1).log_softmax(-1) - replayed).abs().max() < 1e-4


@torch.no_grad()
def test_position_ids_that_disagree(prompts):
    model = make_model("llama")
    ids, mask = prompts
    with MaskedAttentionAdapter(model), pytest.raises(ValueError, match="position_ids disagree with the unpadded"):
        model(input_ids=ids, attention_mask=mask, position_ids=torch.arange(20)[None], cache=cache_of(model))


@torch.no_grad()
def test_rows_in_another_order_than_in_the_cache(prompts):
    model = make_model("llama")
    ids, mask = prompts
    with MaskedAttentionAdapter(model):
        cache = cache_of(model)
        model(input_ids=ids, attention_mask=mask, cache=cache)
        tokens, wider = longer(ids, mask)
        with pytest.raises(ValueError, match=r"row 0 began with 0 padded columns, this attention_mask has 9"):
            model(input_ids=tokens[:, -1:], attention_mask=wider.flip(0), cache=cache)
        with pytest.raises(ValueError, match=r"began with \[0, 9\] padded columns, but no attention_mask"):
            model(input_ids=tokens[:, -1:], cache=cache)
        with pytest.raises(ValueError, match="the cache holds 2 rows, the batch has 6"):
            model(input_ids=tokens[:, -1:].repeat(3, 1), attention_mask=wider.repeat(3, 1), cache=cache)
        cache.batch_repeat_interleave(2)
        with pytest.raises(ValueError, match="rows are in another order"):
            model.generate(input_ids=tokens.repeat(2, 1), attention_mask=wider.repeat(2, 1), cache=cache)


@torch.no_grad()
def test_a_cache_that_holds_an_earlier_batch(prompts):
    model = make_model("llama")
    ids, mask = prompts
    with MaskedAttentionAdapter(model):
        cache = cache_of(model)
        model(input_ids=ids, attention_mask=mask, cache=cache)
        with pytest.raises(ValueError, match="still hold an earlier batch"):
            model(input_ids=ids, attention_mask=mask, cache=cache)
        other = ragged_prompts([30, 18], VOCAB)
        with pytest.raises(ValueError, match="row 1 began with 9 padded columns, this attention_mask has 12"):
            model.generate(input_ids=other[0], attention_mask=other[1], cache=cache)
        with pytest.raises(ValueError, match="no new tokens: the cache holds 20 already"):
            model(input_ids=ids[:, :0], attention_mask=mask, cache=cache)
        with pytest.raises(ValueError, match="use_cache=False with a CompressedCache"):
            model(input_ids=ids, attention_mask=mask, cache=cache, use_cache=False)
        with pytest.raises(ValueError, match="1 generators for 2 rows"):
            model(input_ids=ids, attention_mask=mask, cache=cache_of(model, generators=[torch.Generator()]))


@torch.no_grad()
def test_two_live_caches_need_a_recorder_each(prompts):
    model, recorder = make_model("llama"), ShadowMaskRecorder()
    ids, mask = prompts
    with MaskedAttentionAdapter(model):
        first, second = cache_of(model, recorder), cache_of(model, recorder)
        model(input_ids=ids, attention_mask=mask, cache=second)
        with pytest.raises(RuntimeError, match="begun the record of another cache"):
            model(input_ids=ids, attention_mask=mask, cache=first)
        branch = copy.deepcopy(second)  # brings its own copy of the recorder
        tokens, wider = longer(ids, mask)
        model(input_ids=tokens[:, -1:], attention_mask=wider, cache=branch)
        model(input_ids=tokens[:, -1:], attention_mask=wider, cache=second)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 16),
        (
            {
                "rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 6, "long_factor": [3.0] * 6,
                "original_max_position_embeddings": 16,
            },
            16,
        ),
        ({"rope_type": "linear", "factor": 2.0}, None),
    ],
    ids=["dynamic", "longrope", "linear"],
)  # fmt: skip
@torch.no_grad()
def test_rotary_embeddings_that_change_with_the_length(rope, limit):
    config = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, rope_parameters={"rope_theta": 1e4, **rope},
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(config).eval()
    ids = torch.randint(12, VOCAB, (1, 14))
    with MaskedAttentionAdapter(model) as adapter:

        def sample(new_tokens):
            recorder = ShadowMaskRecorder()
            cache = CompressedCache(config, "streaming", 8, recorder=recorder)
            tokens = model.generate(ids, cache=cache, max_new_tokens=new_tokens, min_new_tokens=new_tokens)
            return adapter.log_probs(tokens, shadow_mask=recorder.shadow_mask([tokens.shape[1]]))

        assert sample(2).shape == (1, 16)
        if limit is None:
            assert sample(20).shape == (1, 34)
            return
        with pytest.raises(ValueError, match=f"rotary embedding changes beyond {limit} tokens"):
            sample(20)
        with pytest.raises(ValueError, match=f"beyond the {limit} up to which"):
            sample(3)


@torch.no_grad()
def test_autocast_samples_and_replays():
    model, recorder = make_model("llama"), ShadowMaskRecorder()
    ids, mask = ragged_prompts(LENGTHS, VOCAB)
    with MaskedAttentionAdapter(model) as adapter, torch.autocast("cpu", torch.bfloat16):
        cache = cache_of(model, recorder)
        model(input_ids=ids, attention_mask=mask, cache=cache)
        ids, mask = longer(ids, mask)
        logits = model(input_ids=ids[:, -1:], attention_mask=mask, cache=cache).logits.float()
        assert gap(adapter, logits, ids, mask, recorder) < 0.5
        dense = adapter(ids, mask)[:, -1:].float()
    assert (logits.log_softmax(-1) - dense.log_softmax(-1)).abs().max() > 0.5


def test_a_policy_that_changes_its_view(prompts):
    class Vandal:
        def score(self, view):
            view.keys.mul_(0)
            return view.positions.float()

    model = make_model("llama")
    with (
        MaskedAttentionAdapter(model),
        torch.no_grad(),
        pytest.raises(ValueError, match=r"Vandal at layer 0.*view\.keys"),
    ):
        model(input_ids=prompts[0], attention_mask=prompts[1], cache=CompressedCache(model.config, Vandal(), 4))


def test_a_copy_of_an_adapted_model_takes_an_adapter_of_its_own(prompts):
    model = make_model("llama")
    first = MaskedAttentionAdapter(model)
    twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="already has a MaskedAttentionAdapter"):
        MaskedAttentionAdapter(model)
    second = MaskedAttentionAdapter(twin)
    assert first.installed and second.installed
    assert len(twin._forward_pre_hooks) == len(model._forward_pre_hooks) == 1
    second.remove()
    assert first.installed and not second.installed and not twin._forward_pre_hooks
    assert twin.config._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError, match="install a new one"), second:
        pass


def test_what_is_no_causal_language_model_is_refused():
    model = make_model("llama")
    with pytest.raises(TypeError, match="has no language-model head"):
        MaskedAttentionAdapter(model.model)
    with pytest.raises(TypeError, match="must be a transformers model, not Linear"):
        MaskedAttentionAdapter(torch.nn.Linear(2, 2))
    with (
        MaskedAttentionAdapter(model) as adapter,
        pytest.raises(TypeError, match=r"'position_ids'.* set by the adapter"),
    ):
        adapter(torch.ones(1, 2, dtype=torch.int64), position_ids=torch.arange(2)[None])


@torch.no_grad()
def test_case_27_ids_that_differ_from_those_recorded_are_an_error(prompts):
    model, recorder = make_model("llama"), ShadowMaskRecorder()
    ids, mask = prompts
    with MaskedAttentionAdapter(model) as adapter:
        cache = cache_of(model, recorder)
        tokens = model.generate(
            ids, attention_mask=mask, cache=cache, max_new_tokens=4, min_new_tokens=4, pad_token_id=0
        )
        _, mask = longer(ids, mask, 4)
        shadow = recorder.shadow_mask(mask.sum(1))
        assert shadow.token_ids[0].tolist() == [*tokens[0, :23].tolist(), -1]  # the last token was never fed
        assert shadow.token_ids[1].tolist() == [*tokens[1, 9:23].tolist(), *[-1] * 10]
        assert adapter.log_probs(tokens, mask, shadow).shape == tokens.shape

        other = tokens.clone()
        other[1, 15] += 1
        with pytest.raises(ValueError, match=r"row 1 has token \d+ at position 6, but .* recorded with token \d+"):
            adapter.log_probs(other, mask, shadow)
        with pytest.raises(ValueError, match="are the rows in another order"):
            adapter.log_probs(tokens, mask, shadow[[1, 0]])
        with pytest.raises(ValueError, match="is the attention_mask of a padded batch missing"):
            adapter.log_probs(tokens, None, shadow)
        right = torch.stack([row.roll(-pad) for row, pad in zip(tokens, (0, 9), strict=True)])
        assert adapter.log_probs(right, mask.flip(1), shadow).shape == tokens.shape


@torch.no_grad()
def test_token_ids_follow_padding_slicing_stacking_and_repeated_rows(prompts):
    model, recorder = make_model("llama"), ShadowMaskRecorder()
    ids, mask = prompts
    with MaskedAttentionAdapter(model):
        cache = cache_of(model, recorder)
        model(input_ids=ids, attention_mask=mask, cache=cache)
        cache.batch_repeat_interleave(2)
        shadow = recorder.shadow_mask()
        assert shadow.token_ids[:, :11].tolist() == [*[ids[0, :11].tolist()] * 2, *[ids[1, 9:].tolist()] * 2]
        embeds = model.get_input_embeddings()(ids)
        model(inputs_embeds=embeds, attention_mask=mask, cache=cache_of(model, recorder))
        assert recorder.shadow_mask().token_ids is None
    assert shadow.pad(22).token_ids[0].tolist() == [*ids[0].tolist(), -1, -1]
    assert shadow.crop(5).token_ids[2].tolist() == ids[1, 9:14].tolist()
    stacked = type(shadow).stack([shadow[0].crop(3), type(shadow).dense(4, *shadow.evicted_at.shape[2:])])
    assert stacked.token_ids.tolist() == [[*ids[0, :3].tolist(), -1], [-1] * 4]


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))], ids=["copy", "pickle"]
)
@torch.no_grad()
def test_an_adapter_that_was_copied_or_pickled_samples_and_replays(again, prompts):
    ids, mask = prompts
    adapter = again(MaskedAttentionAdapter(make_model("llama")))
    assert adapter.installed and len(adapter.model._forward_pre_hooks) == 1
    recorder = ShadowMaskRecorder()
    cache = cache_of(adapter.model, recorder)
    adapter.model(input_ids=ids, attention_mask=mask, cache=cache)
    ids, mask = longer(ids, mask)
    logits = adapter.model(input_ids=ids[:, -1:], attention_mask=mask, cache=cache).logits
    assert gap(adapter, logits, ids, mask, recorder) < 1e-4
    adapter.remove()
    assert not again(adapter).installed
