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
    """

    prompts: Tensor
    answers: Tensor


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
    def prompt_weight(self) -> float:
        """Weight of the prompt's own tokens in pre-training, where later ones can be told from earlier ones."""
        ...

    @property
    def answer_length(self) -> int:
        """Tokens R of a response; it has no end token."""
        ...

    def problems(self, count: int, generator: torch.Generator) -> Problems:
        """Draw ``count`` problems."""
        ...


def share_right(responses: Tensor, answers: Tensor) -> Tensor:
    """The reward: share of the tokens that are right, float32 ``[N]``.

    Example:
        >>> share_right(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2, 0, 4]]))
        tensor([0.7500])
    """
    return (responses == answers).float().mean(-1)


def all_right(responses: Tensor, answers: Tensor) -> Tensor:
    """The measure: 1 where every token is right, float32 ``[N]``."""
    return (responses == answers).all(-1).float()


def shuffled(columns: int, rows: int, generator: torch.Generator) -> Tensor:
    """A random order of ``columns`` for each row, int64 ``[rows, columns]``."""
    return torch.rand(rows, columns, generator=generator).argsort(1)
