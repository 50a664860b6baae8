"""Ledger: read one person's amounts out of a long record, day by day, and add them up.

A prompt holds ``pages`` pages. Each lists every entry, in random order, as two tokens: whose day it was and how much;
a listed amount is wrong with probability ``noise``. The last token of the prompt asks for one person; the response
names each of the person's days with its amount, then the sum. Entry and amount are neighbouring tokens, so a look-up
takes two steps of attention, as it does in language.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .tasks import Problems, shuffled


@dataclass(frozen=True)
class Ledger:
    """See the module.

    Attributes:
        persons: In the record.
        days: Entries of each person.
        amounts: Amounts are 0 to ``amounts - 1``.
        pages: How often every entry is listed.
        noise: Share of the listed amounts that are random other ones.
        prompt_weight: The later pages repeat the first one's amounts, so they teach to look up.
    """

    persons: int = 4
    days: int = 3
    amounts: int = 8
    pages: int = 4
    noise: float = 0.15
    prompt_weight: float = 1.0
    name: str = "ledger"

    @property
    def vocabulary(self) -> list[str]:
        """Entries, amounts and sums (one kind of number), persons, then the marks of a prompt."""
        entries = [f"p{person}d{day}" for person in range(self.persons) for day in range(self.days)]
        numbers = [str(number) for number in range(self.days * (self.amounts - 1) + 1)]
        return entries + numbers + [f"p{person}" for person in range(self.persons)] + ["<page>", "sum", "of"]

    @property
    def answer_length(self) -> int:
        """Days with their amounts, and the sum."""
        return 2 * self.days + 1

    @property
    def lesson(self) -> Ledger:
        """Pages without slips of the pen."""
        return replace(self, noise=0.0)

    def problems(self, count: int, generator: torch.Generator) -> Problems:
        """Draw problems; prompts have ``pages * (2 * persons * days + 1) + 3`` tokens."""
        entries, numbers = self.persons * self.days, self.days * (self.amounts - 1) + 1
        amounts = torch.randint(self.amounts, (count, entries), generator=generator)
        page = torch.full((count, 1), entries + numbers + self.persons)
        parts = []
        for _ in range(self.pages):
            order = shuffled(entries, count, generator)
            listed = amounts.gather(1, order)
            wrong = torch.rand(listed.shape, generator=generator) < self.noise
            away = torch.randint(1, self.amounts, listed.shape, generator=generator)
            parts += [page, _pairs(order, entries + torch.where(wrong, (listed + away) % self.amounts, listed))]
        person = torch.randint(self.persons, (count, 1), generator=generator)
        prompts = torch.cat([*parts, page + 1, page + 2, entries + numbers + person], 1)
        asked = person * self.days + torch.arange(self.days)
        values = amounts.gather(1, asked)
        total = entries + values.sum(1, keepdim=True)
        answers = torch.cat([_pairs(asked, entries + values), total], 1)
        return Problems(prompts, answers, answers)

    def right(self, responses: Tensor, problems: Problems) -> Tensor:
        """Judge tokens one by one."""
        return responses == problems.truth


def _pairs(first: Tensor, second: Tensor) -> Tensor:
    """Put the columns of two tensors in turn, ``[N, 2 K]``."""
    return torch.stack([first, second], 2).flatten(1)
