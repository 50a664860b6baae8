"""Presets, corrections and options of GRPOLoss: loss and gradients equal each paper's formula in plain loops.

The models are float64, so that a wrong constant cannot hide behind rounding; what is stored with the data (sampled and
old log-probs, advantages) is float32, as in a buffer.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from smdlib.losses import (
    CISPOSurrogate,
    ClippedSurrogate,
    GRPOLoss,
    MaskedIS,
    SparseRLCorrection,
    TruncatedIS,
    Unweighted,
    cispo,
    dapo,
    dr_grpo,
    grpo,
    gspo,
)
from tests.losses.reference import (
    TEMPERATURE,
    assert_same,
    dense_log_probs,
    gradients,
    move,
    pad_rows,
    pad_values,
    rollout,
    row_distributions,
)

LONGEST = 9  # Dr. GRPO's constant
CLIP = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "gspo wide": (0.1, 0.2)}
BUILD = {
    "grpo": grpo,
    "dr_grpo": lambda adapter, **options: dr_grpo(adapter, max_response_length=LONGEST, **options),
    "dapo": dapo,
    "gspo": gspo,
    "gspo wide": lambda adapter, **options: gspo(adapter, low=0.1, high=0.2, **options),
    "cispo": cispo,
}
SIDES = pytest.mark.parametrize("side", ["left", "right"])
DRIFTS = pytest.mark.parametrize("drift", [0.0, 0.05], ids=["on policy", "off policy"])
PRESETS = pytest.mark.parametrize("name", list(BUILD))


class Response(NamedTuple):
    """One sampled response: log-probs of its tokens now, when sampled (pi_old), by a reference; weights; advantage."""

    new: list[Tensor]
    old: list[float]
    weights: list[float]
    reference: list[float]
    advantage: float


@lru_cache
def data(drift: float):
    """Adapter after an update, rows, and the dense policy's log-probs before it."""
    adapter, _, rows = rollout(dtype=torch.float64)
    old = dense_log_probs(adapter, rows)
    move(adapter, drift, seed=3)  # some rows became likelier, some less
    return adapter, rows, old


def padded(drift: float, side: str):
    adapter, rows, old = data(drift)
    batch = pad_rows(rows, side)
    batch["log_probs", "old"] = batch["next", "ref_log_probs", "full"] = pad_values(old, side)
    return adapter, batch


def responses(drift: float, dense: bool = False, weigh=None) -> list[Response]:
    adapter, rows, old_rows = data(drift)
    found = []
    for row, old_row in zip(rows, old_rows, strict=True):
        ids, _, sampled, prompt, advantage = row
        distributions = row_distributions(adapter, row, dense=dense)
        new = [distributions[t, ids[prompt + t]] for t in range(len(ids) - prompt)]
        sampler, reference = sampled[prompt:].tolist(), old_row[prompt:].tolist()
        old = sampler if weigh is None else reference
        weights = [1.0] * len(new)
        if weigh is not None:
            weights = weigh([math.exp(o - s) for o, s in zip(reference, sampler, strict=True)])
        found.append(Response(new, old, weights, reference, advantage))
    return found


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def k3(new: Tensor, reference: float) -> Tensor:
    return (reference - new).exp() - (reference - new) - 1


def plain(name: str, rows: list[Response], beta: float = 0.0, dual: float | None = None) -> Tensor:
    """The objective of the paper, negated; the KL to the reference under the same mean."""
    low, high = CLIP.get(name, (0.0, 0.2))
    tokens = sum(len(row.new) for row in rows)
    total = torch.zeros((), dtype=torch.float64)
    for new, old, weights, reference, advantage in rows:
        length = len(new)
        # GSPO eq. 7: s_i = (pi(y_i|x) / pi_old(y_i|x)) ^ (1 / |y_i|)
        sequence_ratio = (sum(new) - sum(old)).exp() ** (1 / length)
        for log_prob, before, weight, other in zip(new, old, weights, reference, strict=True):
            ratio = (log_prob - before).exp()
            if name == "cispo":  # eq. 4: sg(clip(r, 0, 1 + eps)) A log pi
                objective = ratio.detach().clamp(max=1 + high) * advantage * log_prob
            elif name.startswith("gspo"):  # eq. 5
                objective = clipped(sequence_ratio, advantage, low, high)
            else:
                objective = clipped(ratio, advantage, low, high)
            if dual is not None and advantage < 0:
                objective = torch.maximum(objective, torch.tensor(dual * advantage, dtype=torch.float64))
            objective = weight * objective - beta * k3(log_prob, other)
            if name == "dr_grpo":  # 1 / G  sum_i  1 / L  sum_t
                total = total + objective / LONGEST / len(rows)
            elif name in ("dapo", "cispo"):  # 1 / (sum_i |y_i|)  sum_i sum_t
                total = total + objective / tokens
            else:  # 1 / G  sum_i  1 / |y_i|  sum_t
                total = total + objective / length / len(rows)
    return -total


