"""The saved results as tables for the documentation.

python -m benchmarks.table                  # docs/runs/bench.json to docs/runs/bench_table.inc
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks._report import describe, load, results_of, settings
from benchmarks._table import HEADERS, cells, curve

SOURCE, PAGE = Path("docs/runs/bench.json"), Path("docs/runs/bench_table.inc")


def table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of one list-table."""
    yield f".. list-table:: {title}"
    yield "   :header-rows: 1"
    yield ""
    for row in (headers, *rows):
        for index, cell in enumerate(row):
            lead = "   * - " if index == 0 else "     - "
            yield (lead + cell.replace("<=", "≤")).rstrip()
    yield ""


def lines(parts: dict[str, Any]) -> Iterator[str]:
    """Lines of the page's tables: where it was measured, a table a part, one for all growth curves."""
    yield ".. Written by `python -m benchmarks.table`."
    yield ""
    if any(part.get("quick") for part in parts.values()):
        yield ".. warning:: From a run of tiny sizes, which shows that everything runs; its times say nothing."
        yield ""
    environments: dict[str, list[str]] = {}
    for name, part in parts.items():
        environments.setdefault(describe(part), []).append(name)
    for environment, names in environments.items():
        where = "" if len(environments) == 1 else f" ({', '.join(names)})"
        yield f"- {environment}{where}"
    yield ""
    curves = []
    for name, part in parts.items():
        results = results_of(part)
        if name.startswith("growth/"):
            curves += curve(results)
            continue
        last, rows = "", []
        for claim, *rest in map(cells, results):
            rest[5] = "**no**" if rest[5] == "no" else rest[5]
            rows.append(("" if claim == last else claim, *rest))
            last = claim
        yield from table(f"{name}: {settings(part)}", HEADERS, rows)
    if curves:
        yield from table("growth: ratios at each point of the axis", ("against", "of", "at: ratio"), curves)


def write(parts: dict[str, Any], page: Path) -> None:
    """Write the tables to be included."""
    page.write_text("\n".join(lines(parts)), encoding="utf-8")


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:]]
    if len(given) not in (0, 2):
        raise SystemExit("python -m benchmarks.table [results.json table.inc]")
    source, page = given if given else (SOURCE, PAGE)
    write(load(source), page)
