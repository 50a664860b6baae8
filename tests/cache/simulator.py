"""A cache on Python lists: what `CompressedCache` must equal, written to be read rather than run fast."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from decimal import ROUND_CEILING, Decimal

import torch
from torch import Tensor

from smdlib import NEVER
from smdlib.policies import AdaptiveHeadAllocation, Allocation
from tests.policies.test_adaptive import plain_budgets

Place = tuple[int, int, int]  # row, layer, KV head
ScoreOf = Callable[[Place, int, int], float]  # place, position of the key, tokens that the row has seen


class SlowCache:
    """Keys of every (row, layer, head) as a list of positions; padded columns are never appended.

    `prompts` are the unpadded lengths of the rows where the cache was told them, else None.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        padding: Sequence[int],
        budget: float | int,
        allocation: Allocation,
        evict_every: int | None,
        prompts: Sequence[int] | None,
    ) -> None:
        self.layers, self.heads, self.padding = layers, heads, list(padding)
        self.budget, self.allocation, self.evict_every = budget, allocation, evict_every
        self.prompts = None if prompts is None else list(prompts)
        self.columns, self.decoded = 0, 0
        rows = range(len(self.padding))
        self.kept: dict[Place, list[int]] = {
            (row, layer, head): [] for row in rows for layer in range(layers) for head in range(heads)
        }
        self.evicted_at: dict[Place, dict[int, int]] = {place: {} for place in self.kept}
        self.budgets: dict[Place, int] = {}

    def seen(self, row: int) -> int:
        return max(0, self.columns - self.padding[row])

    def feed(self, tokens: int, score_of: ScoreOf) -> bool:
        """Take `tokens` more columns; evict if it is time; say whether it was."""
        first, self.columns = self.columns, self.columns + tokens
        for (row, _, _), keys in self.kept.items():
            keys.extend(
                column - self.padding[row] for column in range(first, self.columns) if column >= self.padding[row]
            )
        if self._is_prompt(first, tokens):
            self.decoded = 0
            self._set_budgets()
            if isinstance(self.allocation, AdaptiveHeadAllocation):
                self._let_heads_compete(self.allocation.floor, score_of)
        else:
            self.decoded += 1
            if self.evict_every is None or self.decoded % self.evict_every:
                return False
        for place in self.kept:
            self._evict(place, score_of)
        return True

    def _is_prompt(self, first: int, tokens: int) -> bool:
        if tokens > 1 or any(first <= padding for padding in self.padding):
            return True  # some row has not begun
        return self.prompts is not None and any(
            first - padding < prompt for padding, prompt in zip(self.padding, self.prompts, strict=True)
        )

    def _set_budgets(self) -> None:
        rows = range(len(self.padding))
        lengths = [max(self.seen(row), self.prompts[row] if self.prompts else 0) for row in rows]
        if isinstance(self.budget, int):
            means = [self.budget for _ in rows]
        else:
            share = Decimal(str(self.budget))  # 0.1 means a tenth
            means = [max(1, int((share * length).to_integral_value(ROUND_CEILING))) for length in lengths]
        spread = self.allocation(torch.tensor(means), self.layers, self.heads)
        self.budgets = {(row, layer, head): int(spread[layer, row, head]) for row, layer, head in self.kept}

    def _let_heads_compete(self, floor: float, score_of: ScoreOf) -> None:
        for row in range(len(self.padding)):
            for layer in range(self.layers):
                places = [(row, layer, head) for head in range(self.heads)]
                mean = self.budgets[places[0]]
                if sum(len(self.kept[place]) for place in places) > mean * self.heads:
                    seen = self.seen(row)
                    scores = [{p: score_of(place, p, seen) for p in self.kept[place]} for place in places]
                else:  # nobody has to be scored: all stay
                    scores = [dict.fromkeys(self.kept[place], 0.0) for place in places]
                self.budgets |= zip(places, plain_budgets(scores, mean, floor), strict=True)

    def _evict(self, place: Place, score_of: ScoreOf) -> None:
        keys, seen = self.kept[place], self.seen(place[0])
        excess = len(keys) - self.budgets[place]
        if excess <= 0:
            return
        worst_first = sorted((score_of(place, position, seen), position) for position in keys)
        for _, position in worst_first[:excess]:
            keys.remove(position)
            assert position not in self.evicted_at[place]
            self.evicted_at[place][position] = seen

    def map_rows(self, parents: Sequence[int]) -> None:
        """Row `i` becomes a copy of row `parents[i]`."""
        for name in ("kept", "evicted_at", "budgets"):
            old = getattr(self, name)
            new = {
                (row, layer, head): copy.copy(old[parent, layer, head])
                for row, parent in enumerate(parents)
                for layer in range(self.layers)
                for head in range(self.heads)
            }
            setattr(self, name, new)
        self.padding = [self.padding[parent] for parent in parents]
        self.prompts = None if self.prompts is None else [self.prompts[parent] for parent in parents]

    def record(self, lengths: Sequence[int]) -> Tensor:
        """`evicted_at [B, T, L, H]`; an eviction after a row's last query has no trace."""
        table = torch.full((len(lengths), max(lengths), self.layers, self.heads), NEVER, dtype=torch.int32)
        for (row, layer, head), evictions in self.evicted_at.items():
            for position, query in evictions.items():
                if query < lengths[row]:
                    table[row, position, layer, head] = query
        return table
