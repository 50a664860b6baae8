"""Ledger: read one person's amounts out of a long record, day by day, and add them up.

A prompt holds ``pages`` pages. Each lists every entry, in random order, one token an entry: whose, which day's, how
much. A listed amount is wrong with probability ``noise``. The last token of the prompt asks for one person; the
response writes down the person's entries in the order of the days, then their sum.
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
    """

    persons: int = 4
    days: int = 4
    amounts: int = 5
    pages: int = 6
    noise: float = 0.2
    name: str = "ledger"

    @property
    def vocabulary(self) -> list[str]:
        """Entries with each amount, sums, persons, then the marks of a prompt."""
        names = [f"p{person}" for person in range(self.persons)]
        entries = [f"{name}d{day}" for name in names for day in range(self.days)]
        sums = [str(number) for number in range(self.days * (self.amounts - 1) + 1)]
        written = [f"{entry}={amount}" for entry in entries for amount in range(self.amounts)]
        return written + sums + names + ["<page>", "sum", "of"]

    @property
    def lesson(self) -> Ledger:
        """Pages without slips of the pen."""
        return replace(self, noise=0.0)

    def problems(self, count: int, generator: torch.Generator) -> Problems:
        """Draw problems; prompts have ``pages * (persons * days + 1) + 3`` tokens."""
        entries, sums = self.persons * self.days, self.days * (self.amounts - 1) + 1
        amounts = torch.randint(self.amounts, (count, entries), generator=generator)
        first = entries * self.amounts  # of the sums
        page = torch.full((count, 1), first + sums + self.persons)
        parts = []
        for _ in range(self.pages):
            order = shuffled(entries, count, generator)
            listed = amounts.gather(1, order)
            wrong = torch.rand(listed.shape, generator=generator) < self.noise
            away = torch.randint(1, self.amounts, listed.shape, generator=generator)
            listed = torch.where(wrong, (listed + away) % self.amounts, listed)
            parts += [page, order * self.amounts + listed]
        person = torch.randint(self.persons, (count, 1), generator=generator)
        prompts = torch.cat([*parts, page + 1, page + 2, first + sums + person], 1)
        asked = person * self.days + torch.arange(self.days)
        values = amounts.gather(1, asked)
        answers = torch.cat([asked * self.amounts + values, first + values.sum(1, keepdim=True)], 1)
        return Problems(prompts, answers, answers)

    def right(self, responses: Tensor, problems: Problems) -> Tensor:
        """Judge entries one by one, and the sum by the amounts that were written down."""
        written = responses[:, :-1]
        first = self.persons * self.days * self.amounts
        total = first + (written % self.amounts).sum(1, keepdim=True)
        summed = (responses[:, -1:] == total) & (written < first).all(1, keepdim=True)
        return torch.cat([written == problems.truth[:, :-1], summed], 1)
