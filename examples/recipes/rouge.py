"""ROUGE-L, which the two summarisation recipes share."""

from __future__ import annotations

from functools import cache

from rouge_score.rouge_scorer import RougeScorer


@cache
def scorer() -> RougeScorer:
    return RougeScorer(["rougeL"])


def rouge_l(response: str, reference: str) -> float:
    """F1 of the longest common subsequence of words, without stemming; only letters a-z and digits count.

    Example:
        >>> round(rouge_l("the cat sat", "the cat, it sat down"), 3)
        0.75
    """
    return float(scorer().score(reference, response)["rougeL"].fmeasure)
