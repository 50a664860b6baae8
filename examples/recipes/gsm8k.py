"""GSM8K (arXiv 2110.14168): word problems, paid by exact match of the last number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from .recipe import Recipe

# A minus counts where nothing stands before it ("3-5" is no -5), and on either side of the dollar sign.
NUMBER = re.compile(r"((?<![\w)])-)?\$?((?<=\$)-)?(\d+(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\w)\.\d+)")


def build(row: Mapping[str, Any]) -> str:
    return f"{row['question']}\n\nThink step by step, and end with a line '#### ' and the number."


def last_number(text: str) -> Decimal | None:
    """The last number of a text: ``"it costs $1,234.50."`` gives 1234.50.

    Example:
        >>> last_number("from -$3 to 10-5 = 5.0 dollars")
        Decimal('5.0')
    """
    found = NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if not found:
        return None
    before, after, digits = found[-1]
    value = Decimal(digits.replace(",", ""))
    return -value if before or after else value


def reward(response: str, row: Mapping[str, Any]) -> float:
    """1 if the last number equals the one after ``####``, else 0.

    Example:
        >>> reward("So she makes $18.00 a day.", {"answer": "9 * 2 = 18\\n#### 18"})
        1.0
    """
    _, mark, answer = row["answer"].rpartition("####")
    wanted = last_number(answer)
    if not mark or wanted is None:
        raise ValueError(f"the answer {row['answer']!r} does not end in '#### ' and a number")
    return float(last_number(response) == wanted)


GSM8K = Recipe("GSM8K", "openai/gsm8k:main", ("question", "answer"), build, reward)
