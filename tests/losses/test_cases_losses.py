"""Cases 16-30 of the public bug reports on losses, each by its number."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from smdlib import DenseToSparseKL, GRPOLoss, MaskedAttentionAdapter, ShadowMask, SMDLoss, group_advantage
from smdlib.losses import (
    CISPOSurrogate,
    ClippedSurrogate,
    ConstantMean,
    HeadTransform,
    MaskedIS,
    SequenceMean,
    SequenceRatio,
    SparseRLCorrection,
    TokenMean,
    TruncatedIS,
    Unweighted,
    linear_scores,
)
from smdlib.losses.linear import TokenScores
from smdlib.losses.tokens import TokenBatch, read_tokens
from tests.families import VOCAB, make_model
from tests.losses.reference import TEMPERATURE, assert_same, gradients, pad_rows, rollout, row_distributions
from tests.sampling import ragged_prompts, sample

AGGREGATIONS = {"token": TokenMean(), "sequence": SequenceMean(), "constant": ConstantMean(9)}
EACH_AGGREGATION = pytest.mark.parametrize("aggregation", AGGREGATIONS.values(), ids=AGGREGATIONS)
SURROGATES = {"clip": ClippedSurrogate(), "dual": ClippedSurrogate(dual=3.0), "cispo": CISPOSurrogate()}
EACH_SURROGATE = pytest.mark.parametrize("surrogate", SURROGATES.values(), ids=SURROGATES)
CORRECTIONS = [Unweighted(), TruncatedIS(), TruncatedIS(level="sequence"), MaskedIS(), MaskedIS(level="sequence"),
               SparseRLCorrection()]  # fmt: skip


def total(output):
    losses = [value for name, value in output.items() if name.startswith("loss_")]
    return torch.stack(losses).sum()


def all_zero(adapter, loss):
    return all((grad == 0).all() for grad in gradients(adapter, loss).values())


# 16 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("standardize", [True, False])
def test_case_16_equal_rewards_move_only_the_kl(standardize):
    adapter, batch, _ = rollout(drift=0.05)
    batch["advantage"] = group_advantage(torch.full((4,), 0.7), 4, standardize=standardize)
    assert (batch["advantage"] == 0).all()
    output = SMDLoss(adapter, grpo=GRPOLoss(adapter, temperature=TEMPERATURE))(batch)
    assert output.loss_objective == 0
    assert all_zero(adapter, output.loss_objective)
    assert output.loss_distill > 0
    assert max(float(grad.abs().max()) for grad in gradients(adapter, output.loss_distill).values()) > 1e-3


def test_case_16_equal_rewards_leave_the_kl_to_a_reference():
    adapter, batch, _ = rollout(drift=0.05)
    batch["advantage"] = torch.zeros(4)
    batch["next", "ref_log_probs", "full"] = batch["log_probs", "full"]
    output = GRPOLoss(adapter, kl_to_ref_coeff=0.1, temperature=TEMPERATURE)(batch)
    assert output.loss_objective == 0 and output.loss_kl_to_ref > 0
    assert max(float(grad.abs().max()) for grad in gradients(adapter, total(output)).values()) > 1e-3


# 17 -----------------------------------------------------------------------------------------------------------------


@EACH_AGGREGATION
@EACH_SURROGATE
@pytest.mark.parametrize("ratio", [None, SequenceRatio()], ids=["token", "sequence"])
def test_case_17_no_loss_tokens(aggregation, surrogate, ratio):
    adapter, batch, _ = rollout()
    batch["masks", "all_assistant_mask"][:] = False
    batch["next", "ref_log_probs", "full"] = batch["log_probs", "full"]
    grpo = GRPOLoss(adapter, ratio=ratio, surrogate=surrogate, aggregation=aggregation, kl_to_ref_coeff=0.1)
    output = SMDLoss(adapter, grpo=grpo, acceptance=True)(batch)
    assert total(output) == 0
    assert all(value.isfinite().all() for value in output.values())
    assert all_zero(adapter, total(output))
    total(output).backward()


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
def test_case_17_no_loss_tokens_to_correct(correction):
    adapter, batch, _ = rollout()
    batch["masks", "all_assistant_mask"][:] = False
    batch["log_probs", "old"] = batch["log_probs", "full"]
    output = GRPOLoss(adapter, dense=True, correction=correction)(batch)
    assert total(output) == 0 and all_zero(adapter, total(output))


# 18 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, -200.0, 200.0])
def test_case_18_what_lies_at_masked_tokens_is_never_computed_with(poison):
    adapter, batch, _ = rollout(drift=0.05)
    loss = GRPOLoss(adapter, dense=True, correction=TruncatedIS(), kl_to_ref_coeff=0.1, temperature=TEMPERATURE)
    clean = batch.clone()
    names = [("log_probs", "full"), ("log_probs", "old"), ("next", "ref_log_probs", "full")]
    masked = ~batch["masks", "all_assistant_mask"]
    for name in names:
        clean[name] = batch["log_probs", "full"].masked_fill(masked, -1.0)
        batch[name] = clean[name].masked_fill(masked, poison)
    batch["advantage"] = batch["advantage"][:, None].expand(masked.shape).masked_fill(masked, poison)[..., None]
    expected, actual = loss(clean), loss(batch)
    for name, value in expected.items():
        assert torch.equal(value, actual.get(name)), name
    truth, mine = gradients(adapter, total(expected)), gradients(adapter, total(actual))
    for name, grad in mine.items():
        assert grad.isfinite().all()
        assert torch.equal(grad, truth[name])


@EACH_SURROGATE
@pytest.mark.parametrize("ratio", [None, SequenceRatio()], ids=["token", "sequence"])
@pytest.mark.parametrize("sampled", [-200.0, -1e4])
def test_case_18_a_huge_ratio_times_no_advantage_is_nothing(surrogate, ratio, sampled):
    adapter, batch, _ = rollout(drift=0.05)
    batch["advantage"][1] = 0.0
    batch["log_probs", "full"][1, -1] = sampled
    loss = GRPOLoss(adapter, ratio=ratio, surrogate=surrogate, temperature=TEMPERATURE)
    output = loss(batch)
    assert output.loss_objective.isfinite()
    assert all(grad.isfinite().all() for grad in gradients(adapter, output.loss_objective).values())
    batch["log_probs", "full"][1, -1] = -1.0
    torch.testing.assert_close(output.loss_objective, loss(batch).loss_objective)


@EACH_SURROGATE
@pytest.mark.parametrize("log_ratio", [-1e4, -200.0, 200.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_case_18_surrogates_stay_finite(surrogate, log_ratio, advantage):
    log_prob = torch.tensor([-1.0], requires_grad=True)
    value = surrogate(log_prob + log_ratio, log_prob, torch.tensor([advantage]))
    grad = torch.autograd.grad(value.objective.sum(), log_prob)[0]
    assert value.objective.isfinite().all() and grad.isfinite().all()


# 19 -----------------------------------------------------------------------------------------------------------------


def flat(batch, log_probs, entropy, columns, side="right"):
    """The same rows with ``columns`` masked columns more, and their scores."""

    def more(values, fill):
        pad = (0, columns) if side == "right" else (columns, 0)
        return torch.nn.functional.pad(values, pad, value=fill)

    longer = replace(
        batch,
        input_ids=more(batch.input_ids, 0),
        attention_mask=more(batch.attention_mask, False),
        loss_mask=more(batch.loss_mask, False),
    )
    return TokenScores(log_probs, entropy, entropy * 0.1), longer


def random_batch():
    generator = torch.Generator().manual_seed(0)
    loss_mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 1]]).bool()
    count = int(loss_mask.sum())

    def normal():
        return 0.3 * torch.randn(count, generator=generator) - 1

    values = {name: normal() for name in ("sample_log_prob", "old_log_prob", "ref_log_probs", "advantage")}
    batch = TokenBatch(torch.ones(4, 5, dtype=torch.int64), torch.ones(4, 5).bool(), loss_mask, None, **values)
    return batch, normal(), normal().abs()


@EACH_AGGREGATION
@EACH_SURROGATE
@pytest.mark.parametrize("ratio", [None, SequenceRatio()], ids=["token", "sequence"])
@pytest.mark.parametrize("correction", [None, *CORRECTIONS], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_case_19_masked_columns_leave_every_bit(shared, aggregation, surrogate, ratio, correction, side):
    loss = GRPOLoss(shared, ratio=ratio, surrogate=surrogate, aggregation=aggregation, correction=correction,
                    dense=True, kl_to_ref_coeff=0.2)  # fmt: skip
    distill = DenseToSparseKL(shared, aggregation=aggregation)
    batch, log_probs, entropy = random_batch()
    short = loss.from_scores(*flat(batch, log_probs, entropy, 0))
    kl = distill.from_scores(*flat(batch, log_probs, entropy, 0))
    for columns in (1, 3, 17):
        longer = loss.from_scores(*flat(batch, log_probs, entropy, columns, side))
        for name, value in short.items():
            assert torch.equal(value, longer.get(name)), name
        more = distill.from_scores(*flat(batch, log_probs, entropy, columns, side))
        assert torch.equal(kl.loss_distill, more.loss_distill)


@pytest.fixture(scope="module")
def shared():
    return MaskedAttentionAdapter(make_model("llama"))


@pytest.mark.parametrize("side", ["left", "right"])
@EACH_AGGREGATION
def test_case_19_through_the_model(side, aggregation):
    adapter, _, rows = rollout(drift=0.05)
    grpo = GRPOLoss(adapter, aggregation=aggregation, temperature=TEMPERATURE)
    distill = DenseToSparseKL(adapter, aggregation=aggregation, temperature=TEMPERATURE)
    loss = SMDLoss(adapter, grpo=grpo, distill=distill)
    outputs = [loss(pad_rows(rows, side, extra)) for extra in (0, 1, 6)]
    for output in outputs[1:]:
        for name, value in outputs[0].items():
            tolerance = 1e-6 if name.startswith("loss_") else 1e-5
            torch.testing.assert_close(output.get(name), value, rtol=tolerance, atol=tolerance)


# 20 -----------------------------------------------------------------------------------------------------------------


def eight_rows():
    """Two groups of four rows of one model, of uneven length, off policy."""
    adapter, _, rows = rollout()
    model = adapter.model
    taken = sample(model, "streaming", 0.5, prompts=ragged_prompts([5, 12, 8, 7], VOCAB, 3), new_tokens=9,
                   evict_every=1, eos=[3, 4, 5, 6], ends={0: 2, 3: 6}, seed=5)  # fmt: skip
    with torch.no_grad():
        log_probs = adapter.log_probs(taken.tokens, taken.attention_mask, taken.shadow, TEMPERATURE)
    for row, advantage in enumerate([-0.9, 0.2, 1.1, -0.4]):
        real, length = taken.attention_mask[row].bool(), int(taken.lengths[row])
        shadow = ShadowMask(evicted_at=taken.shadow.evicted_at[row, :length], batch_size=[])
        prompt = length - int(taken.response_mask[row].sum())
        rows.append((taken.tokens[row][real], shadow, log_probs[row][real], prompt, advantage))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for weight in adapter.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator) * weight.std()
    return adapter, rows


@EACH_AGGREGATION
@pytest.mark.parametrize("size", [1, 2, 3])
def test_case_20_micro_batches_have_the_gradient_of_the_batch(aggregation, size):
    adapter, rows = eight_rows()
    loss = SMDLoss(
        adapter,
        grpo=GRPOLoss(adapter, aggregation=aggregation, temperature=TEMPERATURE),
        distill=DenseToSparseKL(adapter, aggregation=aggregation, temperature=TEMPERATURE),
    )
    whole = loss(pad_rows(rows, "left"))
    lengths = torch.tensor([len(row[0]) - row[3] for row in rows])
    assert len(set(lengths.tolist())) > 3
    items = loss.grpo.aggregation.count(lengths), loss.distill.aggregation.count(lengths)
    parts = [loss(pad_rows(rows[start : start + size], "left"), *items) for start in range(0, 8, size)]
    assert_same(adapter, sum(total(part) for part in parts), total(whole))
    # Means of means are another number: what forgetting the counts gives.
    naive = sum(total(loss(pad_rows(rows[start : start + size], "left"))) for start in range(0, 8, size))
    if size == 3:
        assert abs((naive / len(parts) - total(whole)).item()) > 1e-3


def test_case_20_accumulated_backward():
    adapter, rows = eight_rows()
    loss = SMDLoss(adapter, grpo=GRPOLoss(adapter, temperature=TEMPERATURE, kl_to_ref_coeff=0.1))
    lengths = torch.tensor([len(row[0]) - row[3] for row in rows])

    def read(part):
        batch = pad_rows(part, "right")
        batch["next", "ref_log_probs", "full"] = batch["log_probs", "full"]
        return batch

    expected = gradients(adapter, total(loss(read(rows))))
    for start in range(0, 8, 2):
        total(loss(read(rows[start : start + 2]), 8, int(lengths.sum()))).backward()
    for name, weight in adapter.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], rtol=1e-4, atol=1e-5)


# 21 -----------------------------------------------------------------------------------------------------------------


def test_case_21_sequence_ratio_is_the_hand_formula():
    lengths = [3, 0, 1, 4]
    values = torch.linspace(-0.5, 0.9, sum(lengths))
    expected, start = [], 0
    for length in lengths:
        row = values[start : start + length].tolist()
        expected += [math.log(math.prod(math.exp(value) for value in row) ** (1 / length))] * length if length else []
        start += length
    torch.testing.assert_close(SequenceRatio()(values, torch.tensor(lengths)), torch.tensor(expected))


@pytest.mark.parametrize("side", ["left", "right"])
def test_case_21_padding_does_not_change_the_sequence_ratio(side):
    adapter, _, rows = rollout(drift=0.05)
    loss = GRPOLoss(adapter, ratio=SequenceRatio(), temperature=TEMPERATURE)
    expected = 0.0
    for row in rows:
        new = row_distributions(adapter, row).gather(1, row[0][row[3] :, None]).squeeze(1)
        ratio = (new - row[2][row[3] :]).mean().exp()
        expected = expected - torch.minimum(ratio * row[4], ratio.clamp(0.8, 1.2) * row[4]) / len(rows)
    for extra in (0, 5):
        assert_same(adapter, loss(pad_rows(rows, side, extra)).loss_objective, expected)


# 22 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_case_22_temperature(temperature):
    adapter, batch, rows = rollout(temperature=temperature)
    output = SMDLoss(adapter, grpo=GRPOLoss(adapter, temperature=temperature))(batch)
    assert abs(float(output.max_ratio) - 1) < 1e-4
    assert abs(float(output.kl_approx)) < 1e-5 and abs(float(output.ESS) - 1) < 1e-5
    tempered = torch.cat([row_distributions(adapter, row, temperature=temperature) for row in rows]).detach()
    entropy = -(tempered.exp() * tempered).sum(-1).mean()
    assert float(output.entropy) == pytest.approx(float(entropy), rel=1e-5)
    dense = [row_distributions(adapter, row, dense=True, temperature=temperature) for row in rows]
    dense = torch.cat(dense).detach()
    kl = (dense.exp() * (dense - tempered)).sum(-1).mean()
    assert float(output.kl_dense_to_sparse) == pytest.approx(float(kl), rel=1e-5)
    other = GRPOLoss(adapter, temperature=temperature + 0.3)(batch)
    assert abs(float(other.max_ratio) - 1) > 0.05


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_case_22_no_distribution(temperature):
    adapter, _, _ = rollout()
    for build in (GRPOLoss, DenseToSparseKL):
        with pytest.raises(ValueError, match="temperature must be above 0"):
            build(adapter, temperature=temperature)


# 23 -----------------------------------------------------------------------------------------------------------------


def test_case_23_dropout_in_train_mode_is_an_error():
    import transformers as hf

    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=4, attn_pdrop=0.1))
    adapter = MaskedAttentionAdapter(model.eval())
    taken = sample(model, "streaming", 0.5, prompts=ragged_prompts([9, 6], VOCAB), new_tokens=5, evict_every=1)
    batch = TensorDict(
        {
            ("tokens", "full"): taken.tokens,
            ("masks", "all_attention_mask"): taken.attention_mask.bool(),
            ("masks", "all_assistant_mask"): taken.response_mask,
            ("log_probs", "full"): taken.sampled,
            "advantage": torch.tensor([1.0, -1.0]),
            "shadow": taken.shadow,
        },
        [2],
    )
    assert abs(float(GRPOLoss(adapter)(batch).max_ratio) - 1) < 1e-4
    model.train()
    for loss in (GRPOLoss(adapter), GRPOLoss(adapter, dense=True), DenseToSparseKL(adapter), SMDLoss(adapter)):
        with pytest.raises(ValueError, match="train mode with dropout"):
            loss(batch)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        setattr(model.config, name, 0.0)
    assert abs(float(GRPOLoss(adapter)(batch).max_ratio) - 1) < 1e-4


# 24 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_case_24_log_probs_do_not_depend_on_the_batch_size(side):
    adapter, rows = eight_rows()

    def scores(part):
        batch = pad_rows(part, side)
        with torch.no_grad():
            found = adapter.log_probs(
                batch["tokens", "full"], batch["masks", "all_attention_mask"], batch["shadow"], TEMPERATURE
            )
        return found[batch["masks", "all_assistant_mask"]]

    torch.testing.assert_close(torch.cat([scores([row]) for row in rows]), scores(rows), rtol=0, atol=1e-5)


def test_case_24_losses_do_not_depend_on_the_batch_size():
    adapter, rows = eight_rows()
    loss = GRPOLoss(adapter, temperature=TEMPERATURE)
    alone = [loss(pad_rows([row], "left"), num_items=8).loss_objective for row in rows]
    torch.testing.assert_close(sum(alone), loss(pad_rows(rows, "left")).loss_objective, rtol=1e-5, atol=1e-6)


# 25 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_case_25_left_padding(family):
    adapter, _, rows = rollout(family=family)
    loss = SMDLoss(adapter, grpo=GRPOLoss(adapter, temperature=TEMPERATURE))
    for row in rows:
        outputs = [loss(pad_rows([row], "left", extra)) for extra in (0, 5)]
        for output in outputs:
            assert abs(float(output.max_ratio) - 1) < 1e-4
        for name, value in outputs[0].items():
            torch.testing.assert_close(outputs[1].get(name), value, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_case_25_left_padding_gives_the_same_record(family):
    model = make_model(family)
    adapter = MaskedAttentionAdapter(model)
    ids, mask = ragged_prompts([11], VOCAB)
    padded = (torch.nn.functional.pad(ids, (5, 0)), torch.nn.functional.pad(mask, (5, 0)))
    plain, wide = (
        sample(model, "snapkv", 0.5, prompts=prompts, new_tokens=8, evict_every=1) for prompts in ((ids, mask), padded)
    )
    assert torch.equal(plain.tokens, wide.tokens[:, 5:])
    assert torch.equal(plain.shadow.evicted_at, wide.shadow.evicted_at)
    with torch.no_grad():
        alone = adapter.log_probs(plain.tokens, plain.attention_mask, plain.shadow)
        padded_scores = adapter.log_probs(wide.tokens, wide.attention_mask, wide.shadow)
    torch.testing.assert_close(padded_scores[:, 6:], alone[:, 1:], rtol=0, atol=1e-5)


# 26 -----------------------------------------------------------------------------------------------------------------


def test_case_26_pad_equals_eos():
    """The mask says what a token is, not its id: the sampled EOS (id 0 = pad) is trained on, the padding is not."""
    model = make_model("llama")
    adapter = MaskedAttentionAdapter(model)
    taken = sample(model, "streaming", 0.5, prompts=ragged_prompts([8, 6], VOCAB), new_tokens=6, evict_every=1,
                   eos=[0], ends={0: 3})  # fmt: skip
    assert taken.tokens[0, -4:].tolist() == [0] * 4
    assert taken.response_mask[0].sum() == 3  # two tokens and their EOS
    batch = TensorDict(
        {
            ("tokens", "full"): taken.tokens,
            ("masks", "all_attention_mask"): taken.attention_mask.bool(),
            ("masks", "all_assistant_mask"): taken.response_mask,
            ("log_probs", "full"): taken.sampled,
            "advantage": torch.tensor([1.0, -1.0]),
            "shadow": taken.shadow,
        },
        [2],
    )
    read = read_tokens(batch, GRPOLoss(adapter).tensor_keys, shadow=True)
    assert read.lengths.tolist() == [3, 6]
    assert read.targets[2] == 0
    output = GRPOLoss(adapter)(batch)
    assert abs(float(output.max_ratio) - 1) < 1e-4
    row = (taken.tokens[0][taken.attention_mask[0].bool()], taken.shadow[0].crop(11), None, 8, 1.0)
    eos = row_distributions(adapter, row, temperature=1.0)[2, 0]
    assert float(read.sample_log_prob[2]) == pytest.approx(eos.item(), abs=1e-4)


@EACH_AGGREGATION
@pytest.mark.parametrize("ratio", [None, SequenceRatio()], ids=["token", "sequence"])
def test_case_26_an_empty_completion_is_accepted(aggregation, ratio):
    adapter, batch, rows = rollout(drift=0.05)
    batch["masks", "all_assistant_mask"][1] = False
    loss = GRPOLoss(adapter, ratio=ratio, aggregation=aggregation, temperature=TEMPERATURE)
    smd = SMDLoss(adapter, grpo=loss)
    output = smd(batch)
    others = pad_rows([row for index, row in enumerate(rows) if index != 1], "left")
    items = int(aggregation.count(batch["masks", "all_assistant_mask"].sum(1)))
    expected = loss(others, num_items=items).loss_objective
    assert_same(adapter, output.loss_objective, expected)
    assert all(value.isfinite().all() for value in output.values())


# 27 -----------------------------------------------------------------------------------------------------------------


def test_case_27_tokens_in_tokens_out():
    """Losses score the ids that are stored; they have no text and no tokenizer to make others of."""
    adapter, batch, rows = rollout()
    loss = GRPOLoss(adapter, temperature=TEMPERATURE)
    read = read_tokens(batch, loss.tensor_keys, shadow=True)
    assert torch.equal(read.targets, torch.cat([row[0][row[3] :] for row in rows]))
    assert not any("text" in str(key) or "history" in str(key) for key in loss.in_keys)


def test_case_27_rows_of_another_length_are_an_error():
    """Re-tokenising 29 sampled tokens gave 35: the record no longer covers them."""
    adapter, _, rows = rollout()
    ids, shadow, sampled, prompt, advantage = rows[0]
    longer = (torch.cat([ids, ids[-6:]]), shadow, torch.cat([sampled, sampled[-6:]]), prompt, advantage)
    with pytest.raises(ValueError, match="shadow mask covers"):
        GRPOLoss(adapter)(pad_rows([longer], "left"))
    batch = pad_rows(rows, "left")
    batch["log_probs", "full"] = batch["log_probs", "full"][:, 1:]
    with pytest.raises(ValueError, match="has shape"):
        GRPOLoss(adapter)(batch)


def test_case_27_other_ids_of_the_same_length_show_in_the_mismatch():
    adapter, batch, _ = rollout()
    loss = GRPOLoss(adapter, temperature=TEMPERATURE)
    assert float(loss(batch).kl_approx_k3) < 1e-6
    changed = batch.clone()
    ids = changed["tokens", "full"]
    ids[0, -3] = (ids[0, -3] + 1) % VOCAB
    assert float(loss(changed).kl_approx_k3) > 1e-2


# 28 -----------------------------------------------------------------------------------------------------------------


def test_case_28_group_of_one():
    for standardize in (True, False):
        with pytest.raises(ValueError, match="group_size=1"):
            group_advantage(torch.ones(4), 1, standardize=standardize)


# 29 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_case_29_fused_head_with_random_upstream_gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, teacher = (torch.randn(*shape, generator=generator) for shape in ((7, 6), (31, 6), (7, 6)))
    targets = torch.randint(31, (7,), generator=generator)
    upstream = torch.randn(3, 7, generator=generator)
    hidden.requires_grad_(), weight.requires_grad_()
    fused = linear_scores(hidden, weight, targets, teacher, transform=HeadTransform(0.7), block=8)
    student = (hidden @ weight.T / 0.7).log_softmax(-1)
    taught = (teacher @ weight.detach().T / 0.7).log_softmax(-1)
    plain = (
        student[torch.arange(7), targets],
        -(student.exp() * student).sum(-1),
        (taught.exp() * (taught - student)).sum(-1),
    )
    torch.testing.assert_close(torch.stack(tuple(fused)), torch.stack(plain), rtol=1e-5, atol=1e-5)
    mine = torch.autograd.grad(fused, [hidden, weight], list(upstream))
    truth = torch.autograd.grad(plain, [hidden, weight], list(upstream))
    torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-5)


# 30 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [GRPOLoss, DenseToSparseKL, SMDLoss])
def test_case_30_a_missing_mask_is_an_error(build):
    adapter, batch, _ = rollout()
    loss, passes = build(adapter), []
    hook = adapter.model.base_model.register_forward_hook(lambda *_: passes.append(1))
    for drop in (True, False):
        data = batch.clone()
        if drop:
            del data["shadow"]
        else:
            data.rename_key_("shadow", "mask")
        with pytest.raises(KeyError, match="no shadow mask at 'shadow'"):
            loss(data)
    assert passes == []
    hook.remove()


def test_case_30_one_row_without_its_mask_is_an_error():
    from tensordict import lazy_stack

    adapter, _, rows = rollout()
    ragged = []
    for index, (ids, shadow, sampled, prompt, advantage) in enumerate(rows):
        row = TensorDict(
            {
                ("tokens", "full"): ids,
                ("masks", "all_assistant_mask"): torch.arange(len(ids)) >= prompt,
                ("log_probs", "full"): sampled,
                "advantage": torch.tensor([advantage]),
            }
        )
        ragged.append(row.set("shadow", shadow) if index else row)
    with pytest.raises(KeyError, match="no shadow mask at 'shadow'"):
        GRPOLoss(adapter)(lazy_stack(ragged))


def test_case_30_track_2_needs_the_mask_too():
    adapter, batch, _ = rollout()
    del batch["shadow"]
    with pytest.raises(KeyError, match="no shadow mask"):
        SMDLoss(adapter, grpo=GRPOLoss(adapter, dense=True))(batch)
    assert GRPOLoss(adapter, dense=True)(batch).retained_keys is None
