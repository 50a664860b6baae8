"""Settings that cannot be meant are refused, when built and when changed later."""

from __future__ import annotations

import pytest
import torch

from smdlib import DenseToSparseKL, GRPOLoss, MaskedAttentionAdapter, SMDLoss
from smdlib.losses import HeadTransform, OnlineDPOLoss, TokenMean, TruncatedIS, grpo, linear_scores
from tests.families import make_model
from tests.losses.reference import rollout


@pytest.fixture(scope="module")
def actor():
    return MaskedAttentionAdapter(make_model("llama"))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights(actor, weight):
    with pytest.raises(ValueError, match="coeff must be a finite number of at least 0"):
        DenseToSparseKL(actor, coeff=weight)
    with pytest.raises(ValueError, match="kl_to_ref_coeff must be a finite"):
        GRPOLoss(actor, kl_to_ref_coeff=weight)
    loss = SMDLoss(actor)
    with pytest.raises(ValueError, match="coeff must be a finite"):
        loss.coeff = weight
    with pytest.raises(ValueError, match="kl_to_ref_coeff must be a finite"):
        loss.grpo.kl_to_ref_coeff = weight
    assert float(loss.coeff) == pytest.approx(0.1)


def test_what_belongs_to_a_term_is_set_on_the_term(actor):
    loss = SMDLoss(actor, grpo=grpo(actor, kl_to_ref_coeff=0.1, temperature=0.7))
    assert (loss.temperature, loss.distill.temperature, loss.kl_to_ref_coeff) == (0.7, 0.7, 0.1)
    for name in ("temperature", "kl_to_ref_coeff"):
        with pytest.raises(AttributeError):
            setattr(loss, name, 0.5)


@pytest.mark.parametrize(
    "parts", [{"aggregation": TokenMean}, {"surrogate": "clip"}, {"correction": TruncatedIS, "dense": True}]
)
def test_parts_are_objects(actor, parts):
    with pytest.raises(TypeError, match="must be an object such as"):
        GRPOLoss(actor, **parts)


@pytest.mark.parametrize("block", [0, -1, 2.5, True])
def test_blocks(block):
    inputs = torch.zeros(2, 3), torch.zeros(5, 3), torch.tensor([0, 4])
    with pytest.raises(ValueError, match="block must be a whole number"):
        linear_scores(*inputs, block=block)
    with pytest.raises(ValueError, match=r"bias must be finite and \[V\]"):
        linear_scores(*inputs, bias=torch.tensor([-torch.inf, 0, 0, 0, 0]))
    with pytest.raises(ValueError, match=r"bias must be finite and \[V\]"):
        linear_scores(*inputs, bias=torch.zeros(1))
    for wrong in ({"softcap": 0.0}, {"scale": 0.0}, {"scale": float("nan")}):
        with pytest.raises(ValueError, match="scale must be a finite factor"):
            HeadTransform(**wrong)


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, 1.0])
def test_equal_rewards_prefer_no_response_whatever_their_lengths(reward):
    adapter, batch, _ = rollout()
    lengths = batch["masks", "all_assistant_mask"].sum(1)
    assert lengths[0] != lengths[1]
    batch["next", "ref_log_probs", "full"] = batch["log_probs", "full"]
    batch["advantage"] = torch.full((4,), reward)
    loss = OnlineDPOLoss(adapter)
    assert loss(batch).loss_dpo == 0
    batch["advantage"] = torch.tensor([reward, 2.0, reward, reward])
    decided = loss(batch)
    torch.testing.assert_close(loss(batch, 2).loss_dpo, decided.loss_dpo / 2)
    with pytest.raises(ValueError, match="num_items=0, but this micro-batch alone has 1 items"):
        loss(batch, 0)
    batch["advantage"] = torch.rand(batch["tokens", "full"].shape)
    with pytest.raises(ValueError, match="advantages differ within a row"):
        loss(batch)


def test_infinite_log_probs_do_not_pass_for_a_prompt():
    adapter, batch, _ = rollout()
    response = batch["masks", "all_assistant_mask"]
    batch["log_probs", "full"] = batch["log_probs", "full"].masked_fill(~response, torch.nan)
    del batch["masks", "all_assistant_mask"]
    batch["log_probs", "full"][0, -2] = -torch.inf
    with pytest.raises(ValueError, match="is infinite at real tokens"):
        GRPOLoss(adapter)(batch)
