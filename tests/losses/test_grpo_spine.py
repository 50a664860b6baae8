"""GRPOLoss, DenseToSparseKL and SMDLoss against the formulas written out row by row."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from smdlib import DenseToSparseKL, GRPOLoss, ShadowMask, SMDLoss
from smdlib.losses import ClippedSurrogate, TokenMean
from tests.losses.reference import TEMPERATURE, assert_same, gradients, pad_rows, rollout, row_distributions

DRIFTS = {"on policy": 0.0, "off policy": 0.05}


def plain_grpo(adapter, rows):
    """GRPO, equation 3: mean over samples of the mean over tokens of the clipped objective."""
    total = 0.0
    for row in rows:
        ids, _, sampled, prompt, advantage = row
        current = row_distributions(adapter, row).gather(1, ids[prompt:, None]).squeeze(1)
        tokens = []
        for new, old in zip(current, sampled[prompt:].double(), strict=True):
            ratio = (new - old).exp()
            tokens.append(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
        total = total + torch.stack(tokens).mean()
    return -total / len(rows)


def plain_kl(adapter, rows, reverse=False):
    """Mean over response tokens of the KL over the whole vocabulary."""
    values = []
    for row in rows:
        masked = row_distributions(adapter, row)
        dense = row_distributions(adapter, row, dense=True).detach()
        p, q = (masked, dense) if reverse else (dense, masked)
        values.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(values).mean()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("drift", DRIFTS.values(), ids=DRIFTS)
def test_grpo_equals_the_formula(side, drift):
    adapter, batch, rows = rollout(side, drift=drift)
    output = GRPOLoss(adapter, temperature=TEMPERATURE)(batch)
    assert_same(adapter, output.loss_objective, plain_grpo(adapter, rows))
    if drift:
        assert output.clip_fraction > 0
        assert output.kl_approx > 1e-3
    else:
        assert abs(float(output.max_ratio) - 1) < 1e-4
        assert output.clip_fraction == 0


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("reverse", [False, True])
def test_kl_equals_the_formula(side, reverse):
    adapter, batch, rows = rollout(side)
    output = DenseToSparseKL(adapter, coeff=0.3, temperature=TEMPERATURE, reverse=reverse)(batch)
    expected = plain_kl(adapter, rows, reverse)
    assert expected > 0.05
    assert_same(adapter, output.loss_distill, 0.3 * expected)
    torch.testing.assert_close(output.kl_dense_to_sparse.double(), expected.detach(), rtol=1e-5, atol=1e-6)


def test_smd_is_the_sum_of_both_terms():
    adapter, batch, rows = rollout(drift=0.05)
    grpo = GRPOLoss(adapter, temperature=TEMPERATURE)
    output = SMDLoss(adapter, grpo=grpo)(batch)
    expected = plain_grpo(adapter, rows) + 0.1 * plain_kl(adapter, rows)
    assert_same(adapter, output.loss_objective + output.loss_distill, expected)


def test_ragged_rows_equal_padded_rows():
    adapter, batch, rows = rollout(drift=0.05)
    ragged = lazy_stack(
        [
            TensorDict(
                {
                    ("tokens", "full"): ids,
                    ("masks", "all_assistant_mask"): torch.arange(len(ids)) >= prompt,
                    ("log_probs", "full"): sampled,
                    "advantage": torch.full((len(ids), 1), advantage),
                    "shadow": shadow,
                }
            )
            for ids, shadow, sampled, prompt, advantage in rows
        ]
    )
    loss = GRPOLoss(adapter, temperature=TEMPERATURE)
    torch.testing.assert_close(loss(ragged).loss_objective, loss(batch).loss_objective)


def test_finite_log_probs_mark_the_response_without_a_loss_mask():
    adapter, batch, _ = rollout(drift=0.05)
    loss = GRPOLoss(adapter, temperature=TEMPERATURE)
    expected = loss(batch).loss_objective
    bare = batch.clone()
    response = bare["masks", "all_assistant_mask"]
    bare["log_probs", "full"] = bare["log_probs", "full"].masked_fill(~response, torch.nan)
    del bare["masks", "all_assistant_mask"]
    torch.testing.assert_close(loss(bare).loss_objective, expected)


def test_a_missing_shadow_mask_is_an_error_never_a_dense_pass():
    adapter, batch, _ = rollout()
    del batch["shadow"]
    for loss in (GRPOLoss(adapter), DenseToSparseKL(adapter), SMDLoss(adapter)):
        with pytest.raises(KeyError, match="no shadow mask at 'shadow'"):
            loss(batch)


def test_dense_data_is_asked_for():
    adapter, batch, _ = rollout()
    dense = GRPOLoss(adapter, temperature=TEMPERATURE, dense=True)
    assert "shadow" not in dense.in_keys
    with_mask = GRPOLoss(adapter, temperature=TEMPERATURE)(batch)
    del batch["shadow"]
    without = dense(batch)
    assert abs(float(without.max_ratio) - 1) > 0.1
    assert abs(float(with_mask.max_ratio) - 1) < 1e-4


def test_what_lies_at_masked_tokens_does_not_matter():
    adapter, batch, _ = rollout(drift=0.05)
    loss = GRPOLoss(adapter, temperature=TEMPERATURE)
    expected = loss(batch).loss_objective
    masked = ~batch["masks", "all_assistant_mask"]
    for poison in (torch.nan, -200.0, torch.inf):
        batch["log_probs", "full"] = batch["log_probs", "full"].masked_fill(masked, poison)
        actual = loss(batch).loss_objective
        assert torch.equal(actual, expected)
        assert all(grad.isfinite().all() for grad in gradients(adapter, actual).values())


def test_a_loss_token_without_sampled_log_prob_is_an_error():
    adapter, batch, _ = rollout()
    batch["log_probs", "full"][0, -1] = torch.nan
    with pytest.raises(ValueError, match=r"not finite at 1 of \d+ loss tokens"):
        GRPOLoss(adapter)(batch)


def test_no_loss_tokens():
    adapter, batch, _ = rollout()
    batch["masks", "all_assistant_mask"] = torch.zeros_like(batch["masks", "all_assistant_mask"])
    output = SMDLoss(adapter)(batch)
    loss = output.loss_objective + output.loss_distill
    assert loss == 0
    loss.backward()
    assert all(weight.grad is None or (weight.grad == 0).all() for weight in adapter.parameters())


@pytest.mark.parametrize("aggregation", [None, TokenMean()], ids=["sequence", "token"])
def test_micro_batches_add_up(aggregation):
    adapter, batch, rows = rollout(drift=0.05)
    loss = SMDLoss(adapter, grpo=GRPOLoss(adapter, temperature=TEMPERATURE, aggregation=aggregation))
    whole = loss(batch)
    lengths = batch["masks", "all_assistant_mask"].sum(1)
    items = loss.grpo.aggregation.count(lengths), loss.distill.aggregation.count(lengths)
    parts = [loss(pad_rows(rows[start : start + 2], "right"), *items) for start in (0, 2)]
    total = sum(part.loss_objective + part.loss_distill for part in parts)
    assert_same(adapter, total, whole.loss_objective + whole.loss_distill)


def test_renamed_keys():
    adapter, batch, _ = rollout(drift=0.05)
    loss = GRPOLoss(adapter, temperature=TEMPERATURE)
    expected = loss(batch).loss_objective
    batch.rename_key_("advantage", "score").rename_key_("shadow", "record")
    loss.set_keys(advantage="score", shadow="record")
    torch.testing.assert_close(loss(batch).loss_objective, expected)
    with pytest.raises(ValueError):
        loss.set_keys(no_such_key="x")


def test_torchrl_manners():
    adapter, batch, _ = rollout()
    loss = SMDLoss(adapter)
    assert {id(weight) for weight in loss.parameters()} == {id(weight) for weight in adapter.model.parameters()}
    loss.distill.coeff = 0.0
    assert loss(batch).loss_distill == 0
    assert set(loss(batch).keys()) <= set(loss.out_keys)
    with pytest.raises(ValueError, match="temperatures differ"):
        SMDLoss(adapter, grpo=GRPOLoss(adapter, temperature=0.5), distill=DenseToSparseKL(adapter))


def test_a_foreign_shadow_mask_is_refused():
    adapter, batch, _ = rollout()
    batch["shadow"] = ShadowMask.dense(4, 3, 3, 2)
    with pytest.raises(ValueError, match="covers 3 tokens"):
        GRPOLoss(adapter)(batch)


def test_surrogate_thresholds_are_checked():
    with pytest.raises(ValueError, match="clip thresholds"):
        ClippedSurrogate(low=1.5)
    with pytest.raises(ValueError, match="dual clipping"):
        ClippedSurrogate(dual=0.5)


def test_the_number_of_items_cannot_be_smaller_than_the_micro_batch():
    adapter, batch, _ = rollout()
    with pytest.raises(ValueError, match="num_items=0, but this micro-batch alone has 4 items"):
        GRPOLoss(adapter)(batch, 0)
    with pytest.raises(ValueError, match="both, or neither"):
        SMDLoss(adapter)(batch, 4)


def test_keys_and_weight_of_both_terms():
    adapter, batch, _ = rollout(drift=0.05)
    expected = SMDLoss(adapter)(batch)
    batch.rename_key_("advantage", "score")
    grpo = GRPOLoss(adapter)
    grpo.set_keys(advantage="score")
    loss = SMDLoss(adapter, grpo=grpo)
    torch.testing.assert_close(loss(batch).loss_objective, expected.loss_objective)
    with pytest.raises(ValueError, match="keys differ"):
        SMDLoss(adapter, grpo=grpo, distill=DenseToSparseKL(adapter))
    loss.coeff = 0.05
    torch.testing.assert_close(loss(batch).loss_distill, expected.loss_distill / 2)
    loss.set_keys(advantage="points")
    with pytest.raises(KeyError, match="no advantage at 'points'"):
        loss(batch)


def test_what_cannot_be_an_actor_or_a_batch():
    adapter, batch, _ = rollout()
    with pytest.raises(TypeError, match=r"actor is a LlamaForCausalLM, .* MaskedAttentionAdapter"):
        GRPOLoss(adapter.model)
    with pytest.raises(ValueError, match="this batch is empty"):
        GRPOLoss(adapter)(batch[:0])
    batch["log_probs", "full"] = -batch["log_probs", "full"]
    with pytest.raises(ValueError, match="log-probs are 0 or less"):
        GRPOLoss(adapter)(batch)
