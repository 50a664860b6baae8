"""Several policies as one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .protocol import EvictionPolicy, needs_tokens, query_window, tracks_attention
from .registry import make_policy, register_policy
from .select import checked_scores
from .view import CacheView


@register_policy("combined", wraps=True)
@dataclass(frozen=True)
class Combined:
    """Keeps what several policies rank high: the weighted sum of their ranks within each row and head.

    For scores ``s_i`` of policy i and the n present keys that no policy protects::

        rank_i[k] = (number of those keys j with s_i[j] < s_i[k]) / n       in [0, 1)
        score[k]  = sum over i of weight_i * rank_i[k]
        score[k]  = +inf     where a policy protects the key
        score[k]  = -inf     where a policy forbids to keep it, and none protects it

    Ranks, because scores of different policies have different scales; keys of equal score have equal rank.

    Attributes:
        parts: pairs of a policy (or its name, with options if need be) and its weight, a number above 0.

    Raises:
        TypeError: something that is no such pair.
        ValueError: no pair, or a weight that is not above 0.

    Example:
        >>> view = CacheView.of_prompt(torch.tensor([5.0, 3.0, 1.0, 2.0, 4.0]).view(1, 1, 5, 1), budget=3)
        >>> Combined([("knorm", 1.0), ("streaming(sinks=1)", 0.5)]).score(view)
        tensor([[[   inf, 0.2500, 0.8750, 0.7500, 0.3750]]])
    """

    parts: Sequence[tuple[EvictionPolicy | str, float]]

    def __post_init__(self) -> None:
        """Builds policies from their names; refuses weights that are none."""
        if isinstance(self.parts, str) or not isinstance(self.parts, Sequence):
            raise TypeError(f"Combined.parts is {self.parts!r}, expected pairs of a policy and its weight")
        object.__setattr__(self, "parts", tuple(_part(part) for part in self.parts))
        if not self.parts:
            raise ValueError("Combined.parts is empty, expected pairs of a policy and its weight")

    @property
    def policies(self) -> tuple[EvictionPolicy, ...]:
        """The policies, in order."""
        return tuple(make_policy(policy) for policy, _ in self.parts)

    @property
    def query_window(self) -> int:
        """Number of last queries: the most that a policy wants."""
        return max(query_window(policy) for policy in self.policies)

    @property
    def tracks_attention(self) -> bool:
        """Whether a policy wants the attention mass."""
        return any(tracks_attention(policy) for policy in self.policies)

    @property
    def needs_tokens(self) -> bool:
        """Whether a policy wants the ids of the tokens."""
        return any(needs_tokens(policy) for policy in self.policies)

    def score(self, view: CacheView) -> Tensor:
        """Scores ``[B, H, K]``: weighted ranks; see the class.

        Raises:
            PolicyError: a policy's scores cannot be used; the message names that policy.
        """
        scores = [checked_scores(policy, _asked_for(policy, view)) for policy in self.policies]
        protected = torch.stack([one == float("inf") for one in scores]).any(0)
        forbidden = torch.stack([one == float("-inf") for one in scores]).any(0)
        free = view.present & ~protected
        ranks = (weight * _ranks(one, free) for one, (_, weight) in zip(scores, self.parts, strict=True))
        total = torch.stack(list(ranks)).sum(0)
        return view.protect(total.masked_fill(forbidden, float("-inf")), protected)


def _ranks(scores: Tensor, free: Tensor) -> Tensor:
    """Share of the free keys of a head that score less, ``[B, H, K]`` float32; 0 for all others."""
    ordered = scores.masked_fill(~free, float("inf")).sort(-1).values
    below = torch.searchsorted(ordered, scores.masked_fill(~free, float("-inf")))
    return below / free.sum(-1, keepdim=True).clamp(min=1)


def _asked_for(policy: EvictionPolicy, view: CacheView) -> CacheView:
    """The view as the cache would show it to this policy alone."""
    window, queries = query_window(policy), view.queries
    return dataclasses.replace(
        view,
        queries=queries[:, :, -window:] if window and queries is not None else None,
        attention=view.attention if tracks_attention(policy) else None,
        token_ids=view.token_ids if needs_tokens(policy) else None,
    )


def _part(part: tuple[EvictionPolicy | str, float]) -> tuple[EvictionPolicy, float]:
    """A checked pair."""
    if not isinstance(part, Sequence) or isinstance(part, str) or len(part) != 2:
        raise TypeError(f"Combined.parts has {part!r}, expected a pair of a policy and its weight")
    policy, weight = part
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise TypeError(f"Combined.parts has the weight {weight!r}, expected a number above 0")
    if not 0 < weight < math.inf:
        raise ValueError(f"Combined.parts has the weight {weight}, expected a number above 0")
    return make_policy(policy), float(weight)