@SIDES
@DRIFTS
@PRESETS
def test_preset_equals_its_paper(name, drift, side):
    adapter, batch = padded(drift, side)
    output = BUILD[name](adapter, temperature=TEMPERATURE)(batch)
    assert_same(adapter, output.loss_objective, plain(name, responses(drift)), rtol=1e-6)
    assert (output.clip_fraction > 0) == (drift > 0)


@pytest.mark.parametrize("side", ["left"])
@DRIFTS
@PRESETS
def test_preset_on_dense_data(name, drift, side):
    adapter, batch = padded(drift, side)
    del batch["shadow"]
    output = BUILD[name](adapter, temperature=TEMPERATURE, dense=True)(batch)
    assert_same(adapter, output.loss_objective, plain(name, responses(drift, dense=True)), rtol=1e-6)


def truncated(cap):
    return lambda ratios: [min(ratio, cap) for ratio in ratios]


def masked(low, high):
    return lambda ratios: [ratio if low <= ratio <= high else 0.0 for ratio in ratios]


def sequence_wise(rule):
    """Apply a rule to the geometric mean of the row's ratios."""
    return lambda ratios: rule([math.prod(ratios) ** (1 / len(ratios))]) * len(ratios)


def sparse_rl(low, cap, drop_below):
    def weigh(ratios):
        if min(ratios) < drop_below:
            return [0.0] * len(ratios)
        return [min(ratio, cap) if low <= ratio <= cap else 0.0 for ratio in ratios]

    return weigh


CORRECTIONS = {
    "unweighted": (Unweighted(), lambda ratios: [1.0] * len(ratios)),
    "truncated token": (TruncatedIS(1.2), truncated(1.2)),
    "truncated sequence": (TruncatedIS(0.9, "sequence"), sequence_wise(truncated(0.9))),
    "masked token": (MaskedIS(0.6, 1.4), masked(0.6, 1.4)),
    "masked sequence": (MaskedIS(0.5, 1.1, "sequence"), sequence_wise(masked(0.5, 1.1))),
    "sparse-rl": (SparseRLCorrection(), sparse_rl(0.5, 1.5, 1e-4)),
    "sparse-rl that drops": (SparseRLCorrection(0.5, 1.5, 0.045), sparse_rl(0.5, 1.5, 0.045)),
}


def corrected(drift: float, kind: str) -> list[Response]:
    rows = responses(drift, dense=True, weigh=CORRECTIONS[kind][1])
    if kind.startswith("sparse-rl"):  # the weights that remain have mean 1
        left = [weight for row in rows for weight in row.weights if weight > 0]
        mean = sum(left) / len(left)
        rows = [row._replace(weights=[weight / mean for weight in row.weights]) for row in rows]
    return rows


@pytest.mark.parametrize("kind", CORRECTIONS)
@DRIFTS
@SIDES
def test_correction_equals_its_rule(kind, drift, side):
    adapter, batch = padded(drift, side)
    expected = corrected(drift, kind)
    weights = [weight for row in expected for weight in row.weights]
    output = grpo(adapter, temperature=TEMPERATURE, dense=True, correction=CORRECTIONS[kind][0])(batch)
    assert_same(adapter, output.loss_objective, plain("grpo", expected), rtol=1e-6)
    rejected = sum(weight == 0 for weight in weights) / len(weights)
    assert float(output.rejected_fraction) == pytest.approx(rejected)
    assert (kind.split()[0] in ("truncated", "unweighted")) == (rejected == 0) and rejected < 1
    assert (len(set(weights)) > 1) == (kind != "unweighted")


