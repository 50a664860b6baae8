"""Make a TorchRL environment of any data set with prompts and a Python reward function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from smdlib.rollout.conversations import DatasetEnv, NextMessage
from smdlib.rollout.prompts import ChatTokens
from smdlib.rollout.rewards import RewardFunction
from smdlib.rollout.rows import check_rows


def dataset_env(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    reward: RewardFunction,
    *,
    prompt: str = "prompt",
    prompts: int = 4,
    group: int = 8,
    system_prompt: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_turns: int = 1,
    next_message: NextMessage | None = None,
    shuffle: bool = True,
    seed: int = 0,
    start: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> DatasetEnv:
    """Make a TorchRL environment of a data set and a reward function.

    Which prompts come in which order depends on ``seed`` and the number of prompts drawn before, and on nothing else:
    no random generator is read or advanced, and ``start`` resumes exactly. Every epoch has an order of its own. A batch
    may be larger than the data set, or reach into the next epoch: a row that is drawn twice makes two groups.

    The environment is pickled with its data set; functions that are not at the top of a module need cloudpickle (Ray).

    Args:
        dataset: A ``datasets.Dataset``, or any sequence of dicts. Columns other than the prompt may hold anything; they
            stay here, only the row's number travels.
        tokenizer: With a chat template, unless the prompts are plain texts to be continued.
        reward: ``reward(response, row) -> float``; the response is decoded without special tokens.
        prompt: Column with a text, or with a list of messages (dicts of ``role`` and ``content``).
        prompts: Distinct prompts in a batch.
        group: Samples per prompt.
        system_prompt: Put before every prompt.
        template_kwargs: More options of ``tokenizer.apply_chat_template``.
        max_turns: Responses per conversation. Without ``next_message`` the policy goes on from where it stopped.
        next_message: ``next_message(response, row, turn) -> str | None`` answers the ``turn``-th response (from 1) as
            the user; ``None`` ends the conversation. It is appended as tokens; what was sampled stays as it is.
        shuffle: ``False`` takes the rows as they come.
        seed: Of the order.
        start: Prompts to skip, because they have been used: the ``position`` of an earlier environment.
        shard: ``(i, n)``: the i-th of n environments takes every n-th prompt, so that no prompt comes twice. ``group``
            numbers stay distinct over all of them.

    Returns:
        The environment, of batch size ``prompts * group``. `DatasetEnv` says what it reads and writes.

    Raises:
        ValueError: for an empty data set, a column that is not there (the message lists those that are), numbers out of
            range, or options that would have no effect.
        TypeError: for something that is not a sequence of rows.

    Example:
        >>> from smdlib.testing import byte_tokenizer
        >>> rows = [{"question": "2 + 2 =", "answer": "4"}, {"question": "1 + 2 =", "answer": "3"}]
        >>> env = dataset_env(
        ...     rows, byte_tokenizer(), lambda response, row: response == row["answer"], prompt="question", group=2
        ... )
        >>> env.reset()["row"]
        tensor([1, 1, 0, 0, 1, 1, 0, 0])
    """
    check_rows(dataset, prompt)
    smallest = {"prompts": (prompts, 1), "group": (group, 1), "max_turns": (max_turns, 1)}
    smallest |= {"start": (start, 0), "seed": (seed, 0), "shard[0]": (shard[0], 0), "shard[1]": (shard[1], 1)}
    for name, (value, least) in smallest.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}; expected a whole number, at least {least}.")
    if shard[0] >= shard[1]:
        raise ValueError(f"shard={shard!r}; expected (i, n) with i below n.")
    if next_message is not None and max_turns == 1:
        raise ValueError("next_message is never asked with max_turns=1; allow at least 2 turns.")
    return DatasetEnv(
        dataset,
        ChatTokens(tokenizer, system_prompt, template_kwargs or {}),
        reward,
        prompt=prompt,
        prompts=prompts,
        group=group,
        max_turns=max_turns,
        next_message=next_message,
        seed=seed if shuffle else None,
        start=start,
        shard=shard,
    )
