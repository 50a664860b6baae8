"""GovReport (arXiv 2104.02112): summarise a long report (about 9,000 words), paid by ROUGE-L."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .recipe import Recipe
from .rouge import rouge_l


def build(row: Mapping[str, Any]) -> str:
    return f"{row['report'].strip()}\n\nSummarise this report in a few paragraphs."


def reward(response: str, row: Mapping[str, Any]) -> float:
    """ROUGE-L F1 against the report's own summary."""
    return rouge_l(response, row["summary"])


GOVREPORT = Recipe("GovReport", "ccdv/govreport-summarization", ("report", "summary"), build, reward)