@pytest.mark.parametrize("kind", ["truncated token", "masked sequence", "sparse-rl"])
@pytest.mark.parametrize("name", [name for name in BUILD if name != "grpo"])
def test_corrections_with_every_preset(kind, name):
    adapter, batch = padded(0.05, "left")
    loss = BUILD[name](adapter, temperature=TEMPERATURE, dense=True, correction=CORRECTIONS[kind][0])
    assert_same(adapter, loss(batch).loss_objective, plain(name, corrected(0.05, kind)), rtol=1e-6)


def test_sparse_rl_drops_a_whole_row_for_one_ratio():
    log_ratio = torch.tensor([0.0, 0.1, math.log(0.9e-4), 0.0, 0.2, math.log(1.1e-4)])
    value = SparseRLCorrection()(log_ratio, torch.tensor([2, 2, 2]))
    assert value.kept.tolist() == [True, True, False, False, True, False]
    assert float(value.weights[value.kept].mean()) == pytest.approx(1)


def test_sparse_rl_with_nothing_left_is_zero():
    adapter, batch = padded(0.05, "left")
    rule = SparseRLCorrection(low=0.999999, cap=0.999999, drop_below=0.9)
    loss = grpo(adapter, temperature=TEMPERATURE, dense=True, correction=rule)(batch)
    assert loss.rejected_fraction == 1 and loss.loss_objective == 0
    assert all((grad == 0).all() for grad in gradients(adapter, loss.loss_objective).values())


@pytest.mark.parametrize("correction", [kind for kind, _ in CORRECTIONS.values()], ids=CORRECTIONS)
def test_corrections_are_safe_where_the_sampler_gave_nothing(correction):
    log_ratio = torch.tensor([200.0, -200.0, 0.0, 0.1])
    value = correction(log_ratio, torch.tensor([2, 2]))
    assert value.weights.isfinite().all()
    assert (value.weights[~value.kept] == 0).all()


def test_a_correction_needs_old_log_probs_and_a_dense_learner():
    adapter, batch = padded(0.0, "left")
    loss = grpo(adapter, dense=True, correction=TruncatedIS())
    assert ("log_probs", "old") in loss.in_keys
    del batch["log_probs", "old"]
    with pytest.raises(KeyError, match=r"no log-probs at \('log_probs', 'old'\)"):
        loss(batch)
    with pytest.raises(ValueError, match="build it with dense=True"):
        grpo(adapter, correction=TruncatedIS())


@pytest.mark.parametrize(
    ("part", "options"),
    [
        (TruncatedIS, {"cap": 0.0}),
        (TruncatedIS, {"cap": math.inf}),
        (TruncatedIS, {"level": "row"}),
        (MaskedIS, {"low": 2.0, "high": 1.0}),
        (MaskedIS, {"level": "row"}),
        (SparseRLCorrection, {"low": 1.0, "cap": 0.5}),
        (SparseRLCorrection, {"low": 0.5, "drop_below": 0.6}),
        (CISPOSurrogate, {"high": math.inf}),
        (CISPOSurrogate, {"low": 2.0, "high": 1.0}),
    ],
)
def test_thresholds_out_of_range_are_errors(part, options):
    with pytest.raises(ValueError):
        part(**options)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "gspo"])
@DRIFTS
def test_kl_to_a_reference_is_k3_under_the_same_mean(name, drift):
    adapter, batch = padded(drift, "left")
    output = BUILD[name](adapter, temperature=TEMPERATURE, kl_to_ref_coeff=0.3)(batch)
    rows = responses(drift)
    actual = output.loss_objective + output.loss_kl_to_ref
    assert_same(adapter, actual, plain(name, rows, beta=0.3), rtol=1e-6)
    values = [float(k3(new.detach(), ref)) for row in rows for new, ref in zip(row.new, row.reference, strict=True)]
    assert float(output.kl_to_ref) == pytest.approx(sum(values) / len(values), rel=1e-5)
    assert output.loss_kl_to_ref > 0.01


