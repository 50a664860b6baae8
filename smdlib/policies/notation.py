"""Policies written as text: a name, or a name with options."""

from __future__ import annotations

import ast
import re
from typing import Any

_SHAPE = re.compile(r"\s*([^()]*?)\s*(?:\((.*)\))?\s*", re.DOTALL)


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a policy written as text, as a command line or a configuration file has it.

    Options are ``name=value`` with literal values (numbers, strings, True, False, None, lists, tuples and dicts of
    them); nothing is evaluated.

    Args:
        text: such as ``"snapkv"`` or ``"snapkv(window=16, pooling='avg')"``.

    Raises:
        ValueError: the text is no such thing; the message says where it departs.

    Example:
        >>> parse_policy("snapkv(window=16, pooling='avg')")
        ('snapkv', {'window': 16, 'pooling': 'avg'})
        >>> parse_policy("h2o")
        ('h2o', {})
    """
    shape = _SHAPE.fullmatch(text)
    if shape is None or not shape[1]:
        raise ValueError(
            f"policy {text!r}: expected a name, or a name with options in parentheses, such as 'snapkv(window=16)'"
        )
    name, inside = shape.groups()
    if inside is None:
        return name, {}
    try:
        call = ast.parse(f"f({inside}\n)", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = getattr(error, "msg", error)
        raise ValueError(
            f"policy {text!r}: cannot read its options ({reason}), expected name=value, separated by commas"
        ) from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"policy {text!r}: expected one pair of parentheses around all options")
    options: dict[str, Any] = {}
    nameless = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg is None)]
    if nameless:
        raise ValueError(f"policy {text!r}: {ast.unparse(nameless[0])} has no name, expected option=value")
    for keyword in call.keywords:
        assert keyword.arg is not None
        if keyword.arg in options:
            raise ValueError(f"policy {text!r}: option {keyword.arg} is given twice")
        try:
            options[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError(
                f"policy {text!r}: option {keyword.arg} is {ast.unparse(keyword.value)}, expected a literal (strings "
                "in quotes)"
            ) from error
    return name, options
