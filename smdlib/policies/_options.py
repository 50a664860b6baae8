"""Checks that the policies' options share."""

from __future__ import annotations

import warnings


def check_int(policy: object, option: str, *, at_least: int | None = None) -> None:
    """Refuses an option that is not an int, or is too small.

    Args:
        policy: the policy that is being built.
        option: name of the field.
        at_least: smallest value that makes sense; None for any.

    Raises:
        TypeError: not an int.
        ValueError: too small.
    """
    value, name = getattr(policy, option), f"{type(policy).__name__}.{option}"
    expected = "an int" if at_least is None else f"an int >= {at_least}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, expected {expected}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name} is {value}, expected {expected}")


def check_odd(policy: object, option: str) -> None:
    """Refuses a number of neighbours that has no middle.

    Args:
        policy: the policy that is being built.
        option: name of the field.

    Raises:
        TypeError: not an int.
        ValueError: even, or below 1.
    """
    check_int(policy, option, at_least=1)
    value = getattr(policy, option)
    if value % 2 == 0:
        raise ValueError(f"{type(policy).__name__}.{option} is {value}, expected an odd number, such as 7")


def check_share(policy: object, option: str) -> None:
    """Refuses an option that is not a number from 0 to 1.

    Args:
        policy: the policy that is being built.
        option: name of the field.

    Raises:
        TypeError: not a number.
        ValueError: out of range, or not a number in the other sense.
    """
    value, name = getattr(policy, option), f"{type(policy).__name__}.{option}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}, expected a number from 0 to 1")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}, expected a number from 0 to 1")


def warn_without_sinks(policy: object) -> None:
    """Warns that this policy will evict the first tokens."""
    warnings.warn(
        f"{type(policy).__name__} without sinks evicts the first tokens of a sequence, which breaks most pretrained "
        "models: set sinks=4 unless that is what you want to study",
        UserWarning,
        stacklevel=4,  # this function, __post_init__, the dataclass's __init__, the caller
    )
