"""Calling a user's reward function so that no bad value slips through."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch

RewardFunction = Callable[[str, Mapping[str, Any]], float]
"""``reward(response, row) -> float``: the decoded response without special tokens, and its row of the data set."""


class RewardError(ValueError):
    """A reward function failed, or returned no finite number. The message names the row and the response.

    Example:
        >>> issubclass(RewardError, ValueError)
        True
    """


def checked_reward(reward: RewardFunction, response: str, row: Mapping[str, Any], index: int) -> float:
    """Return the reward of a response.

    Args:
        reward: The function.
        response: Decoded response.
        row: The row of the data set.
        index: Which row it is, for the message.

    Raises:
        RewardError: if the function raises, or returns something else than a number that is finite in float32.

    Example:
        >>> checked_reward(lambda response, row: response == row["answer"], "4", {"answer": "4"}, 0)
        1.0
    """
    where = f"row {index}, response {_short(response)}"
    try:
        value = reward(response, row)
    except Exception as error:
        raise RewardError(f"the reward function raised {type(error).__name__}: {error} ({where})") from error
    if not isinstance(value, Real):
        raise RewardError(f"the reward is {value!r} of type {type(value).__name__}; expected a float ({where})")
    number = float(value)
    if not math.isfinite(number) or abs(number) > torch.finfo(torch.float32).max:
        raise RewardError(f"the reward is {number}; expected a number that is finite in float32 ({where})")
    return number


def _short(text: str, limit: int = 200) -> str:
    """The text's repr, cut in the middle."""
    return repr(text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}")
