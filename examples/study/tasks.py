"""What a task of the study is: a generator of prompts with their one right response, as tensors of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problems:
    """Prompts of one length with their right responses.

    Attributes:
        prompts: int64 ``[N, P]``.
        answers: int64 ``[N, R]``.
        truth: int64 ``[N, ...]``, all that the task needs to judge any response.
    """

    prompts: Tensor
    answers: Tensor
    truth: Tensor

    def rows(self, index: Tensor | slice) -> Problems:
        """Choose some of them, or some of them several times."""
        return Problems(self.prompts[index], self.answers[index], self.truth[index])


class Task(Protocol):
    """A family of problems; the look-ups that answer them happen while decoding."""

    @property
    def name(self) -> str:
        """Name in the tables."""
        ...

    @property
    def vocabulary(self) -> list[str]:
        """A readable word for each token id."""
        ...

    @property
    def lesson(self) -> Task:
        """The clean task that pre-training teaches; the arms then learn to cope with errors in what they read."""
        ...

    def problems(self, count: int, generator: torch.Generator) -> Problems:
        """Draw ``count`` problems."""
        ...

    def right(self, responses: Tensor, problems: Problems) -> Tensor:
        """Judge each token of responses ``[N, R]``: bool ``[N, R]``. The reward is the share that is right."""
        ...


def shuffled(columns: int, rows: int, generator: torch.Generator) -> Tensor:
    """A random order of ``columns`` for each row, int64 ``[rows, columns]``."""
    return torch.rand(rows, columns, generator=generator).argsort(1)
