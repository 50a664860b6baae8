"""Reading rows of a data set, with errors that name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from smdlib.rollout.prompts import ChatTokens


def check_rows(dataset: Any, column: str) -> None:
    """Refuse what is not a sequence of rows with a prompt column.

    Args:
        dataset: Rows, by number: a ``datasets.Dataset`` or a sequence of dicts.
        column: Where the prompts are.

    Raises:
        TypeError: for something else: a dict of splits, or a stream without a length.
        ValueError: if it is empty, or has no such column.

    Example:
        >>> check_rows([{"question": "Why?"}], "prompt")
        Traceback (most recent call last):
        ValueError: the data set has no column 'prompt'; it has ['question'].
    """
    if isinstance(dataset, Mapping):
        raise TypeError(f"the data set is a dict of {sorted(map(str, dataset))}; choose one split of it.")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or isinstance(dataset, str):
        raise TypeError(
            f"the data set is a {type(dataset).__name__}; expected rows that can be read by number, a datasets.Dataset "
            "or a list of dicts (a stream has no order that could be resumed: take a part of it as a list)."
        )
    if len(dataset) == 0:
        raise ValueError("the data set has no rows.")
    columns = getattr(dataset, "column_names", None)
    if columns is None:
        first = dataset[0]
        if not isinstance(first, Mapping):
            raise TypeError(f"row 0 of the data set is a {type(first).__name__}; expected a dict.")
        columns = list(first)
    if column not in columns:
        raise ValueError(f"the data set has no column {column!r}; it has {sorted(map(str, columns))}.")


def prompt_of(dataset: Sequence[Mapping[str, Any]], index: int, column: str, chat: ChatTokens) -> Tensor:
    r"""Return a row's prompt as tokens, int64 ``[P]``.

    Raises:
        ValueError: if the row has no usable prompt; the message names the row.

    Example:
        >>> from smdlib.testing import byte_tokenizer
        >>> chat = ChatTokens(byte_tokenizer())
        >>> chat.tokenizer.decode(prompt_of([{"prompt": "Why?"}], 0, "prompt", chat))
        '<s>user\nWhy?</s><s>assistant\n'
    """
    row = dataset[index]
    if column not in row:
        raise ValueError(f"row {index} has no {column!r}; it has {sorted(map(str, row))}.")
    try:
        return chat.prompt(row[column])
    except (TypeError, ValueError) as error:
        raise ValueError(f"row {index}, column {column!r}: {error}") from error
