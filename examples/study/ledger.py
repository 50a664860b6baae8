"""Ledger: read one person's amounts out of a long record, day by day, and add them up.

A prompt holds ``pages`` pages. Each lists every entry, in random order, as two tokens: whose day it was and how much. The
last token of the prompt asks for one person; the response names each of the person's days with its amount, then the sum.
Entry and amount are neighbouring tokens, so a look-up takes two steps of attention, as it does in language.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .tasks import Problems, shuffled


@dataclass(frozen=True)
class Ledger:
    """See the module.

    Attributes:
        persons: In the record.
        days: Entries of each person.
        amounts: Amounts are 0 to ``amounts - 1``.
        pages: How often every entry is listed.
        prompt_weight: The later pages repeat the first one's amounts, so they teach to look up.
    """

    persons: int = 4
    days: int = 3
    amounts: int = 8
    pages: int = 4
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

    def problems(self, count: int, generator: torch.Generator) -> Problems:
        """Draw problems; prompts have ``pages * (2 * persons * days + 1) + 3`` tokens."""
        entries, numbers = self.persons * self.days, self.days * (self.amounts - 1) + 1
        amounts = torch.randint(self.amounts, (count, entries), generator=generator)
        page = torch.full((count, 1), entries + numbers + self.persons)
        parts = []
        for _ in range(self.pages):
            order = shuffled(entries, count, generator)
            parts += [page, _pairs(order, entries + amounts.gather(1, order))]
        person = torch.randint(self.persons, (count, 1), generator=generator)
        prompts = torch.cat([*parts, page + 1, page + 2, entries + numbers + person], 1)
        asked = person * self.days + torch.arange(self.days)
        values = amounts.gather(1, asked)
        total = entries + values.sum(1, keepdim=True)
        return Problems(prompts, torch.cat([_pairs(asked, entries + values), total], 1))


def _pairs(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Put the columns of two tensors in turn, ``[N, 2 K]``."""
    return torch.stack([first, second], 2).flatten(1)
