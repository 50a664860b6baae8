"""TL;DR (arXiv 2009.01325): summarise a Reddit post, paid by ROUGE-L less a penalty for length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .recipe import Recipe
from .rouge import rouge_l

PENALTY = 0.2


def build(row: Mapping[str, Any]) -> str:
    post = row["prompt"].removesuffix("TL;DR:").rstrip()
    return f"{post}\n\nSummarise this post in one or two sentences."


def reward(response: str, row: Mapping[str, Any]) -> float:
    """ROUGE-L F1, less `PENALTY` times the share of words beyond the reference's (at most 1).

    Example:
        >>> reward("one two three", {"completion": "one two three"}), reward("x " * 9, {"completion": "one two three"})
        (1.0, -0.2)
    """
    allowed = max(1, len(row["completion"].split()))
    excess = min(1.0, max(0.0, len(response.split()) / allowed - 1))
    return rouge_l(response, row["completion"]) - PENALTY * excess


# CarperAI's copy has its summary under "label".
TLDR = Recipe("TL;DR", "trl-lib/tldr", ("prompt", ("completion", "label")), build, reward)
