"""SMDLoss: how its terms are put together, how often the model runs, and what it reports."""

from __future__ import annotations

import pytest
import torch

from smdlib import DenseToSparseKL, GRPOLoss, SMDLoss
from smdlib.losses import SequenceMean, cispo, dapo, gspo
from tests.losses.reference import TEMPERATURE, assert_same, gradients, pad_rows, rollout, row_distributions


def total(output):
    return output.loss_objective + output.loss_distill


def kl_of_rows(adapter, rows, reverse=False):
    """KL(sg[dense] || masked) of each response token, as a list of rows."""
    found = []
    for row in rows:
        masked, dense = row_distributions(adapter, row), row_distributions(adapter, row, dense=True).detach()
        p, q = (masked, dense) if reverse else (dense, masked)
        found.append((p.exp() * (p - q)).sum(-1))
    return found


def plain_dense_grpo(adapter, rows):
    """GRPO whose ratio is that of a dense learner to the sparse sampler (the naive arm)."""
    loss = 0.0
    for row in rows:
        ids, _, sampled, prompt, advantage = row
        new = row_distributions(adapter, row, dense=True).gather(1, ids[prompt:, None]).squeeze(1)
        tokens = []
        for now, old in zip(new, sampled[prompt:].double(), strict=True):
            ratio = (now - old).exp()
            tokens.append(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
        loss = loss - sum(tokens) / len(tokens) / len(rows)
    return loss


@pytest.mark.parametrize("preset", [lambda actor, **options: GRPOLoss(actor, **options), dapo, gspo, cispo])
def test_without_distillation_it_is_the_policy_loss(preset):
    adapter, batch, _ = rollout(drift=0.05)
    policy = preset(adapter, temperature=TEMPERATURE)
    smd = SMDLoss(adapter, grpo=policy, distill=DenseToSparseKL(adapter, coeff=0.0, temperature=TEMPERATURE))
    output, alone = smd(batch), policy(batch)
    assert output.loss_distill == 0
    assert_same(adapter, total(output), alone.loss_objective, rtol=1e-6)
    for name, value in alone.items():
        torch.testing.assert_close(output.get(name), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("drift", [0.0, 0.05], ids=["on policy", "off policy"])
def test_track_2_alone_equals_its_formula(side, drift):
    adapter, batch, rows = rollout(side, drift=drift)
    grpo = GRPOLoss(adapter, dense=True, temperature=TEMPERATURE)
    loss = SMDLoss(adapter, grpo=grpo, distill=DenseToSparseKL(adapter, coeff=0.3, temperature=TEMPERATURE))
    output = loss(batch)
    kl = torch.cat(kl_of_rows(adapter, rows)).mean()
    assert_same(adapter, output.loss_objective, plain_dense_grpo(adapter, rows))
    assert_same(adapter, output.loss_distill, 0.3 * kl)
    assert_same(adapter, total(output), plain_dense_grpo(adapter, rows) + 0.3 * kl)
    assert abs(float(output.max_ratio) - 1) > 0.1  # the ratio is not that of the replayed mask


@pytest.mark.parametrize("reverse", [False, True])
def test_sequence_mean_and_direction_of_the_distillation(reverse):
    adapter, batch, rows = rollout(drift=0.05)
    distill = DenseToSparseKL(adapter, coeff=0.5, temperature=TEMPERATURE, reverse=reverse, aggregation=SequenceMean())
    output = SMDLoss(adapter, grpo=GRPOLoss(adapter, temperature=TEMPERATURE), distill=distill)(batch)
    kl = kl_of_rows(adapter, rows, reverse)
    assert_same(adapter, output.loss_distill, 0.5 * sum(row.mean() for row in kl) / len(rows))
    torch.testing.assert_close(output.kl_dense_to_sparse.double(), torch.cat(kl).mean().detach(), rtol=1e-5, atol=1e-6)
    assert_same(adapter, distill(batch).loss_distill, output.loss_distill)


@pytest.mark.parametrize("dense", [False, True], ids=["smd", "track 2"])
def test_one_masked_and_one_dense_pass(dense):
    adapter, batch, _ = rollout()
    adapter.share_prompts = False
    loss = SMDLoss(adapter, grpo=GRPOLoss(adapter, dense=dense), acceptance=True)
    adapter.head()  # checked against the model's logits once
    passes, logits = [], []

    def count(module, args, kwargs, output):
        masked = any("smdlib" in type(value).__module__ for value in kwargs.values())
        passes.append((masked, output.last_hidden_state.requires_grad))

    hooks = [
        adapter.model.base_model.register_forward_hook(count, with_kwargs=True),
        adapter.model.get_output_embeddings().register_forward_hook(lambda *_: logits.append(1)),
    ]
    total(loss(batch)).backward()
    for hook in hooks:
        hook.remove()
    assert sorted(passes) == [(False, dense), (True, True)]
    assert logits == []


def test_acceptance_is_the_5th_percentile_of_the_overlap():
    adapter, batch, rows = rollout(drift=0.05)
    overlaps = []
    for row in rows:
        masked, dense = row_distributions(adapter, row).exp(), row_distributions(adapter, row, dense=True).exp()
        overlaps += torch.minimum(masked, dense).sum(-1).tolist()
    overlaps.sort()
    at = 0.05 * (len(overlaps) - 1)
    below, above = overlaps[int(at)], overlaps[int(at) + 1]
    loss = SMDLoss(adapter, grpo=GRPOLoss(adapter, temperature=TEMPERATURE), acceptance=True)
    assert float(loss(batch).acceptance_p5) == pytest.approx(below + (at - int(at)) * (above - below), abs=1e-5)
    assert above < 0.95
    loss.acceptance = False
    assert loss(batch).acceptance_p5 is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_retained_keys_are_those_that_predicting_queries_saw(side):
    adapter, batch, rows = rollout(side)
    share = retained_by_hand(rows)
    assert 0.3 < share < 0.9
    assert float(SMDLoss(adapter)(batch).retained_keys) == pytest.approx(share, abs=1e-6)


def retained_by_hand(rows, loss_masks=None):
    """Mean over rows, layers and KV heads; the query at t - 1 predicts token t."""
    shares = []
    for index, (ids, shadow, _, prompt, _) in enumerate(rows):
        loss_mask = torch.arange(len(ids)) >= prompt if loss_masks is None else loss_masks[index]
        queries = [t - 1 for t in range(len(ids)) if loss_mask[t]]
        if not queries:
            continue
        for layer in range(3):
            visible = shadow.visible(layer, queries).sum((1, 2)) / sum(query + 1 for query in queries)
            shares += visible.tolist()
    return sum(shares) / len(shares)


def test_retained_keys_of_several_turns_and_of_rows_without_loss_tokens():
    adapter, _, rows = rollout("left")
    masks = [torch.arange(len(row[0])) >= row[3] for row in rows]
    masks[0][-4:-2] = False  # what the environment said between two turns
    masks[2][:] = False
    batch = pad_rows(rows, "left")
    width = batch["tokens", "full"].shape[1]
    batch["masks", "all_assistant_mask"] = torch.stack(
        [torch.nn.functional.pad(mask, (width - len(mask), 0)) for mask in masks]
    )
    output = SMDLoss(adapter)(batch)
    assert float(output.retained_keys) == pytest.approx(retained_by_hand(rows, masks), abs=1e-6)


def test_a_record_without_the_last_token_is_enough():
    """The last token of a row is sampled, never fed: its key takes part in no prediction."""
    adapter, batch, _ = rollout(drift=0.05)
    loss = SMDLoss(adapter)
    expected = loss(batch)
    longest = int(batch["masks", "all_attention_mask"].sum(1).max())
    batch["shadow"] = batch["shadow"].crop(longest - 1)
    actual = loss(batch)
    torch.testing.assert_close(total(actual), total(expected), rtol=1e-6, atol=1e-7)
    assert actual.retained_keys == expected.retained_keys


def test_the_weight_is_scheduled():
    adapter, batch, _ = rollout(drift=0.05)
    loss = SMDLoss(adapter, grpo=GRPOLoss(adapter, temperature=TEMPERATURE))
    assert float(loss.distill.coeff) == pytest.approx(0.1)
    assert any(name.endswith("distill.coeff") for name, _ in loss.named_buffers())
    first = loss(batch)
    for coeff in (0.0, 0.05, 0.4):
        loss.distill.coeff = coeff
        output = loss(batch)
        assert isinstance(loss.distill.coeff, torch.Tensor)
        torch.testing.assert_close(output.loss_distill, first.loss_distill * coeff / 0.1)
        torch.testing.assert_close(output.loss_objective, first.loss_objective)
        torch.testing.assert_close(output.loss_distill, coeff * output.kl_dense_to_sparse)


def test_the_weight_is_saved():
    adapter, _, _ = rollout()
    loss = SMDLoss(adapter)
    loss.distill.coeff = 0.02
    other = SMDLoss(adapter)
    other.load_state_dict(loss.state_dict())
    assert float(other.distill.coeff) == pytest.approx(0.02)


def test_renamed_keys_reach_both_terms():
    adapter, batch, _ = rollout(drift=0.05)
    loss = SMDLoss(adapter)
    expected = loss(batch)
    renamed = batch.clone()
    renamed.rename_key_(("tokens", "full"), "ids").rename_key_("shadow", "record").rename_key_("advantage", "score")
    renamed.rename_key_(("masks", "all_assistant_mask"), ("masks", "response"))
    names = {"action": "ids", "shadow": "record", "advantage": "score", "loss_mask": ("masks", "response")}
    loss.set_keys(**names)
    actual = loss(renamed)
    torch.testing.assert_close(total(actual), total(expected), rtol=0, atol=0)
    for term in (loss, loss.grpo, loss.distill):
        for name, key in names.items():
            assert getattr(term.tensor_keys, name) == key
            assert key in loss.in_keys
    torch.testing.assert_close(loss.grpo(renamed).loss_objective, expected.loss_objective)
    torch.testing.assert_close(loss.distill(renamed).loss_distill, expected.loss_distill)
    with pytest.raises(KeyError):
        loss(batch)


def test_no_gradient_through_the_teacher():
    """A weight that only the dense pass uses would show it; here the two passes share all, so compare with autograd."""
    adapter, batch, rows = rollout()
    loss = SMDLoss(adapter, grpo=GRPOLoss(adapter, temperature=TEMPERATURE))
    detached = torch.cat(kl_of_rows(adapter, rows)).mean() * 0.1
    through = []
    for row in rows:
        p, q = row_distributions(adapter, row, dense=True), row_distributions(adapter, row)
        through.append((p.exp() * (p - q)).sum(-1))
    assert_same(adapter, loss(batch).loss_distill, detached)
    wrong = gradients(adapter, torch.cat(through).mean() * 0.1)
    right = gradients(adapter, detached)
    assert max(float((wrong[name] - right[name]).abs().max()) for name in right) > 1e-3


def test_terms_must_belong_together():
    adapter, _, _ = rollout()
    other, _, _ = rollout(seed=1)
    with pytest.raises(ValueError, match="distill was built for another actor"):
        SMDLoss(adapter, distill=DenseToSparseKL(other))
    with pytest.raises(ValueError, match="temperatures differ"):
        SMDLoss(adapter, grpo=GRPOLoss(adapter, temperature=0.5), distill=DenseToSparseKL(adapter))
    assert SMDLoss(adapter, distill=DenseToSparseKL(adapter, temperature=0.5)).grpo.temperature == 0.5
    with pytest.raises(ValueError, match="coeff must be a finite number of at least 0"):
        DenseToSparseKL(adapter, coeff=-0.1)
    with pytest.raises(TypeError, match="cannot be shadow-masked"):
        SMDLoss(adapter.model)


def test_everything_it_names_comes_back():
    adapter, batch, _ = rollout()
    batch["next", "ref_log_probs", "full"] = batch["log_probs", "full"]
    loss = SMDLoss(adapter, grpo=GRPOLoss(adapter, kl_to_ref_coeff=0.1), acceptance=True)
    output = loss(batch)
    assert set(output.keys()) == set(loss.out_keys) - {"rejected_fraction"}
    assert all(value.shape == () and value.isfinite() for value in output.values())
    with_gradient = {name for name, value in output.items() if value.requires_grad}
    assert with_gradient == {"loss_objective", "loss_distill", "loss_kl_to_ref"}
