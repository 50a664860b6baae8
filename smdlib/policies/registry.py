"""Policies by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .protocol import EvictionPolicy

_POLICIES: dict[str, type] = {}

PolicyClass = TypeVar("PolicyClass", bound=type)


def register_policy(name: str) -> Callable[[PolicyClass], PolicyClass]:
    """Class decorator that gives a policy the name under which `make_policy` builds it.

    Args:
        name: the name, not yet taken by another class. A class that is defined again (a notebook cell that runs twice)
            replaces its former self.

    Raises:
        TypeError: the name is not a non-empty string, or the class has no ``score`` method.
        ValueError: another class has that name.

    Example:
        >>> from dataclasses import dataclass
        >>> @register_policy("oldest-example")
        ... @dataclass(frozen=True)
        ... class OldestPolicy:
        ...     def score(self, view):
        ...         return -view.positions.float()
        >>> make_policy("oldest-example")
        OldestPolicy()
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"a policy's name is {name!r}, expected a string: write @register_policy('my_policy')")

    def register(cls: PolicyClass) -> PolicyClass:
        if not isinstance(cls, type) or not callable(getattr(cls, "score", None)):
            raise TypeError(f"policy {name!r}: expected a class with a method score(view), got {cls!r}")
        taken = _POLICIES.get(name)
        if taken is not None and _full_name(taken) != _full_name(cls):
            raise ValueError(
                f"policy {name!r} is already {_full_name(taken)}: choose a free name for {_full_name(cls)}"
            )
        _POLICIES[name] = cls
        return cls

    return register


def available_policies() -> tuple[str, ...]:
    """Names of all registered policies, sorted.

    Example:
        >>> "snapkv" in available_policies()
        True
    """
    return tuple(sorted(_POLICIES))


def make_policy(policy: str | EvictionPolicy, **options: Any) -> EvictionPolicy:
    """Builds a policy from its name, or hands a ready one through.

    Args:
        policy: a registered name, or a policy object, which is returned as it is.
        **options: the policy's options, for a name only.

    Raises:
        ValueError: unknown name, or an option's value is refused.
        TypeError: unknown option, options with a policy object, or something that is neither a name nor a policy.

    Example:
        >>> make_policy("streaming", sinks=2)
        StreamingPolicy(sinks=2)
    """
    if not isinstance(policy, str):
        return _ready(policy, options)
    cls = _POLICIES.get(policy)
    if cls is None:
        raise ValueError(f"unknown policy {policy!r}, available: {', '.join(available_policies())}")
    parameters = inspect.signature(cls).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [parameter.name for parameter in parameters]
        unknown = [option for option in options if option not in known]
        if unknown:
            raise TypeError(
                f"policy {policy!r} has no option {_listed(unknown)}, its options: {_listed(known) or 'none'}"
            )
    return cls(**options)


def _ready(policy: object, options: dict[str, Any]) -> EvictionPolicy:
    """A policy that its caller has built."""
    if isinstance(policy, type) or not isinstance(policy, EvictionPolicy):
        raise TypeError(f"expected a policy's name or an object with a method score(view), got {policy!r}")
    if options:
        raise TypeError(
            f"options {_listed(options)} given with a ready {type(policy).__name__}: "
            "set them where it is built, or pass its name"
        )
    return policy


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
