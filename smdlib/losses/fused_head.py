"""The fused head's autograd function: blocks of the vocabulary, walked once forward and once backward.

Each block's logits live only while its sums are taken. Backward they are computed again, and the block's rows of the
weight gradient are written directly; so neither logits nor a second weight gradient ever exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadTransform:
    """From raw logits (product of hidden state and weight, plus bias) to those of the softmax.

    ``cap(scale * raw) / temperature``.

    Args:
        temperature: The sampler's, above 0.
        scale: Factor of the raw logits.
        softcap: ``c`` of ``c * tanh(x / c)``, or ``None``.

    Example:
        >>> HeadTransform(temperature=2.0)(torch.tensor([4.0]))
        tensor([2.])
    """

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}; greedy decoding has no log-probs.")
        if not math.isfinite(self.scale) or self.scale == 0 or (self.softcap is not None and not self.softcap > 0):
            raise ValueError(f"scale must be a finite factor and softcap above 0, not {self.scale} and {self.softcap}.")

    def __call__(self, raw: Tensor) -> Tensor:
        """Transform raw logits in place and return them."""
        if self.softcap is None:
            return raw.mul_(self.scale / self.temperature)
        return raw.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def backward(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient of the transformed ``logits`` into that of the raw ones, in place."""
        gradient.mul_(self.scale / self.temperature)
        if self.softcap is not None:
            tanh = logits * (self.temperature / self.softcap)
            gradient.mul_(1 - tanh.square_())
        return gradient


class _Sums:
    """Running sums over blocks of the vocabulary, kept relative to the largest logit so far."""

    def __init__(self, like: Tensor) -> None:
        count = like.shape[0]
        self.top = like.new_full((count,), -torch.inf)
        self.mass = like.new_zeros(count)
        self.weighted = [like.new_zeros(count) for _ in range(2)]

    def add(self, logits: Tensor, *values: Tensor) -> None:
        """Add ``exp(logits)`` and ``exp(logits) * value`` of a block ``[N, v]``."""
        top = torch.maximum(self.top, logits.amax(1))
        shrink = (self.top - top).exp_()
        self.top = top
        mass = (logits - top[:, None]).exp_()
        self.mass.mul_(shrink).add_(mass.sum(1))
        for total, value in zip(self.weighted, values, strict=False):
            total.mul_(shrink).add_(torch.linalg.vecdot(mass, value))

    @property
    def log_mass(self) -> Tensor:
        """``logsumexp`` of all logits, ``[N]``."""
        return self.mass.log() + self.top

    def mean(self, which: int) -> Tensor:
        """Expectation of a weighted value, ``[N]``."""
        return self.weighted[which] / self.mass


class FusedHead(torch.autograd.Function):
    """Forward: three sums per token. Backward: the blocks again, for any upstream gradient."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        teacher: Tensor | None,
        transform: HeadTransform,
        reverse: bool,
        block: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log-probs, entropy and KL ``[N]``."""
        head = _Blocks(weight, bias, transform, block)
        student = hidden.to(head.dtype)
        taught = None if teacher is None else teacher.to(head.dtype)
        sums, teacher_sums = _Sums(student), _Sums(student)
        target_logit = torch.zeros_like(sums.top)
        for start, stop in head.ranges:
            logits = head.logits(student, start, stop)
            inside = (targets >= start) & (targets < stop)
            local = torch.where(inside, targets - start, 0)
            target_logit += torch.where(inside, logits.gather(1, local[:, None]).squeeze(1), 0.0)
            if taught is None:
                sums.add(logits, logits)
                continue
            teacher_logits = head.logits(taught, start, stop)
            if reverse:
                sums.add(logits, logits, teacher_logits)
                teacher_sums.add(teacher_logits)
            else:
                sums.add(logits, logits)
                teacher_sums.add(teacher_logits, teacher_logits, logits)
        log_mass = sums.log_mass
        entropy = log_mass - sums.mean(0)
        kl = None
        if taught is not None:
            teacher_mass = teacher_sums.log_mass
            if reverse:
                kl = sums.mean(0) - log_mass - sums.mean(1) + teacher_mass
            else:
                kl = teacher_sums.mean(0) - teacher_mass - teacher_sums.mean(1) + log_mass
            ctx.save_for_backward(hidden, weight, bias, targets, log_mass, entropy, teacher, teacher_mass, kl)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, log_mass, entropy, None, None, None)
        ctx.transform, ctx.reverse, ctx.block = transform, reverse, block
        ctx.set_materialize_grads(False)
        return target_logit - log_mass, entropy, kl

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None, grad_kl: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias."""
        hidden, weight, bias, targets, log_mass, entropy, teacher, teacher_mass, kl = ctx.saved_tensors
        head = _Blocks(weight, bias, ctx.transform, ctx.block)
        student = hidden.to(head.dtype)
        taught = teacher.to(head.dtype) if grad_kl is not None else None
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(student) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None

        # d/dz_j = p_j * (constant + slope * log p_j) + [other terms]
        constant, slope = torch.zeros_like(log_mass), None
        if grad_log_prob is not None:
            constant = constant - grad_log_prob
        if grad_entropy is not None:
            constant, slope = constant - grad_entropy * entropy, -grad_entropy
        if grad_kl is not None:
            if ctx.reverse:
                constant = constant - grad_kl * kl
                slope = grad_kl if slope is None else slope + grad_kl
            else:
                constant = constant + grad_kl
        rows = torch.arange(targets.shape[0], device=targets.device)
        for start, stop in head.ranges:
            logits = head.logits(student, start, stop)
            log_prob = logits - log_mass[:, None]
            factor = constant[:, None] if slope is None else torch.addcmul(constant[:, None], slope[:, None], log_prob)
            if taught is not None and grad_kl is not None:
                teacher_log_prob = head.logits(taught, start, stop).sub_(teacher_mass[:, None])
                if ctx.reverse:
                    factor = factor - grad_kl[:, None] * teacher_log_prob
                gradient = log_prob.exp_().mul_(factor)
                if not ctx.reverse:
                    gradient.sub_(teacher_log_prob.exp_().mul_(grad_kl[:, None]))
            else:
                gradient = log_prob.exp_().mul_(factor)
            if grad_log_prob is not None:
                inside = (targets >= start) & (targets < stop)
                gradient[rows[inside], targets[inside] - start] += grad_log_prob[inside]
            gradient = head.transform.backward(gradient, logits)
            if grad_hidden is not None:
                grad_hidden.addmm_(gradient, head.weight(start, stop))
            if grad_weight is not None:
                grad_weight[start:stop] = gradient.T @ student
            if grad_bias is not None:
                grad_bias[start:stop] = gradient.sum(0)
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


class _Blocks:
    """The head's weight, seen in blocks of the vocabulary and in at least float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, transform: HeadTransform, block: int) -> None:
        self._weight, self._bias, self.transform = weight, bias, transform
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        size = weight.shape[0]
        self.ranges = [(start, min(start + block, size)) for start in range(0, size, block)]

    def weight(self, start: int, stop: int) -> Tensor:
        """Rows of the weight, ``[v, D]``."""
        return self._weight[start:stop].to(self.dtype)

    def logits(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Transformed logits of a block, ``[N, v]``."""
        raw = hidden @ self.weight(start, stop).T
        if self._bias is not None:
            raw += self._bias[start:stop]
        return self.transform(raw)
