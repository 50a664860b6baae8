"""What is noted while ``generate`` runs: the log-prob of each sampled token, and where each row ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    MaxTimeCriteria,
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

    Ends all rows that are being decoded as soon as at least half of them have ended, so that the others can go on
    without those: `keep` says which. What ends a row is asked about the batch as it was in the beginning, whatever part
    of it is being decoded: a user's criterion may count its calls, and know rows by their number.

    Which tokens belong to a row is never read off the padding token: it may equal the end-of-turn token, and a model
    may sample it.

    Args:
        options: With the tokens, strings, criteria and seconds that end a row.
        tokenizer: For stop strings.
        prompts: int64 ``[B, P]``, the padded prompts of the batch.
    """

    def __init__(self, options: GenerateOptions, tokenizer: PreTrainedTokenizerBase, prompts: Tensor) -> None:
        self._columns, self._most = prompts.shape[1], options.max_new_tokens
        self._criteria: list[Callable[..., Any]] = list(options.stopping_criteria)
        if options.eos_token_ids:
            self._criteria.append(EosTokenCriteria(list(options.eos_token_ids)))
        if options.stop_strings:
            strings = StopStringCriteria(tokenizer, list(options.stop_strings))
            # Of the response alone: a string that the prompt begins is not the response's.
            self._criteria.append(lambda ids, scores, **kwargs: strings(ids[:, self._columns :], scores, **kwargs))
        if options.max_time is not None:
            self._criteria.append(MaxTimeCriteria(options.max_time))  # generate() would begin anew with each call
        self._ids = torch.nn.functional.pad(prompts, (0, self._most), value=options.pad_token_id)
        self._ends = torch.full((len(prompts),), -1, device=prompts.device)  # of the whole batch
        self._rows = torch.arange(len(prompts), device=prompts.device)  # those being decoded

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        """Return bool ``[N]``, the rows being decoded that have ended by the newest token or before, or all of them."""
        columns = input_ids.shape[1]
        self._ids[self._rows, :columns] = input_ids
        done = torch.zeros_like(self._ends, dtype=torch.bool)
        for criterion in self._criteria:
            done = done | torch.as_tensor(criterion(self._ids[:, :columns], scores, **kwargs), device=done.device)
        self._ends = torch.where(done & (self._ends < 0), columns - self._columns, self._ends)
        ended = self._ends[self._rows] >= 0
        return ended | (2 * ended.sum() >= len(ended))

    def ended(self, columns: int) -> Tensor:
        """Return bool ``[N]``, the rows being decoded that are complete with ``columns`` sampled ones."""
        ends = self._ends[self._rows]
        return ((ends >= 0) & (ends <= columns)) | (columns >= self._most)

    def lengths(self, columns: int) -> Tensor:
        """Return int64 ``[N]``, tokens of the responses being decoded among ``columns`` sampled ones."""
        ends = self._ends[self._rows]
        return torch.where(ends < 0, columns, ends).clamp(max=columns)

    def keep(self, index: Tensor) -> None:
        """Follow the batch when only the rows ``index [M]`` of those being decoded go on."""
        self._rows = self._rows[index]
        self._ends[self._rows] = -1  # a loop that took a step back has seen them end
