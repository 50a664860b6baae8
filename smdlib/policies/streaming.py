"""StreamingLLM: attention sinks and a recent window."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ._options import check_int, warn_without_sinks
from .registry import register_policy
from .view import CacheView


@register_policy("streaming")
@dataclass(frozen=True)
class StreamingPolicy:
    """Keeps the first ``sinks`` tokens and the newest ones (StreamingLLM, arXiv 2309.17453, section 3.2).

    ``score[b, h, k] = +inf`` where ``positions[b, h, k] < sinks``, else ``positions[b, h, k]``.

    It departs from the paper in one thing: keys keep the rotary embedding of their original position, for a key that
    changes while it is in the cache could not be replayed by the learner.

    Attributes:
        sinks: number of first tokens that are never evicted (as long as the budget has room for them). 0 warns.

    Raises:
        TypeError: ``sinks`` is not an int.
        ValueError: ``sinks`` is negative.

    Example:
        >>> import torch
        >>> view = CacheView.of_prompt(torch.zeros(1, 1, 4, 2), budget=2)
        >>> StreamingPolicy(sinks=1).score(view)
        tensor([[[inf, 1., 2., 3.]]])
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        """Refuses a negative number of sinks."""
        check_int(self, "sinks", at_least=0)
        if self.sinks == 0:
            warn_without_sinks(self)

    def score(self, view: CacheView) -> Tensor:
        """Scores ``[B, H, K]``: sinks protected, else the position; see the class."""
        return sinks_then_newest(view, self.sinks)


def sinks_then_newest(view: CacheView, sinks: int) -> Tensor:
    """Scores ``[B, H, K]``: the first ``sinks`` tokens protected, the other keys by their position."""
    # Beyond 2**24 float32 rounds a position to its neighbour: a tie, and ties go to the newer key, so the order holds.
    return view.protect(view.positions.float(), view.positions < sinks)
