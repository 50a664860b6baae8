"""The newest keys only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ._options import check_int, warn_without_sinks
from .registry import register_policy
from .streaming import sinks_then_newest
from .view import CacheView


@register_policy("recent")
@dataclass(frozen=True)
class RecentPolicy:
    """Keeps the newest tokens: window attention, the baseline of StreamingLLM (arXiv 2309.17453, figure 1b).

    ``score[b, h, k] = positions[b, h, k]``; with ``sinks``, the first ones are protected (``+inf``).

    Attributes:
        sinks: number of first tokens that are never evicted (as long as the budget has room for them). With 0, the
            default, it warns: pretrained models put much attention on their first tokens, and break without them.

    Raises:
        TypeError: ``sinks`` is not an int.
        ValueError: ``sinks`` is negative.

    Example:
        >>> import torch, warnings
        >>> view = CacheView.of_prompt(torch.zeros(1, 1, 4, 2), budget=2)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     policy = RecentPolicy()
        >>> policy.score(view)
        tensor([[[0., 1., 2., 3.]]])
    """

    sinks: int = 0

    def __post_init__(self) -> None:
        """Refuses a negative number of sinks, warns of none."""
        check_int(self, "sinks", at_least=0)
        if self.sinks == 0:
            warn_without_sinks(self)

    def score(self, view: CacheView) -> Tensor:
        """Scores ``[B, H, K]``: the position; see the class."""
        return sinks_then_newest(view, self.sinks)
