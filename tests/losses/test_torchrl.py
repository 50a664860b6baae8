"""Other objectives on the masked policy: TorchRL's ClipPPOLoss as it is, and OnlineDPOLoss; and the metrics."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torchrl.objectives import ClipPPOLoss

from smdlib import ShadowMask
from smdlib.losses import (
    OnlineDPOLoss,
    acceptance,
    effective_sample_size,
    mismatch_k1,
    mismatch_k3,
    zero_variance_groups,
)
from tests.losses.reference import (
    TEMPERATURE,
    assert_same,
    dense_log_probs,
    gradients,
    pad_rows,
    pad_values,
    rollout,
    row_distributions,
)

TOKENS, LOG_PROBS = ("tokens", "full"), ("log_probs", "full")


class TokenLogits(nn.Module):
    """Logits ``[B, T, V]`` of the shadow-masked pass; column t holds the distribution of token t."""

    def __init__(self, adapter, dense=False):
        super().__init__()
        self.adapter, self.dense = adapter, dense

    def forward(self, ids, attention_mask, shadow):
        if not isinstance(shadow, ShadowMask):
            shadow = ShadowMask.from_tensordict(shadow)
        logits = self.adapter(ids, attention_mask, None if self.dense else shadow) / TEMPERATURE
        return logits.roll(1, dims=1)  # column 0, of which there is none, holds another and counts nowhere


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))

    def forward(self, ids):
        return self.value.expand(*ids.shape, 1)


def ppo_loss(adapter, dense=False, functional=False):
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(
            TokenLogits(adapter, dense),
            in_keys=[TOKENS, ("masks", "all_attention_mask"), "shadow"],
            out_keys=["logits"],
        ),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=[TOKENS], distribution_class=torch.distributions.Categorical
        ),
    )
    critic = TensorDictModule(Critic(), in_keys=[TOKENS], out_keys=["state_value"])
    loss = ClipPPOLoss(
        actor, critic, clip_epsilon=0.2, entropy_bonus=True, entropy_coeff=0.02, reduction="none", functional=functional
    )
    loss.set_keys(action=TOKENS, sample_log_prob=LOG_PROBS)
    return loss


def ppo_batch(side="left", drift=0.05):
    adapter, batch, rows = rollout(side, drift=drift)
    batch[LOG_PROBS] = batch[LOG_PROBS].nan_to_num(0.0)
    width = batch[TOKENS].shape[1]
    advantages = batch["advantage"][:, None, None].expand(4, width, 1)
    batch["advantage"] = advantages + torch.linspace(0, 0.3, width)[None, :, None]  # a critic's differ by token
    batch["value_target"] = torch.zeros(4, width, 1)
    return adapter, batch, rows


def plain_ppo(adapter, batch, rows, dense=False):
    """PPO, eq. 7 of arXiv 1707.06347, and the entropy bonus: means over response tokens."""
    objective, entropies = [], []
    for index, row in enumerate(rows):
        ids, _, sampled, prompt, _ = row
        advantages = batch["advantage"][index, :, 0][batch["masks", "all_attention_mask"][index]][prompt:]
        distributions = row_distributions(adapter, row, dense=dense)
        entropies.append(-(distributions.exp() * distributions).sum(-1))
        new = distributions.gather(1, ids[prompt:, None]).squeeze(1)
        for now, old, advantage in zip(new, sampled[prompt:].double(), advantages.tolist(), strict=True):
            ratio = (now - old).exp()
            objective.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    return torch.stack(objective).mean(), -0.02 * torch.cat(entropies).mean()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("drift", [0.0, 0.05], ids=["on policy", "off policy"])
def test_torchrl_ppo_on_the_masked_distribution(side, drift):
    adapter, batch, rows = ppo_batch(side, drift)
    response = batch["masks", "all_assistant_mask"]
    output = ppo_loss(adapter)(batch)
    objective = output["loss_objective"].reshape(response.shape)[response].mean()
    entropy = output["loss_entropy"].reshape(response.shape)[response].mean()
    expected = plain_ppo(adapter, batch, rows)
    assert_same(adapter, objective, expected[0])
    assert_same(adapter, objective + entropy, sum(expected))
    dense = plain_ppo(adapter, batch, rows, dense=True)
    assert abs((objective - dense[0]).item()) > 1e-2
    assert_same(adapter, ppo_loss(adapter, True)(batch)["loss_objective"].reshape(4, -1)[response].mean(), dense[0])


def test_torchrl_ppo_with_functional_parameters():
    adapter, batch, _ = ppo_batch()
    torch.testing.assert_close(
        ppo_loss(adapter, functional=True)(batch)["loss_objective"], ppo_loss(adapter)(batch)["loss_objective"]
    )


def dpo_batch(side="left", drift=0.05):
    """Four rows are two pairs; the reference is the dense policy before the update."""
    adapter, _, rows = rollout()
    reference = dense_log_probs(adapter, rows)
    adapter, batch, rows = rollout(side, drift=drift)
    batch["next", "ref_log_probs", "full"] = pad_values(reference, side)
    return adapter, batch, rows, reference


def plain_margins(adapter, rows, reference, dense=False):
    """How much more the policy favours row 2i over row 2i + 1 than the reference does."""
    favour = []
    for row, other in zip(rows, reference, strict=True):
        ids, prompt = row[0], row[3]
        new = row_distributions(adapter, row, dense=dense).gather(1, ids[prompt:, None]).squeeze(1)
        favour.append(sum(new) - sum(other[prompt:].double()))
    return [favour[0] - favour[1], favour[2] - favour[3]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("drift", [0.0, 0.05], ids=["on policy", "off policy"])
@pytest.mark.parametrize("advantage", [[1.3, -0.4, 0.7, -1.6], [0.0, 1.0, -3.0, -2.0], [1.0, 0.0, 0.0, 1.0]])
def test_online_dpo_equals_its_formula(side, drift, advantage):
    adapter, batch, rows, reference = dpo_batch(side, drift)
    batch["advantage"] = torch.tensor(advantage)
    output = OnlineDPOLoss(adapter, beta=0.3, temperature=TEMPERATURE)(batch)
    margins = plain_margins(adapter, rows, reference)
    margins = [margin if advantage[2 * i] > advantage[2 * i + 1] else -margin for i, margin in enumerate(margins)]
    expected = sum(-(1 / (1 + (-0.3 * margin).exp())).log() for margin in margins) / 2
    assert_same(adapter, output.loss_dpo, expected)
    assert float(output.margin) == pytest.approx(sum(margin.item() for margin in margins) / 2, rel=1e-5)
    assert float(output.accuracy) == sum(margin.item() > 0 for margin in margins) / 2


def test_online_dpo_without_eviction_and_with_a_missing_mask():
    adapter, batch, rows, reference = dpo_batch()
    masked = OnlineDPOLoss(adapter, temperature=TEMPERATURE)(batch).loss_dpo
    del batch["shadow"]
    with pytest.raises(KeyError, match="no shadow mask"):
        OnlineDPOLoss(adapter)(batch)
    loss = OnlineDPOLoss(adapter, temperature=TEMPERATURE, dense=True)
    assert "shadow" not in loss.in_keys
    dense = loss(batch).loss_dpo
    margins = plain_margins(adapter, rows, reference, dense=True)
    assert_same(adapter, dense, sum(-nn.functional.logsigmoid(0.1 * margin) for margin in margins) / 2)
    assert abs((dense - masked).item()) > 1e-3


def test_online_dpo_on_ragged_rows():
    adapter, batch, rows, reference = dpo_batch()
    ragged = lazy_stack(
        [
            TensorDict(
                {
                    TOKENS: ids,
                    ("masks", "all_assistant_mask"): torch.arange(len(ids)) >= prompt,
                    LOG_PROBS: sampled,
                    ("next", "ref_log_probs", "full"): other,
                    "advantage": torch.tensor([advantage]),
                    "shadow": shadow,
                }
            )
            for (ids, shadow, sampled, prompt, advantage), other in zip(rows, reference, strict=True)
        ]
    )
    loss = OnlineDPOLoss(adapter, temperature=TEMPERATURE)
    assert_same(adapter, loss(ragged).loss_dpo, loss(batch).loss_dpo)


def test_online_dpo_ties_count_nowhere():
    adapter, batch, rows, reference = dpo_batch()
    loss = OnlineDPOLoss(adapter, beta=0.3, temperature=TEMPERATURE)
    batch["advantage"] = torch.tensor([1.0, 1.0, 0.0, 1.0])
    output = loss(batch)
    margin = -plain_margins(adapter, rows, reference)[1]
    assert_same(adapter, output.loss_dpo, -nn.functional.logsigmoid(0.3 * margin))
    assert float(output.accuracy) == float(margin > 0)
    batch["advantage"] = torch.ones(4)
    tied = loss(batch)
    assert tied.loss_dpo == 0 and tied.accuracy == 0 and tied.margin == 0
    assert all((grad == 0).all() for grad in gradients(adapter, tied.loss_dpo).values())


def test_online_dpo_micro_batches_add_up():
    adapter, batch, rows, reference = dpo_batch()
    loss = OnlineDPOLoss(adapter, temperature=TEMPERATURE)
    parts = []
    for start in (0, 2):
        part = pad_rows(rows[start : start + 2], "right")
        part["next", "ref_log_probs", "full"] = pad_values(reference[start : start + 2], "right")
        parts.append(loss(part, num_items=2).loss_dpo)
    assert_same(adapter, sum(parts), loss(batch).loss_dpo)


def test_online_dpo_refuses_what_is_no_pair():
    adapter, batch, _, _ = dpo_batch()
    loss = OnlineDPOLoss(adapter)
    with pytest.raises(ValueError, match=r"rows come in pairs.*got 3 rows"):
        loss(batch[:3])
    empty = batch.clone()
    empty["masks", "all_assistant_mask"][2] = False
    with pytest.raises(ValueError, match="at least one response token"):
        loss(empty)
    del batch["next"]
    with pytest.raises(KeyError, match="ref_log_probs"):
        loss(batch)
    with pytest.raises(ValueError, match="beta must be above 0"):
        OnlineDPOLoss(adapter, beta=0.0)


def test_dpo_learns_to_prefer():
    """The sign: after steps along the gradient the better response is likelier relative to the reference."""
    adapter, batch, _, _ = dpo_batch(drift=0.0)
    loss = OnlineDPOLoss(adapter, beta=0.3, temperature=TEMPERATURE)
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.05)
    first = loss(batch)
    for _ in range(5):
        optimizer.zero_grad()
        loss(batch).loss_dpo.backward()
        optimizer.step()
    last = loss(batch)
    assert last.margin > first.margin and last.loss_dpo < first.loss_dpo and last.accuracy == 1


# Metrics ------------------------------------------------------------------------------------------------------------


def test_mismatch_and_sample_size_are_their_formulas():
    ratios = torch.randn(50, generator=torch.Generator().manual_seed(0))
    values, weights = ratios.tolist(), [math.exp(value) for value in ratios.tolist()]
    assert float(mismatch_k1(ratios)) == pytest.approx(-sum(values) / 50, abs=1e-6)
    k3 = sum(math.exp(value) - 1 - value for value in values) / 50
    assert float(mismatch_k3(ratios)) == pytest.approx(k3, rel=1e-5)
    ess = sum(weights) ** 2 / (50 * sum(weight * weight for weight in weights))
    assert float(effective_sample_size(ratios)) == pytest.approx(ess, rel=1e-5)
    assert float(effective_sample_size(torch.tensor([0.0, -200.0]))) == pytest.approx(0.5)
    assert float(effective_sample_size(ratios + 300)) == pytest.approx(ess, rel=1e-4)


def test_mismatch_estimates_the_kl_of_the_sampler():
    generator = torch.Generator().manual_seed(0)
    sampler, policy = torch.randn(2, 6, generator=generator).log_softmax(-1)
    kl = float((sampler.exp() * (sampler - policy)).sum())
    drawn = torch.multinomial(sampler.exp(), 200_000, replacement=True, generator=generator)
    log_ratio = (policy - sampler)[drawn]
    assert float(mismatch_k1(log_ratio)) == pytest.approx(kl, rel=0.02)
    assert float(mismatch_k3(log_ratio)) == pytest.approx(kl, rel=0.02)


def test_metrics_without_tokens():
    none = torch.zeros(0)
    assert mismatch_k1(none) == 0 and mismatch_k3(none) == 0 and effective_sample_size(none) == 1


def test_acceptance_is_the_overlap():
    p, q = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0))
    expected = []
    for a, b in zip(p.tolist(), q.tolist(), strict=True):
        masses = [[math.exp(value) for value in row] for row in (a, b)]
        expected.append(sum(min(x / sum(masses[0]), y / sum(masses[1])) for x, y in zip(*masses, strict=True)))
    torch.testing.assert_close(acceptance(p, q), torch.tensor(expected))
    torch.testing.assert_close(acceptance(p, q), 1 - (p.softmax(-1) - q.softmax(-1)).abs().sum(-1) / 2)
    torch.testing.assert_close(acceptance(p, p), torch.ones(7))


def test_zero_variance_groups():
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.5, 0.5, 0.1, 0.1, 0.1])
    assert float(zero_variance_groups(rewards, 3)) == pytest.approx(2 / 3)
    assert zero_variance_groups(torch.zeros(4), 2) == 1
