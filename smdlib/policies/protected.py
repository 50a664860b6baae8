"""A policy with keys that it must not evict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._options import check_int
from .protocol import EvictionPolicy, needs_tokens, query_window, tracks_attention
from .registry import make_policy, register_policy
from .select import checked_scores
from .view import CacheView


@register_policy("protected", wraps=True)
@dataclass(frozen=True)
class Protected:
    """Another policy's choice, with some keys protected.

    ``score[k] = +inf`` where a key is one of the first ``sinks`` tokens of its row, one of the last ``recent`` ones, at
    a position of one of the ``spans``, or its token is one of ``token_ids``; elsewhere it is what the policy says.
    Where more keys are protected than the budget holds, the newest of them stay.

    Attributes:
        policy: the policy that scores the keys, or its name, with options if need be.
        sinks: number of first tokens that are protected.
        recent: number of last tokens that are protected.
        spans: pairs ``(first, end)``: positions ``first <= p < end`` are protected, the same in every row, such as
            instructions that all prompts begin with. Positions do not count padding.
        token_ids: tokens that are protected wherever they stand, in prompt and response, such as those that mark turns.

    Raises:
        TypeError: an option is of the wrong type.
        ValueError: nothing is protected, a number is negative, or a span is empty.

    Example:
        >>> view = CacheView.of_prompt(torch.tensor([5.0, 3.0, 1.0, 2.0, 4.0]).view(1, 1, 5, 1), budget=3)
        >>> Protected("knorm", sinks=1, spans=[(3, 4)]).score(view)
        tensor([[[inf, -3., -1., inf, -4.]]])
    """

    policy: EvictionPolicy | str
    sinks: int = 0
    recent: int = 0
    spans: Sequence[tuple[int, int]] = ()
    token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Builds a policy from its name; refuses a wrapper that protects nothing."""
        object.__setattr__(self, "policy", make_policy(self.policy))
        check_int(self, "sinks", at_least=0)
        check_int(self, "recent", at_least=0)
        object.__setattr__(self, "spans", tuple(_span(span) for span in self.spans))
        object.__setattr__(self, "token_ids", tuple(_token_id(token) for token in self.token_ids))
        if not (self.sinks or self.recent or self.spans or self.token_ids):
            raise ValueError("Protected protects nothing: set sinks, recent, spans or token_ids")

    @property
    def query_window(self) -> int:
        """Number of last queries that the policy wants."""
        return query_window(make_policy(self.policy))

    @property
    def tracks_attention(self) -> bool:
        """Whether the policy wants the attention mass."""
        return tracks_attention(make_policy(self.policy))

    @property
    def needs_tokens(self) -> bool:
        """Whether the ids of the tokens are needed, here or by the policy."""
        return bool(self.token_ids) or needs_tokens(make_policy(self.policy))

    def score(self, view: CacheView) -> Tensor:
        """Scores ``[B, H, K]``: those of the policy, some keys protected; see the class.

        Raises:
            PolicyError: the policy's scores cannot be used; the message names that policy.
            ValueError: the view has no token ids, but some are to be protected.
        """
        scores = checked_scores(make_policy(self.policy), view)
        protected = view.newest(self.recent) | (view.positions < self.sinks)
        for first, end in self.spans:
            protected |= (view.positions >= first) & (view.positions < end)
        if self.token_ids:
            if view.token_ids is None:
                raise ValueError(
                    f"Protected needs view.token_ids at layer {view.layer_idx}, got None: what calls it must honour "
                    "needs_tokens"
                )
            safe = torch.tensor(self.token_ids, device=view.token_ids.device)
            protected |= torch.isin(view.token_ids, safe)
        return view.protect(scores, protected)


def _token_id(token: int) -> int:
    """A checked token id."""
    if type(token) is not int or token < 0:
        raise ValueError(f"Protected.token_ids has {token!r}, expected token ids (ints of at least 0)")
    return token


def _span(span: Sequence[int]) -> tuple[int, int]:
    """A checked span of positions."""
    if isinstance(span, (str, int)) or [type(end) for end in span] != [int, int]:
        raise TypeError(f"Protected.spans has {span!r}, expected pairs of positions (first, end)")
    first, end = span
    if not 0 <= first < end:
        raise ValueError(f"Protected.spans has {span!r}, expected 0 <= first < end")
    return first, end
