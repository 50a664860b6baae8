"""How many keys to keep: per row, then per layer and head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ._options import check_int

_FUZZ = 1e-9  # 0.1 * 30 is 3.0000000000000004, and is meant to be 3


def resolve_budget(budget: float | int, prompt_lengths: Tensor) -> Tensor:
    """Number of keys that each row keeps per layer and KV head.

    Args:
        budget: a float in (0, 1] is a share of each row's own prompt, rounded up, at least one key; an int is a number
            of keys. So ``1.0`` keeps the whole prompt and ``1`` keeps a single key.
        prompt_lengths: ``[B]`` integers, tokens of each prompt without padding.

    Returns:
        ``[B]`` int64, keys, each at least 1.

    Raises:
        TypeError: the budget is neither a float nor an int (a bool is neither).
        ValueError: the budget is out of range, or not a number.

    Example:
        >>> resolve_budget(0.4, torch.tensor([1, 2, 10, 11]))
        tensor([1, 1, 4, 5])
        >>> resolve_budget(64, torch.tensor([10, 1000]))
        tensor([64, 64])
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(
            f"budget is {budget!r}, expected a float in (0, 1] (a share of the prompt) "
            "or an int >= 1 (a number of keys)"
        )
    if isinstance(budget, int):
        if budget < 1:
            raise ValueError(f"budget is {budget}, expected at least 1 key")
        return torch.full_like(prompt_lengths, budget, dtype=torch.int64)
    if not 0.0 < budget <= 1.0:  # NaN as well
        hint = f", as a number of keys write {int(budget)}" if math.isfinite(budget) and budget > 1 else ""
        raise ValueError(f"budget is {budget}, expected a share of the prompt in (0, 1]{hint}")
    share = (prompt_lengths.double() * budget - _FUZZ).ceil()
    return share.to(torch.int64).clamp(min=1)


@runtime_checkable
class Allocation(Protocol):
    """Spreads a budget over layers and KV heads.

    Example:
        >>> isinstance(UniformAllocation(), Allocation)
        True
    """

    def __call__(self, budget: Tensor, num_layers: int, num_kv_heads: int) -> Tensor:
        """Keys that each layer and head may keep.

        Args:
            budget: ``[B]`` int64, mean number of keys per layer and head, at least 1.
            num_layers: L.
            num_kv_heads: H.

        Returns:
            ``[L, B, H]`` int64, each at least 1.
        """
        ...


@dataclass(frozen=True)
class UniformAllocation:
    """The same budget for every layer and head.

    Example:
        >>> UniformAllocation()(torch.tensor([3, 5]), num_layers=2, num_kv_heads=1).tolist()
        [[[3], [5]], [[3], [5]]]
    """

    def __call__(self, budget: Tensor, num_layers: int, num_kv_heads: int) -> Tensor:
        """Keys that each layer and head may keep, ``[L, B, H]`` int64; see `Allocation`."""
        return budget[None, :, None].repeat(num_layers, 1, num_kv_heads)


@dataclass(frozen=True)
class PyramidAllocation:
    """Budgets that fall linearly from the first layer to the last (PyramidKV, arXiv 2406.02069, section 4.2).

    ``b[l] = m * ((2 - 1 / beta) - l / (L - 1) * (2 - 2 / beta))`` for mean budget m: from nearly 2 m to ``m / beta``.
    Rounded so that the layers of a row hold exactly ``L * m`` keys together, none fewer than one, and no layer fewer
    than the next. A prompt shorter than a layer's budget leaves the rest of that layer's budget unused.

    Attributes:
        beta: the last layer gets the mean divided by this, an int; 1 is uniform.

    Raises:
        TypeError: ``beta`` is not an int.
        ValueError: ``beta`` is below 1.

    Example:
        >>> PyramidAllocation()(torch.tensor([100]), num_layers=5, num_kv_heads=1).flatten().tolist()
        [195, 148, 100, 52, 5]
    """

    beta: int = 20

    def __post_init__(self) -> None:
        """Refuses a beta that would let budgets rise."""
        check_int(self, "beta", at_least=1)

    def __call__(self, budget: Tensor, num_layers: int, num_kv_heads: int) -> Tensor:
        """Keys that each layer and head may keep, ``[L, B, H]`` int64; see `Allocation`."""
        rows = [falling_budgets(mean, num_layers, self.beta) for mean in budget.tolist()]
        layers = torch.tensor(rows, dtype=torch.int64, device=budget.device).view(-1, num_layers).T
        return layers[..., None].repeat(1, 1, num_kv_heads)


def falling_budgets(mean: int, num_layers: int, beta: int) -> list[int]:
    """Whole numbers of keys that fall linearly over the layers, with an exact mean, none below 1.

    Args:
        mean: mean number of keys, at least 1.
        num_layers: L.
        beta: the last layer's share is ``mean / beta``.

    Returns:
        L numbers of keys, never rising, with sum ``L * mean``.

    Example:
        >>> falling_budgets(mean=3, num_layers=4, beta=20)
        [5, 4, 2, 1]
    """
    if num_layers == 1:
        return [mean]
    # In units of 1 / (beta * (L - 1)) keys, all whole numbers: no float can spoil the sum.
    unit = beta * (num_layers - 1)
    exact = [mean * ((2 * beta - 1) * (num_layers - 1) - 2 * (beta - 1) * layer) for layer in range(num_layers)]
    keys = [max(1, amount // unit) for amount in exact]
    # Never negative: layers l and L - 1 - l share 2 * mean keys, so what raises one to a key is the other's remainder.
    spare = num_layers * mean - sum(keys)
    # Largest remainders first, the earlier layer of equals; a layer raised to one key has had its share.
    by_remainder = sorted(range(num_layers), key=lambda layer: keys[layer] * unit - exact[layer])
    for layer in by_remainder[:spare]:
        keys[layer] += 1
    return keys
