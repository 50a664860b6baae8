"""Budgets that the heads of a layer win from each other by their scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .budget import Allocation
from .errors import PolicyError
from .select import rank_keys
from .view import CacheView

_FUZZ = 1e-9  # 0.1 * 30 is 3.0000000000000004, and is meant to be 3
_INT64 = torch.iinfo(torch.int64)


@runtime_checkable
class ScoreAllocation(Allocation, Protocol):
    """An allocation that also looks at the scores of a layer, after each prefill (chunk).

    The budgets of the call (`Allocation`) are then where it starts from: what the policy sees as ``view.budget``.

    Example:
        >>> isinstance(AdaptiveHeadAllocation(), ScoreAllocation)
        True
    """

    def from_scores(self, scores: Tensor, positions: Tensor, budget: Tensor) -> Tensor:
        """Keys that each head of a layer may keep, from now until the next prefill (chunk).

        Args:
            scores: ``[B, H, K]`` float32, the policy's. Empty slots may hold anything.
            positions: ``[B, H, K]`` int64, -1 for an empty slot.
            budget: ``[B, H]`` int64, what the call gave.

        Returns:
            ``[B, H]`` int64, each at least 1, with the sum that ``budget`` has in each row.
        """
        ...


@dataclass(frozen=True)
class AdaptiveHeadAllocation:
    """The keys of a layer compete across its heads (Ada-KV, arXiv 2407.11550, algorithm 1 with its safeguard).

    Of a row's scores in one layer, those of all H heads together, the ``H * budget`` largest are kept, and a head's
    budget is the number of its keys among them; before, each head's best ``floor * budget`` keys (rounded up) are set.
    What is left over because there are fewer keys than that is spread evenly. So a layer holds as many keys as with
    `UniformAllocation`, and stores them in that many slots (plus padding of at most a quarter).

    The scores of different heads have to mean the same: attention does (``snapkv``, ``h2o``), a position or a random
    number gives heads about equal budgets. Budgets are decided after each prefill (chunk) and stay while decoding.

    Attributes:
        floor: share of the mean budget that each head keeps at least, from 0 (one key at least) to 1 (uniform).

    Raises:
        TypeError: ``floor`` is not a number.
        ValueError: ``floor`` is out of range.

    Example:
        >>> scores = torch.tensor([[[0.9, 0.8, 0.7, 0.6], [0.5, 0.3, 0.2, 0.1]]])
        >>> positions = torch.arange(4).expand(1, 2, 4)
        >>> AdaptiveHeadAllocation().from_scores(scores, positions, torch.tensor([[2, 2]])).tolist()
        [[3, 1]]
    """

    floor: float = 0.2

    def __post_init__(self) -> None:
        """Refuses a floor that is no share."""
        if isinstance(self.floor, bool) or not isinstance(self.floor, (int, float)):
            raise TypeError(f"AdaptiveHeadAllocation.floor is {self.floor!r}, expected a number from 0 to 1")
        if not 0.0 <= self.floor <= 1.0:  # NaN as well
            raise ValueError(f"AdaptiveHeadAllocation.floor is {self.floor}, expected a share of the budget, 0 to 1")

    def __call__(self, budget: Tensor, num_layers: int, num_kv_heads: int) -> Tensor:
        """The mean budget of each layer and head, ``[L, B, H]`` int64; see `Allocation`."""
        return budget[None, :, None].repeat(num_layers, 1, num_kv_heads)

    def from_scores(self, scores: Tensor, positions: Tensor, budget: Tensor) -> Tensor:
        """Keys that each head may keep, ``[B, H]`` int64; see `ScoreAllocation`."""
        heads, keys = scores.shape[1:]
        present = positions >= 0
        rank = rank_keys(scores, positions).masked_fill(~present, _INT64.min)
        least = (budget.double() * self.floor - _FUZZ).ceil().to(torch.int64).clamp(min=1)
        place = rank.argsort(-1, descending=True).argsort(-1)  # 0 for a head's best key
        rank = rank.masked_fill(present & (place < least.unsqueeze(-1)), _INT64.max)
        # Stable, so that of the same score and position in two heads the lower head has the key.
        order = rank.flatten(1).sort(dim=-1, descending=True, stable=True).indices
        total = budget.sum(-1, keepdim=True)
        wins = (torch.arange(heads * keys, device=budget.device) < total).expand(order.shape)
        kept = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, wins).unflatten(-1, (heads, keys)) & present
        spare = total - kept.sum((1, 2)).unsqueeze(-1)
        return kept.sum(-1) + spare // heads + (torch.arange(heads, device=budget.device) < spare % heads)


def checked_budgets(allocation: ScoreAllocation, scores: Tensor, view: CacheView) -> Tensor:
    """What an allocation makes of a layer's scores, refused if it could not be used.

    Args:
        allocation: the allocation.
        scores: ``[B, H, K]`` float32, checked.
        view: the layer that was scored.

    Returns:
        ``[B, H]`` int64, keys.

    Raises:
        PolicyError: no int64 tensor ``[B, H]``, a head without a key, or a row with more or fewer keys than its budget.

    Example:
        >>> view = CacheView.of_prompt(torch.zeros(1, 2, 4, 8), budget=2)
        >>> checked_budgets(AdaptiveHeadAllocation(), torch.arange(8.0).view(1, 2, 4), view)
        tensor([[1, 3]])
    """
    where = f"allocation {type(allocation).__name__} at layer {view.layer_idx}"
    budgets = allocation.from_scores(scores, view.positions, view.budget)
    if not isinstance(budgets, Tensor) or budgets.shape != view.budget.shape or budgets.dtype != torch.int64:
        found = f"{budgets.dtype} {list(budgets.shape)}" if isinstance(budgets, Tensor) else type(budgets).__name__
        raise PolicyError(f"{where}: from_scores returned {found}, expected int64 [B, H] = {list(view.budget.shape)}")
    if bool((budgets < 1).any()):
        row, head = (budgets < 1).nonzero()[0].tolist()
        raise PolicyError(
            f"{where}: KV head {head} of row {row} may keep {int(budgets[row, head])} keys, but every head needs one"
        )
    wrong = (budgets.sum(-1) != view.budget.sum(-1)).nonzero().flatten().tolist()
    if wrong:
        row = wrong[0]
        raise PolicyError(
            f"{where}: the heads of row {row} may keep {int(budgets[row].sum())} keys together, but the budget of the "
            f"layer is {int(view.budget[row].sum())}: storage would not be what was asked for"
        )
    return budgets
