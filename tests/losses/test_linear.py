"""The fused head against the formula written out, in value, gradient and memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from smdlib.losses import HeadTransform, linear_kl, linear_log_probs, linear_scores
from tests.cache.allocations import Allocations

TRANSFORMS = {
    "plain": HeadTransform(),
    "cold": HeadTransform(temperature=0.6),
    "hot": HeadTransform(temperature=1.5),
    "scaled": HeadTransform(temperature=0.8, scale=0.25),
    "capped": HeadTransform(softcap=2.0),
    "all": HeadTransform(temperature=0.7, scale=1.7, softcap=1.5),
}
EACH_TRANSFORM = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


def inputs(n=5, d=4, v=11, dtype=torch.float64, seed=0, with_bias=True, spread=1.0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (spread * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    hidden, teacher, weight = normal(n, d), normal(n, d), normal(v, d)
    bias = normal(v) if with_bias else None
    for tensor in (hidden, weight, bias):
        if tensor is not None:
            tensor.requires_grad_()
    return hidden, weight, bias, torch.randint(v, (n,), generator=generator), teacher


def plain(hidden, weight, bias, targets, teacher, transform=None, reverse=False):
    """Log-probs, entropy and KL with every logit at once, the teacher detached."""
    transform = transform or HeadTransform()

    def distribution(states, weight, bias):
        raw = F.linear(states, weight, bias) * transform.scale
        if transform.softcap is not None:
            raw = transform.softcap * torch.tanh(raw / transform.softcap)
        return (raw / transform.temperature).log_softmax(-1)

    student = distribution(hidden, weight, bias)
    taught = distribution(teacher, weight.detach(), None if bias is None else bias.detach())
    p, q = (student, taught) if reverse else (taught, student)
    kl = (p.exp() * (p - q)).sum(-1)
    return student.gather(1, targets[:, None]).squeeze(1), -(student.exp() * student).sum(-1), kl


def differentiable(*tensors):
    return [tensor for tensor in tensors if tensor is not None]


@EACH_TRANSFORM
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_gradcheck(transform, with_bias):
    hidden, weight, bias, targets, teacher = inputs(with_bias=with_bias)

    def scores(hidden, weight, bias=None):
        return linear_scores(hidden, weight, targets, bias=bias, transform=transform, block=4)[:2]

    assert torch.autograd.gradcheck(scores, differentiable(hidden, weight, bias))
    # The teacher shares weight and bias but passes no gradient on, so finite differences can only move the student.
    for reverse in (False, True):

        def kl(hidden, reverse=reverse):
            return linear_kl(hidden, weight, teacher, bias=bias, transform=transform, reverse=reverse, block=4)

        assert torch.autograd.gradcheck(kl, [hidden])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@EACH_TRANSFORM
@DIRECTIONS
def test_case_29_random_upstream_gradients_equal_the_plain_formula(dtype, tolerance, transform, reverse):
    hidden, weight, bias, targets, teacher = inputs(n=9, d=8, v=53, dtype=dtype)
    leaves = [hidden, weight, bias]
    actual = linear_scores(
        hidden, weight, targets, teacher, bias=bias, transform=transform, reverse_kl=reverse, block=10
    )
    expected = plain(hidden, weight, bias, targets, teacher, transform, reverse)
    generator = torch.Generator().manual_seed(7)
    upstream = [torch.randn(9, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]
    for mine, truth in zip(actual, expected, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, truth, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad(actual, leaves, upstream)
    for mine, truth in zip(grads, torch.autograd.grad(expected, leaves, upstream), strict=True):
        torch.testing.assert_close(mine, truth, rtol=tolerance, atol=tolerance * float(truth.abs().max()))


@pytest.mark.parametrize("used", [[0], [1], [2], [0, 1], [0, 2], [1, 2]], ids=str)
@DIRECTIONS
def test_unused_outputs_need_no_gradient(used, reverse):
    hidden, weight, bias, targets, teacher = inputs()
    leaves = [hidden, weight, bias]
    actual = linear_scores(hidden, weight, targets, teacher, bias=bias, reverse_kl=reverse, block=3)
    expected = plain(hidden, weight, bias, targets, teacher, reverse=reverse)
    mine = torch.autograd.grad(sum((actual[i] * (i + 1)).sum() for i in used), leaves)
    truth = torch.autograd.grad(sum((expected[i] * (i + 1)).sum() for i in used), leaves)
    torch.testing.assert_close(mine, truth)


@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias"])
def test_only_what_needs_a_gradient_gets_one(wanted):
    hidden, weight, bias, targets, teacher = inputs()
    leaf = {"hidden": hidden, "weight": weight, "bias": bias}[wanted]
    for tensor in (hidden, weight, bias):
        tensor.requires_grad_(tensor is leaf)
    sum(out.sum() for out in linear_scores(hidden, weight, targets, teacher, bias=bias, block=3)).backward()
    expected = torch.autograd.grad(sum(out.sum() for out in plain(hidden, weight, bias, targets, teacher)), leaf)
    torch.testing.assert_close(leaf.grad, expected[0])
    assert sum(tensor.grad is not None for tensor in (hidden, weight, bias)) == 1


def test_the_teacher_gets_no_gradient():
    hidden, weight, _, targets, teacher = inputs()
    teacher.requires_grad_()
    scores = linear_scores(hidden, weight, targets, teacher)
    grads = torch.autograd.grad(scores.kl.sum(), [hidden, teacher], allow_unused=True)
    assert grads[0] is not None and grads[1] is None


@pytest.mark.parametrize("v", [1, 5, 64, 65])
@pytest.mark.parametrize("block", [1, 3, 64, 1000, None])
def test_blocks_do_not_change_the_result(v, block):
    hidden, weight, bias, targets, teacher = inputs(v=v)
    actual = linear_scores(hidden, weight, targets, teacher, bias=bias, block=block)
    expected = plain(hidden, weight, bias, targets, teacher)
    for mine, truth in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, truth)
    grads = torch.autograd.grad(sum(out.sum() for out in actual), [hidden, weight, bias])
    torch.testing.assert_close(grads, torch.autograd.grad(sum(out.sum() for out in expected), [hidden, weight, bias]))


def test_without_tokens():
    hidden, weight, bias, targets, teacher = inputs(n=0)
    scores = linear_scores(hidden, weight, targets, teacher, bias=bias)
    assert [tuple(out.shape) for out in scores] == [(0,)] * 3
    grads = torch.autograd.grad(sum(out.sum() for out in scores), [hidden, weight, bias])
    assert grads[0].shape == (0, 4)
    assert all((grad == 0).all() for grad in grads[1:])


def test_equal_teacher_has_no_kl_and_no_gradient():
    hidden, weight, bias, _, _ = inputs(dtype=torch.float32)
    for reverse in (False, True):
        kl = linear_kl(hidden, weight, hidden.detach(), bias=bias, reverse=reverse)
        assert float(kl.detach().abs().max()) < 1e-6
        assert all(float(grad.abs().max()) < 1e-6 for grad in torch.autograd.grad(kl.sum(), [hidden, weight, bias]))


@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_huge_logits_stay_finite(spread):
    hidden, weight, bias, targets, teacher = inputs(dtype=torch.float32, v=40, spread=spread)
    scores = linear_scores(hidden, weight, targets, teacher, bias=bias, block=7)
    grads = torch.autograd.grad(sum(out.sum() for out in scores), [hidden, weight, bias])
    assert all(out.isfinite().all() for out in (*scores, *grads))
    doubles = [tensor.double() for tensor in (hidden, weight, bias)]
    for mine, truth in zip(scores, plain(*doubles, targets, teacher.double()), strict=True):
        torch.testing.assert_close(mine.double(), truth, rtol=1e-5, atol=1e-5 * spread**2)


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_agrees_with_torch_linear_cross_entropy(with_bias):
    hidden, weight, bias, targets, _ = inputs(n=64, d=32, v=501, dtype=torch.float32, with_bias=with_bias, spread=0.5)
    leaves = differentiable(hidden, weight, bias)
    mine = linear_log_probs(hidden, weight, targets, bias=bias, block=100)
    truth = -F.linear_cross_entropy(hidden, weight, targets, linear_bias=bias, reduction="none")
    torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-5)
    upstream = torch.linspace(-1, 1, 64)
    for grad, expected in zip(
        torch.autograd.grad(mine, leaves, upstream), torch.autograd.grad(truth, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_rounded_in_the_input_only():
    """Sums are float32: values equal those of float32 copies of the inputs; gradients are rounded once, to bf16."""
    hidden, weight, _, targets, teacher = inputs(n=64, d=64, v=999, dtype=torch.bfloat16, with_bias=False, spread=0.3)
    scores = linear_scores(hidden, weight, targets, teacher, block=100)
    assert all(out.dtype == torch.float32 for out in scores)
    wide = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    expected = plain(*wide, None, targets, teacher.float())
    for mine, truth in zip(scores, expected, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(sum(out.sum() for out in scores), [hidden, weight])
    for mine, truth in zip(grads, torch.autograd.grad(sum(out.sum() for out in expected), wide), strict=True):
        assert mine.dtype == torch.bfloat16
        # Half a unit in the last of 8 bits is 2^-9 = 0.2 % of a value.
        torch.testing.assert_close(mine.float(), truth, rtol=2**-8, atol=1e-5)


def test_bfloat16_against_float32_inputs():
    """What bf16 costs against float32 weights and states: below 0.05 nats a token here, 0.01 on average."""
    hidden, weight, _, targets, teacher = inputs(n=256, d=64, v=999, dtype=torch.float32, with_bias=False, spread=0.5)
    truth = linear_scores(hidden, weight, targets, teacher)
    mine = linear_scores(hidden.bfloat16(), weight.bfloat16(), targets, teacher.bfloat16())
    for half, full in zip(mine, truth, strict=True):
        gap = (half - full).detach().abs()
        assert float(gap.max()) < 0.05
        assert float(gap.mean()) < 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3)}, "do not fit"),
        ({"weight": torch.zeros(7, 5)}, "do not fit"),
        ({"targets": torch.zeros(4, dtype=torch.int64)}, r"targets must be \[N\]"),
        ({"targets": torch.tensor([0, 1, 7])}, r"targets must lie in \[0, 7\); got 0 to 7"),
        ({"targets": torch.tensor([0, -100, 1])}, "got -100 to 1"),
        ({"teacher_hidden": torch.zeros(2, 4)}, "differ"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    arguments = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(7, 4), "targets": torch.tensor([0, 1, 6])}
    with pytest.raises(ValueError, match=message):
        linear_scores(**(arguments | change))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_defines_no_distribution(temperature):
    with pytest.raises(ValueError, match="temperature must be above 0"):
        HeadTransform(temperature=temperature)


class LargestTensor(Allocations):
    """Also remembers the most elements that any operator's result had, other than the weight's gradient."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *(leaf.numel() for leaf in leaves if leaf.shape != (20000, 64))])
        return result


@pytest.mark.parametrize("transform", [HeadTransform(0.7), HeadTransform(0.7, 0.5, 3.0)], ids=["plain", "capped"])
@DIRECTIONS
@pytest.mark.parametrize("block", [512, None])
def test_no_full_logits_are_ever_allocated(transform, reverse, block):
    n, d, v = 256, 64, 20000
    hidden, weight, _, targets, teacher = inputs(n, d, v, torch.float32, with_bias=False, spread=0.3)
    with LargestTensor() as watch:
        scores = linear_scores(hidden, weight, targets, teacher, transform=transform, reverse_kl=reverse, block=block)
        forward = watch.peak
        total = sum(out.sum() for out in scores)
        grads = torch.autograd.grad(total, [hidden, weight])
    assert len(grads) == 2
    one_block = 4 * n * (block or 2048)  # 2 MiB by default
    assert watch.largest * 4 <= one_block
    backward = watch.peak - weight.nbytes
    assert forward < 4.5 * one_block
    assert backward < 7.5 * one_block
    if block == 512:
        assert max(forward, backward) < 4 * n * v / 3
