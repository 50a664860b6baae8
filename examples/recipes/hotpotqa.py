"""HotpotQA, distractor setting (arXiv 1809.09600): a question over ten paragraphs, paid by F1 of the answer's words.

``replace(HOTPOTQA, reward=exact_match)`` or ``reward=contains`` pays otherwise.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from .recipe import Recipe

CLOSED = ("yes", "no", "noanswer")


def build(row: Mapping[str, Any]) -> str:
    context = zip(row["context"]["title"], row["context"]["sentences"], strict=True)
    paragraphs = [f"{title}: {''.join(sentences).strip()}" for title, sentences in context]
    return "\n\n".join([*paragraphs, f"Question: {row['question']}\nAnswer with the answer only, without a sentence."])


def normalise(text: str) -> list[str]:
    """Words as SQuAD's evaluation compares them: lower case, without punctuation and articles.

    Example:
        >>> normalise("The U.S., a country!")
        ['us', 'country']
    """
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def exact_match(response: str, row: Mapping[str, Any]) -> float:
    """1 if response and answer have the same words."""
    return float(normalise(response) == normalise(row["answer"]))


def contains(response: str, row: Mapping[str, Any]) -> float:
    """1 if the answer's words stand in the response, in order and together."""
    said, wanted = normalise(response), normalise(row["answer"])
    if not wanted:  # an answer of articles and signs only stands everywhere
        return float(said == wanted)
    return float(any(said[start : start + len(wanted)] == wanted for start in range(len(said))))


def f1(response: str, row: Mapping[str, Any]) -> float:
    """F1 of the words; as in HotpotQA's evaluation, a yes or no is right or wrong."""
    said, wanted = normalise(response), normalise(row["answer"])
    if said == wanted:
        return 1.0
    common = sum((Counter(said) & Counter(wanted)).values())
    closed = any(" ".join(words) in CLOSED for words in (said, wanted))
    return 0.0 if closed or not common else 2 * common / (len(said) + len(wanted))


HOTPOTQA = Recipe("HotpotQA", "hotpotqa/hotpot_qa:distractor", ("question", "context", "answer"), build, f1)
