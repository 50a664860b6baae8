"""Rows as cells, on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks._measure import Result

HEADERS = ("claim", "case", "median", "ratio", "of", "goal", "met", "bytes")


def cells(result: Result) -> tuple[str, ...]:
    """Cells of a row: claim, case, median, ratio, of, goal, met, bytes."""
    return (
        result.claim,
        result.case,
        duration(result.seconds),
        "" if result.ratio is None else f"{result.ratio:.2f}" if abs(result.ratio) >= 0.1 else f"{result.ratio:.2g}",
        result.of,
        "" if result.goal is None else f"{'=' if result.exactly else '<='} {result.goal:.3g}",
        {None: "", True: "yes", False: "no"}[result.met],
        size(result.bytes),
    )


def duration(seconds: float | None) -> str:
    """Write a time with its unit."""
    if seconds is None:
        return ""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def size(count: int | None) -> str:
    """Write bytes with their unit, in powers of ten."""
    if count is None:
        return ""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}" if unit == "GB" else f"{count / scale:.1f} {unit}"
    return f"{count} B"


def show(results: Sequence[Result], title: str = "") -> None:
    """Print one table."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for header in HEADERS:
        table.add_column(header, justify="right" if header in ("median", "ratio", "goal", "bytes") else "left")
    last = ""
    for result in results:
        claim, *rest = cells(result)
        if last and claim != last:
            table.add_section()
        style = {None: "", True: "green", False: "bold red"}[result.met]
        rest[5] = f"[{style}]{rest[5]}[/]" if style else ""
        table.add_row("" if claim == last else claim, *rest)
        last = claim
    console().print(table)


def console() -> Any:
    """Where tables go. A pipe or a file has no width of its own; a cut number is worse than a long line."""
    from rich.console import Console

    here = Console()
    return here if here.is_terminal else Console(width=180)


def curve(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """Sum a growth curve up: claim, case, and ``at: ratio`` of every point, of the ways that are not the peer."""
    lines: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.case != result.of and result.ratio is not None:
            lines.setdefault((result.claim, f"{result.case} / {result.of}"), []).append(
                f"{result.at:g}: {result.ratio:.2f}"
            )
    return [(claim, case, ", ".join(points)) for (claim, case), points in lines.items()]


def show_curves(curves: Sequence[Sequence[Result]]) -> None:
    """Print the ratios of growth curves, a line each."""
    lines = [line for results in curves for line in curve(results)]
    if not lines:
        return
    from rich.table import Table

    table = Table(title="how it grows: ratios, at each point of the axis", title_justify="left")
    for header in ("against", "of", "at: ratio"):
        table.add_column(header)
    for line in lines:
        table.add_row(*line)
    console().print(table)
