"""Budgets that shrink while a response is decoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .adaptive import ScoreAllocation
from .budget import Allocation, UniformAllocation
from .errors import PolicyError


@runtime_checkable
class StepwiseAllocation(Allocation, Protocol):
    """An allocation that also says what is left of a budget after some decoded tokens.

    Example:
        >>> isinstance(StepAllocation(every=8), StepwiseAllocation), isinstance(UniformAllocation(), StepwiseAllocation)
        (True, False)
    """

    def after(self, budget: Tensor, decoded: int) -> Tensor:
        """Keys that each head may keep at an eviction while decoding.

        Args:
            budget: ``[B, H]`` int64, that of the prefill.
            decoded: Tokens decoded since then.

        Returns:
            ``[B, H]`` int64, from 1 to ``budget``: storage does not grow.
        """
        ...


@dataclass(frozen=True)
class StepAllocation:
    """Shrinks another allocation's budgets by ``factor`` every ``every`` decoded tokens.

    After n decoded tokens a head may keep ``max(1, floor(budget * max(least, factor ** (n // every))))`` keys. It acts
    at the cache's evictions while decoding (``evict_every``); the slots that become free take the tokens to come.

    Attributes:
        every: decoded tokens from one step to the next.
        factor: share of the budget that a step leaves, above 0 and at most 1.
        least: share of the budget that always stays.
        allocation: where budgets start from.

    Raises:
        ValueError: a number is out of range.
        TypeError: the allocation decides by scores, which would have to be asked again at every step.

    Example:
        >>> allocation = StepAllocation(every=8, factor=0.5, least=0.2)
        >>> [allocation.after(torch.tensor([[40]]), decoded).item() for decoded in (7, 8, 16, 24, 800)]
        [40, 20, 10, 8, 8]
    """

    every: int
    factor: float = 0.9
    least: float = 0.25
    allocation: Allocation = field(default_factory=UniformAllocation)

    def __post_init__(self) -> None:
        """Refuses numbers that are no schedule."""
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"StepAllocation.every is {self.every!r}, expected a number of tokens, at least 1")
        for name in ("factor", "least"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise ValueError(f"StepAllocation.{name} is {value!r}, expected a share above 0 and at most 1")
        if isinstance(self.allocation, ScoreAllocation):
            raise TypeError(
                f"StepAllocation cannot shrink {type(self.allocation).__name__}, whose budgets come from scores; "
                "give it one that knows its budgets beforehand, such as UniformAllocation"
            )

    def __call__(self, budget: Tensor, num_layers: int, num_kv_heads: int) -> Tensor:
        """Keys that each layer and head may keep after the prefill, ``[L, B, H]`` int64; see `Allocation`."""
        return self.allocation(budget, num_layers, num_kv_heads)

    def after(self, budget: Tensor, decoded: int) -> Tensor:
        """Keys that each head may keep after ``decoded`` tokens, ``[B, H]`` int64; see `StepwiseAllocation`."""
        share = max(self.least, self.factor ** (decoded // self.every))
        # In double precision, with a hair on top: 0.1 * 30 is meant to be 3.
        return (budget.double() * share + 1e-9).floor().long().clamp(min=1)


def stepped(allocation: StepwiseAllocation, budget: Tensor, decoded: int) -> Tensor:
    """The budgets after some decoded tokens, refused if they could not be used.

    Args:
        allocation: the allocation.
        budget: ``[B, H]`` int64, that of the prefill.
        decoded: tokens decoded since.

    Raises:
        PolicyError: they are of another shape or dtype, below 1, or above the budget.
    """
    left = allocation.after(budget, decoded)
    where = f"allocation {type(allocation).__name__} after {decoded} decoded tokens"
    if not isinstance(left, Tensor) or left.shape != budget.shape or left.dtype != torch.int64:
        raise PolicyError(f"{where}: expected int64 budgets of shape {list(budget.shape)}, got {left!r}")
    if bool(((left < 1) | (left > budget)).any()):
        raise PolicyError(f"{where}: budgets must lie between 1 and those of the prefill, which own the storage")
    return left
