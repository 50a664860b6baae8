"""Gradients of the replayed log-probs against a plain reference that shares no attention code with smdlib.

In the reference every query is computed alone, on exactly the keys that the record says it saw.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from smdlib import MaskedAttentionAdapter, ShadowMask, make_policy
from tests.exactness.plain_llama import PlainLlama
from tests.families import VOCAB, make_model
from tests.sampling import ragged_prompts, sample

LENGTHS = [13, 5, 9]
ENDS = {1: 4, 2: 6}
Gradients = dict[str, Tensor]


@dataclass
class Batch:
    """Sampled rows without padding, their record, and a random weight for every log-prob."""

    rows: list[Tensor]
    shadow: ShadowMask
    weights: list[Tensor]
    sampled: list[Tensor]  # the sampler's log-probs of the response

    def padded(self, side: str, extra: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """``input_ids``, ``attention_mask`` and weights ``[B, T]`` with padding on one side."""
        width = max(map(len, self.rows)) + extra
        ids = torch.zeros(len(self.rows), width, dtype=torch.int64)
        mask, weights = torch.zeros_like(ids), torch.zeros(len(self.rows), width)
        for row, tokens in enumerate(self.rows):
            at = slice(width - len(tokens), width) if side == "left" else slice(len(tokens))
            ids[row, at], mask[row, at], weights[row, at] = tokens, 1, self.weights[row]
        return ids, mask, weights


def sampled_batch(model: PreTrainedModel, policy: str = "random", evict_every: int | None = 1) -> Batch:
    """Sample with eviction in every prefill chunk and while decoding."""
    options = {"recent": 2} if policy == "random" else {}
    with MaskedAttentionAdapter(model):
        taken = sample(
            model,
            make_policy(policy, **options),
            0.5,
            prompts=ragged_prompts(LENGTHS, VOCAB, seed=3),
            new_tokens=8,
            evict_every=evict_every,
            chunk=4,
            eos=[3, 4, 5],
            ends=ENDS,
        )
    rows = [ids[mask.bool()] for ids, mask in zip(taken.tokens, taken.attention_mask, strict=True)]
    assert [len(row) for row in rows] == [21, 9, 15]
    assert taken.shadow.retention(taken.lengths).max() < 0.95  # every head lost keys
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(len(row), generator=generator) for row in rows]
    sampled = [taken.sampled[row, where] for row, where in enumerate(taken.response_mask)]
    return Batch(rows, taken.shadow, weights, sampled)


def gradients(model: PreTrainedModel) -> Gradients:
    found = {}
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        found[name] = weight.grad.clone()
    model.zero_grad()
    return found


def reference(model: PreTrainedModel, batch: Batch) -> tuple[list[Tensor], Gradients]:
    """Log-probs of each row, and gradients of their weighted sum."""
    plain = PlainLlama(model)
    scored = []
    for row, ids in enumerate(batch.rows):
        shadow = batch.shadow[row].crop(len(ids))
        scored.append(plain.log_probs(ids, [shadow.visible(layer) for layer in range(plain.layers)]))
    loss = sum((weights[1:] * row).sum() for weights, row in zip(batch.weights, scored, strict=True))
    assert isinstance(loss, Tensor)
    loss.backward()
    return [row.detach() for row in scored], gradients(model)


def replayed(
    model: PreTrainedModel, batch: Batch, side: str = "left", shadow: ShadowMask | None = None
) -> tuple[list[Tensor], Gradients]:
    """The same by the adapter."""
    ids, mask, weights = batch.padded(side, extra=2)
    with MaskedAttentionAdapter(model) as adapter:
        scored = adapter.log_probs(ids, mask, batch.shadow if shadow is None else shadow)
        known = scored.isfinite()
        (weights * scored.where(known, 0.0)).sum().backward()
    assert known.sum(1).tolist() == [len(row) - 1 for row in batch.rows]
    return [row[here].detach() for row, here in zip(scored, known, strict=True)], gradients(model)


def assert_equal(found: tuple[list[Tensor], Gradients], expected: tuple[list[Tensor], Gradients], rel: float) -> None:
    for one, other in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    assert found[1].keys() == expected[1].keys()
    assert relative_gaps(found[1], expected[1]) <= rel


def relative_gaps(found: Gradients, expected: Gradients) -> float:
    """Largest difference of a parameter's gradient relative to its largest entry, the worst of all parameters."""
    return max(
        float((found[name] - gradient).abs().max() / gradient.abs().max()) for name, gradient in expected.items()
    )


def checkpoint(model: PreTrainedModel, use_reentrant: bool) -> list[int]:
    """Turn gradient checkpointing on; the returned list grows by a layer index at every pass through a layer."""
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.train()
    return count_attention(model)


def count_attention(model: PreTrainedModel) -> list[int]:
    calls: list[int] = []
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if "Attention" in type(module).__name__ and layer is not None:
            module.register_forward_pre_hook(lambda *_, layer=layer: calls.append(layer))
    return calls


@pytest.fixture(scope="module")
def expected() -> tuple[Batch, list[Tensor], Gradients]:
    model = make_model("llama")
    batch = sampled_batch(model)
    return batch, *reference(model, batch)


def test_reference_is_the_samplers_distribution(expected):
    batch, scored, _ = expected
    for row, sampled in zip(scored, batch.sampled, strict=True):
        torch.testing.assert_close(row[-len(sampled) :], sampled, rtol=0, atol=1e-4)


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpoint", "checkpoint-reentrant"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_equal_the_plain_reference(expected, side, checkpointing):
    batch, scored, by_reference = expected
    model = make_model("llama")
    calls = count_attention(model) if checkpointing is None else checkpoint(model, use_reentrant=checkpointing)
    assert_equal(replayed(model, batch, side), (scored, by_reference), rel=1e-4)
    assert sorted(calls) == sorted([0, 1, 2] * (1 if checkpointing is None else 2))  # layers were recomputed


@pytest.mark.parametrize(("policy", "evict_every"), [("streaming", None), ("h2o", 4), ("snapkv", 1)])
def test_gradients_equal_the_plain_reference_under_other_policies(policy, evict_every):
    model = make_model("llama", seed=1)
    batch = sampled_batch(model, policy, evict_every)
    assert_equal(replayed(model, batch), reference(model, batch), rel=1e-4)


def test_dense_gradients_are_others(expected):
    """What the tolerance above can tell apart."""
    batch, _, by_reference = expected
    _, dense = replayed(make_model("llama"), batch, shadow=ShadowMask.dense(*batch.shadow.evicted_at.shape))
    assert relative_gaps(dense, by_reference) > 0.5


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_oss", "qwen3_moe"])
def test_case_15_gradient_checkpointing_changes_nothing(family, use_reentrant):
    model = make_model(family)
    batch = sampled_batch(model, "h2o")
    for module in model.modules():  # training without dropout
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):
        if hasattr(model.config, name):
            setattr(model.config, name, 0.0)
    model.train()
    off = replayed(model, batch)
    calls = checkpoint(model, use_reentrant)
    on = replayed(model, batch)
    assert sorted(calls) == [0, 0, 1, 1, 2, 2]
    for one, other in zip(on[0], off[0], strict=True):
        assert torch.equal(one, other)
    for name, gradient in off[1].items():
        torch.testing.assert_close(on[1][name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()), msg=name)
    for row, sampled in zip(on[0], batch.sampled, strict=True):
        torch.testing.assert_close(row[-len(sampled) :], sampled, rtol=0, atol=1e-4)