def test_no_reference_is_read_without_a_weight():
    adapter, batch = padded(0.05, "left")
    del batch["next"]
    output = grpo(adapter, temperature=TEMPERATURE)(batch)
    assert output.loss_kl_to_ref is None and output.kl_to_ref is None
    with pytest.raises(KeyError, match="ref_log_probs"):
        grpo(adapter, kl_to_ref_coeff=0.1)(batch)


@pytest.mark.parametrize("dual", [1.05, 1.5])
def test_dual_clipping(dual):
    adapter, batch = padded(0.05, "left")
    loss = GRPOLoss(adapter, surrogate=ClippedSurrogate(0.2, 0.2, dual=dual), temperature=TEMPERATURE)
    output, rows = loss(batch), responses(0.05)
    assert_same(adapter, output.loss_objective, plain("grpo", rows, dual=dual), rtol=1e-6)
    without = grpo(adapter, temperature=TEMPERATURE)(batch)
    assert output.loss_objective < without.loss_objective
    assert output.clip_fraction_high > without.clip_fraction_high


def test_dual_clipping_stops_the_gradient_of_a_huge_ratio():
    log_prob = torch.tensor([2.0, 2.0, 0.1], requires_grad=True)
    value = ClippedSurrogate(dual=3.0)(log_prob, log_prob, torch.tensor([-1.0, 1.0, -1.0]))
    torch.testing.assert_close(value.objective, torch.tensor([-3.0, 1.2, -math.exp(0.1)]))
    assert value.clipped_high.tolist() == [True, True, False]
    value.objective.sum().backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor([0.0, 0.0, -math.exp(0.1)]))


def test_clip_fractions_count_tokens_without_gradient():
    adapter, batch = padded(0.05, "left")
    low = high = total = 0
    for row in responses(0.05):
        for new, old in zip(row.new, row.old, strict=True):
            ratio, total = math.exp(new.item() - old), total + 1
            low += ratio < 0.8 and row.advantage < 0
            high += ratio > 1.2 and row.advantage > 0
    output = grpo(adapter, temperature=TEMPERATURE)(batch)
    assert low > 0 and high > 0
    assert float(output.clip_fraction_low) == pytest.approx(low / total)
    assert float(output.clip_fraction_high) == pytest.approx(high / total)
    assert float(output.clip_fraction) == pytest.approx((low + high) / total)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    adapter, batch = padded(0.05, "left")
    output = cispo(adapter, high=1e-3, temperature=TEMPERATURE)(batch)
    assert output.clip_fraction == 1
    rows = responses(0.05)
    expected = -sum(1e-3 * row.advantage * new for row in rows for new in row.new) / sum(len(row.new) for row in rows)
    torch.testing.assert_close(output.loss_objective, expected)
    mine, truth = gradients(adapter, output.loss_objective), gradients(adapter, expected)
    for name, grad in truth.items():
        torch.testing.assert_close(mine[name], grad, rtol=1e-5, atol=1e-9)
    assert max(float(grad.abs().max()) for grad in mine.values()) > 1e-5


def test_metrics_are_those_of_the_loss_tokens():
    adapter, batch = padded(0.05, "left")
    output = grpo(adapter, temperature=TEMPERATURE)(batch)
    ratios = [new.item() - old for row in responses(0.05) for new, old in zip(row.new, row.old, strict=True)]
    weights = [math.exp(ratio) for ratio in ratios]
    expected = {
        "kl_approx": -sum(ratios) / len(ratios),
        "kl_approx_k3": sum(math.exp(ratio) - 1 - ratio for ratio in ratios) / len(ratios),
        "ESS": sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights)),
        "max_ratio": max(weights),
        "max_mismatch": max(map(abs, ratios)),
    }
    _, rows, _ = data(0.05)
    distributions = torch.cat([row_distributions(adapter, row) for row in rows]).detach()
    expected["entropy"] = float(-(distributions.exp() * distributions).sum(-1).mean())
    for name, value in expected.items():
        assert float(output.get(name)) == pytest.approx(value, rel=1e-5), name
