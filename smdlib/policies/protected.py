"""A policy with keys that it must not evict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ._options import check_int
from .protocol import EvictionPolicy, query_window, tracks_attention
from .registry import make_policy, register_policy
from .select import checked_scores
from .view import CacheView


@register_policy("protected", wraps=True)
@dataclass(frozen=True)
class Protected:
    """Another policy's choice, with some keys protected.

    ``score[k] = +inf`` where a key is one of the first ``sinks`` tokens of its row, one of the last ``recent`` ones, or
    at a position of one of the ``spans``; elsewhere it is what the policy says. Where more keys are protected than the
    budget holds, the newest of them stay.

    Attributes:
        policy: the policy that scores the keys, or its name, with options if need be.
        sinks: number of first tokens that are protected.
        recent: number of last tokens that are protected.
        spans: pairs ``(first, end)``: positions ``first <= p < end`` are protected, the same in every row, such as
            instructions that all prompts begin with. Positions do not count padding.

    Raises:
        TypeError: an option is of the wrong type.
        ValueError: nothing is protected, a number is negative, or a span is empty.

    Example:
        >>> import torch
        >>> view = CacheView.of_prompt(torch.tensor([5.0, 3.0, 1.0, 2.0, 4.0]).view(1, 1, 5, 1), budget=3)
        >>> Protected("knorm", sinks=1, spans=[(3, 4)]).score(view)
        tensor([[[inf, -3., -1., inf, -4.]]])
    """

    policy: EvictionPolicy | str
    sinks: int = 0
    recent: int = 0
    spans: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        """Builds a policy from its name; refuses a wrapper that protects nothing."""
        object.__setattr__(self, "policy", make_policy(self.policy))
        check_int(self, "sinks", at_least=0)
        check_int(self, "recent", at_least=0)
        object.__setattr__(self, "spans", tuple(_span(span) for span in self.spans))
        if not (self.sinks or self.recent or self.spans):
            raise ValueError("Protected protects nothing: set sinks, recent or spans")

    @property
    def query_window(self) -> int:
        """Number of last queries that the policy wants."""
        return query_window(make_policy(self.policy))

    @property
    def tracks_attention(self) -> bool:
        """Whether the policy wants the attention mass."""
        return tracks_attention(make_policy(self.policy))

    def score(self, view: CacheView) -> Tensor:
        """Scores ``[B, H, K]``: those of the policy, some keys protected; see the class.

        Raises:
            PolicyError: the policy's scores cannot be used; the message names that policy.
        """
        scores = checked_scores(make_policy(self.policy), view)
        protected = view.newest(self.recent) | (view.positions < self.sinks)
        for first, end in self.spans:
            protected |= (view.positions >= first) & (view.positions < end)
        return view.protect(scores, protected)


def _span(span: Sequence[int]) -> tuple[int, int]:
    """A checked span of positions."""
    if isinstance(span, (str, int)) or [type(end) for end in span] != [int, int]:
        raise TypeError(f"Protected.spans has {span!r}, expected pairs of positions (first, end)")
    first, end = span
    if not 0 <= first < end:
        raise ValueError(f"Protected.spans has {span!r}, expected 0 <= first < end")
    return first, end
