"""Tables in reStructuredText, and what stands in their cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .statistics import bootstrap, paired

NONE = "\u2013"


def list_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], widths: str = "auto") -> str:
    """Return a table in reStructuredText, or nothing without rows.

    Example:
        >>> print(list_table("Sizes", ["what", "size"], [["a", "1"]]))
        .. list-table:: Sizes
           :header-rows: 1
           :widths: auto
        <BLANKLINE>
           * - what
             - size
           * - a
             - 1
        <BLANKLINE>
    """
    lines = [f".. list-table:: {title}", "   :header-rows: 1", f"   :widths: {widths}", ""]
    body = list(rows)
    for row in [header, *body]:
        lines += [f"   {'* -' if not index else '  -'} {cell or NONE}" for index, cell in enumerate(row)]
    return "\n".join(lines) + "\n" if body else ""


def mean_cell(values: dict[int, float]) -> str:
    """Mean and interval, or a dash."""
    return str(bootstrap(list(values.values()))) if values else NONE


def difference_cell(one: dict[int, float], other: dict[int, float]) -> str:
    """Paired difference and interval, or a dash."""
    return str(paired(one, other)) if one.keys() & other.keys() else NONE


def figure_cell(values: dict[int, float], how: str = "{:.3g}") -> str:
    """Mean over seeds, without an interval."""
    return how.format(sum(values.values()) / len(values)) if values else NONE


def worst_cell(values: dict[int, float]) -> str:
    """The largest over seeds."""
    return f"{max(values.values()):.2g}" if values else NONE
