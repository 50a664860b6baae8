"""Policies by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .errors import PolicyError
from .notation import parse_policy
from .plugins import load_plugin, plugin_names
from .protocol import EvictionPolicy

_POLICIES: dict[str, type] = {}
_WRAPPERS: set[str] = set()

PolicyClass = TypeVar("PolicyClass", bound=type)


def register_policy(name: str, *, wraps: bool = False) -> Callable[[PolicyClass], PolicyClass]:
    """Class decorator that gives a policy the name under which `make_policy` builds it.

    A package that is to be found without being imported names its policies in its ``pyproject.toml`` as well::

        [project.entry-points."smdlib.policies"]
        oldest = "my_package.policies:OldestPolicy"

    Args:
        name: the name, not yet taken by another class. A class that is defined again (a notebook cell that runs twice)
            replaces its former self.
        wraps: the class is built around other policies, so its name alone makes none; `available_policies` leaves it
            out.

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
        if wraps:
            _WRAPPERS.add(name)
        return cls

    return register


def available_policies() -> tuple[str, ...]:
    """Names of all registered policies and of those that installed packages offer (not imported for it), sorted.

    Example:
        >>> "snapkv" in available_policies()
        True
    """
    return tuple(sorted((_POLICIES.keys() | plugin_names()) - _WRAPPERS))


def make_policy(policy: str | EvictionPolicy, /, **options: Any) -> EvictionPolicy:
    """Builds a policy from its name, or hands a ready one through.

    Args:
        policy: a name, a name with options such as ``"snapkv(window=16, pooling='avg')"`` (literals; nothing is
            evaluated), or a policy object, which is returned as it is. A name that is not registered is looked for
            among the entry points (group ``smdlib.policies``) of installed packages.
        **options: the policy's options, for a name only.

    Raises:
        ValueError: unknown name, unreadable options, or an option's value is refused.
        TypeError: unknown, missing or repeated option, options with a policy object, or something that is neither a
            name nor a policy.
        PolicyError: another package offers the policy, but fails to load; the message names it.

    Example:
        >>> make_policy("streaming", sinks=2)
        StreamingPolicy(sinks=2)
        >>> make_policy("snapkv(window=16, pooling='avg')")
        SnapKVPolicy(window=16, kernel_size=7, pooling='avg')
        >>> make_policy("protected(policy='knorm', sinks=4)").policy
        KnormPolicy()
    """
    if not isinstance(policy, str):
        return _ready(policy, options)
    name, written = (policy, {}) if policy in _POLICIES else parse_policy(policy)
    repeated = [option for option in written if option in options]
    if repeated:
        raise TypeError(f"policy {policy!r}: option {_listed(repeated)} is given in the text and as an argument")
    return _build(name, written | options)


def _build(policy: str, options: dict[str, Any]) -> EvictionPolicy:
    """A policy of a registered name, or of another package."""
    cls = _POLICIES.get(policy) or _plugin(policy)
    if cls is None:
        raise ValueError(
            f"unknown policy {policy!r}, available: {_listed(available_policies())}; "
            f"wrappers: {_listed(sorted(_WRAPPERS))}"
        )
    parameters = inspect.signature(cls).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [parameter.name for parameter in parameters]
        unknown = [option for option in options if option not in known]
        if unknown:
            raise TypeError(
                f"policy {policy!r} has no option {_listed(unknown)}, its options: {_listed(known) or 'none'}"
            )
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.name not in options
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if missing:
        raise TypeError(f"policy {policy!r} needs {_listed(missing)}")
    return cls(**options)


def _plugin(name: str) -> type | None:
    """The policy that an installed package offers under a name, registered from now on."""
    found = load_plugin(name)
    if found is None:
        return None
    loaded, origin = found
    if name not in _POLICIES:  # else the module's own @register_policy has run
        try:
            register_policy(name)(loaded)  # pyright: ignore[reportArgumentType]
        except TypeError as error:
            raise PolicyError(f"{origin}: {error}") from error
    return _POLICIES[name]


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
