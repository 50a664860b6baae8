"""What is noted while ``generate`` runs: the log-prob of each sampled token, and where each row ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StopStringCriteria,
)

from smdlib.rollout.options import GenerateOptions


class SampledLogProbs(LogitsProcessor):
    """Notes the log-prob of each sampled token, and keeps one step's logits at a time.

    A logits processor sees the logits before the token is drawn, so each step scores the token of the step before.

    Args:
        temperature: Logits are divided by it, as sampling does afterwards.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self._scored: list[Tensor] = []
        self._pending: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Score the newest token ``input_ids[:, -1]``; hand ``scores`` ``[B, V]`` on as they are."""
        self._score(input_ids[:, -1])
        self._pending = scores
        return scores

    def _score(self, tokens: Tensor) -> None:
        if self._pending is None:
            return
        logits = self._pending.float() / self.temperature
        self._scored.append(logits.gather(-1, tokens[:, None]).squeeze(-1) - logits.logsumexp(-1))
        self._pending = None

    def log_probs(self, response: Tensor) -> Tensor:
        """Return float32 ``[B, R]`` in nats for the response ``[B, R]``."""
        if len(self._scored) < response.shape[1]:
            self._score(response[:, -1])
        return torch.stack(self._scored[: response.shape[1]], 1)


class RowEnds(StoppingCriteria):
    """Ends rows, and notes how many tokens each response has, its end token included.

    Which tokens belong to a row is never read off the padding token: it may equal the end-of-turn token, and a model
    may sample it.

    Args:
        options: With the tokens, strings and criteria that end a row.
        tokenizer: For stop strings.
        prompt_columns: Columns of the padded prompts.
    """

    def __init__(self, options: GenerateOptions, tokenizer: PreTrainedTokenizerBase, prompt_columns: int) -> None:
        self._criteria: list[Callable[..., Any]] = list(options.stopping_criteria)
        if options.eos_token_ids:
            self._criteria.append(EosTokenCriteria(list(options.eos_token_ids)))
        if options.stop_strings:
            strings = StopStringCriteria(tokenizer, list(options.stop_strings))
            # Of the response alone: a string that the prompt begins is not the response's.
            self._criteria.append(lambda ids, scores, **kwargs: strings(ids[:, prompt_columns:], scores, **kwargs))
        self._prompt_columns = prompt_columns
        self._ends: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        """Return bool ``[B]``, the rows that have ended by the newest token or before."""
        columns = input_ids.shape[1] - self._prompt_columns
        if self._ends is None:
            self._ends = torch.full((input_ids.shape[0],), -1, device=input_ids.device)
        done = torch.zeros_like(self._ends, dtype=torch.bool)
        for criterion in self._criteria:
            done = done | torch.as_tensor(criterion(input_ids, scores, **kwargs), device=done.device)
        self._ends = torch.where(done & (self._ends < 0), columns, self._ends)
        return self._ends >= 0

    def lengths(self, columns: int) -> Tensor:
        """Return int64 ``[B]``, tokens of each response among ``columns`` sampled ones."""
        assert self._ends is not None
        return torch.where(self._ends < 0, columns, self._ends).clamp(max=columns)
