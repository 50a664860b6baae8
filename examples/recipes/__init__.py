"""Tasks of the paper: what to ask, and what a response is worth."""

from .govreport import GOVREPORT
from .gsm8k import GSM8K
from .hotpotqa import HOTPOTQA
from .recipe import Recipe
from .tldr import TLDR

RECIPES = {"gsm8k": GSM8K, "hotpotqa": HOTPOTQA, "tldr": TLDR, "govreport": GOVREPORT}

__all__ = ["GOVREPORT", "GSM8K", "HOTPOTQA", "RECIPES", "TLDR", "Recipe"]
