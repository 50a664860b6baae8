"""The head that the fused losses use is the model's own, or the model is refused."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import nn

from smdlib import GRPOLoss, MaskedAttentionAdapter, ShadowMask
from smdlib.cache.support import UnsupportedModelError
from smdlib.losses import HeadTransform, linear_scores
from tests.families import FAMILIES, VOCAB, _common, make_model
from tests.losses.reference import rollout
from tests.sampling import ragged_prompts


def sharpen(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 1.4 / weight.shape[-1] ** 0.5)
    return model.eval()


def cohere():
    return sharpen(hf.CohereForCausalLM(hf.CohereConfig(**_common(logit_scale=0.25, tie_word_embeddings=True))))


def granite():
    return sharpen(hf.GraniteForCausalLM(hf.GraniteConfig(**_common(logits_scaling=4.0))))


def gemma2():
    return sharpen(
        hf.Gemma2ForCausalLM(hf.Gemma2Config(**_common(head_dim=16, sliding_window=12, final_logit_softcapping=1.5)))
    )


def biased():
    model = make_model("llama")
    model.lm_head = nn.Linear(48, VOCAB, bias=True)
    return model


MODELS = {name: (lambda name=name: make_model(name)) for name in FAMILIES}
MODELS |= {"cohere": cohere, "granite": granite, "gemma2 capped": gemma2, "biased": biased}
EACH_MODEL = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
EXPECTED = {"cohere": (0.25, None), "granite": (0.25, None), "gemma2 capped": (1.0, 1.5), "gemma2": (1.0, 30.0)}


@EACH_MODEL
def test_head_gives_the_models_logits(build):
    adapter = MaskedAttentionAdapter(build())
    ids, mask = ragged_prompts([9, 6], VOCAB)
    with torch.no_grad():
        hidden, head = adapter.hidden_states(ids, mask), adapter.head()
        own = adapter(ids, mask)
    torch.testing.assert_close(head.logits(hidden), own, rtol=1e-5, atol=1e-5)
    assert float(own.std()) > 0.1
    name = next(name for name, model in MODELS.items() if model is build)
    assert (head.scale, head.softcap) == EXPECTED.get(name, (1.0, None))
    assert (head.bias is not None) == (name == "biased")
    assert head.weight is adapter.model.get_output_embeddings().weight


@EACH_MODEL
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_log_probs_are_those_of_the_adapter(build, temperature):
    adapter = MaskedAttentionAdapter(build())
    ids, mask = ragged_prompts([9, 6], VOCAB)
    shadow = ShadowMask.dense(2, 9, *_layers_and_heads(adapter))
    shadow.evicted_at[:, 1] = 5
    known = mask[:, :-1].bool() & mask[:, 1:].bool()
    with torch.no_grad():
        expected = adapter.log_probs(ids, mask, shadow, temperature)[:, 1:][known]
        head = adapter.head()
        hidden = adapter.hidden_states(ids, mask, shadow)[:, :-1][known]
        transform = HeadTransform(temperature, head.scale, head.softcap)
        scores = linear_scores(hidden, head.weight, ids[:, 1:][known], bias=head.bias, transform=transform, block=40)
    torch.testing.assert_close(scores.log_probs, expected, rtol=1e-5, atol=1e-5)


def _layers_and_heads(adapter):
    config = adapter.model.config
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or config.num_attention_heads


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt_neox", "gpt_oss"])
def test_on_policy_ratio_is_1(family):
    adapter, batch, _ = rollout(family=family)
    output = GRPOLoss(adapter, temperature=0.8)(batch)
    assert abs(float(output.max_ratio) - 1) < 1e-4


class Doubled(hf.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output


class Shifted(hf.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + torch.arange(output.logits.shape[-1]) * 0.01
        return output


class Squashed(hf.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 3 * torch.tanh(output.logits / 3)
        return output


@pytest.mark.parametrize("kind", [Doubled, Shifted, Squashed])
@pytest.mark.parametrize("sharp", [True, False], ids=["sharp", "freshly initialised"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_unknown_transform_is_refused(kind, sharp, dtype):
    torch.manual_seed(0)
    model = kind(hf.LlamaConfig(**_common(initializer_range=0.2)))  # as initialised: the pad token's embedding is 0
    adapter = MaskedAttentionAdapter((sharpen(model) if sharp else model.eval()).to(dtype))
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=f"{kind.__name__} computes its logits .* by more than weight"):
            adapter.head()
    ids = torch.arange(12, 20)[None]
    batch = {"tokens": {"full": ids}, "log_probs": {"full": torch.full((1, 8), -1.0)}, "advantage": torch.ones(1)}
    batch["masks"] = {"all_assistant_mask": torch.arange(8)[None] > 3}
    from tensordict import TensorDict

    with pytest.raises(UnsupportedModelError):
        GRPOLoss(adapter, dense=True)(TensorDict(batch, [1]))


def test_a_head_that_is_not_linear_is_refused():
    model = make_model("llama")
    adapter = MaskedAttentionAdapter(model)
    model.lm_head = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, VOCAB))
    with pytest.raises(UnsupportedModelError, match="the head of LlamaForCausalLM is Sequential, not a linear layer"):
        adapter.head()


def test_half_precision_heads_are_accepted():
    for family in ("llama", "gemma2", "gpt2"):
        MaskedAttentionAdapter(make_model(family).bfloat16()).head()


def test_the_check_runs_once():
    adapter = MaskedAttentionAdapter(make_model("llama"))
    adapter.head()
    calls = []
    adapter.model.register_forward_hook(lambda *_: calls.append(1))
    adapter.head()
    assert calls == []
