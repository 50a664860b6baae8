"""What an eviction policy is: one method and three optional attributes."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from .errors import PolicyError
from .view import CacheView


@runtime_checkable
class EvictionPolicy(Protocol):
    """Scores the keys of one layer; the cache keeps those with the largest scores, as many as the budget allows.

    Anything with a ``score`` method is a policy; nothing need be inherited. Three attributes may be added:

    - ``query_window: int`` (0 if absent): how many of the last queries the policy wants in ``view.queries``.
    - ``tracks_attention: bool`` (False if absent): whether it wants ``view.attention``. The prefill then costs more.
    - ``needs_tokens: bool`` (False if absent): whether it wants ``view.token_ids``.

    A policy keeps no state between calls: the same object serves every layer and several generations.

    Example:
        >>> class Oldest:
        ...     def score(self, view):
        ...         return -view.positions.float()
        >>> isinstance(Oldest(), EvictionPolicy), query_window(Oldest()), tracks_attention(Oldest())
        (True, 0, False)
    """

    def score(self, view: CacheView) -> Tensor:
        """Scores every slot of a layer.

        Args:
            view: the layer, with K slots.

        Returns:
            ``[B, H, K]`` float32, larger is kept longer, ties go to the newer key. ``+inf`` protects a key while the
            budget has room for it, ``-inf`` says that it may never be kept. What an empty slot gets does not matter.
        """
        ...


def query_window(policy: EvictionPolicy) -> int:
    """Number of last queries that a policy wants to see.

    Args:
        policy: the policy, whose ``query_window`` attribute is read; 0 if it has none.

    Raises:
        PolicyError: the attribute is not an int of at least 0.

    Example:
        >>> from smdlib.policies import make_policy
        >>> query_window(make_policy("snapkv", window=16))
        16
    """
    window = getattr(policy, "query_window", 0)
    if isinstance(window, bool) or not isinstance(window, int) or window < 0:
        name = type(policy).__name__
        raise PolicyError(f"{name}.query_window is {window!r}, expected a number of queries (an int >= 0)")
    return window


def tracks_attention(policy: EvictionPolicy) -> bool:
    """Whether a policy wants the attention mass that each key has received.

    Args:
        policy: the policy, whose ``tracks_attention`` attribute is read; False if it has none.

    Raises:
        PolicyError: the attribute is not a bool.

    Example:
        >>> from smdlib.policies import make_policy
        >>> tracks_attention(make_policy("h2o"))
        True
    """
    return _flag(policy, "tracks_attention")


def needs_tokens(policy: EvictionPolicy) -> bool:
    """Whether a policy wants the id of each key's token.

    Args:
        policy: the policy, whose ``needs_tokens`` attribute is read; False if it has none.

    Raises:
        PolicyError: the attribute is not a bool.

    Example:
        >>> from smdlib.policies import make_policy
        >>> needs_tokens(make_policy("protected(policy='knorm', token_ids=[7])"))
        True
    """
    return _flag(policy, "needs_tokens")


def _flag(policy: EvictionPolicy, name: str) -> bool:
    value = getattr(policy, name, False)
    if not isinstance(value, bool):
        raise PolicyError(f"{type(policy).__name__}.{name} is {value!r}, expected True or False")
    return value
