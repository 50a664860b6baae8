"""The one exception that this package adds."""

from __future__ import annotations


class PolicyError(ValueError):
    """An eviction policy broke its contract. The message names the policy and, where one is concerned, the layer.

    Example:
        >>> issubclass(PolicyError, ValueError)
        True
    """
