"""What becomes of results: one JSON file that grows part by part, one table, and a command line for every script."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks._measure import Result

PACKAGES = ("torch", "transformers", "torchrl", "tensordict", "kvpress", "smdlib")


def environment(device: str) -> dict[str, Any]:
    """Say on what, with what and from which revision something was measured."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cuda = torch.device(device).type == "cuda"
    return {
        "machine": torch.cuda.get_device_name() if cuda else processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "versions": versions,
        "revision": revision(),
    }


def processor() -> str:
    """Name of the processor, as the system gives it."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def revision() -> str | None:
    """Commit of the checkout, with a + where files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude", "*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def make_part(args: argparse.Namespace, results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """Put together what is saved of one run of a script."""
    arguments = {name: value for name, value in vars(args).items() if name != "json"}
    return {
        "arguments": arguments,
        "seconds": round(seconds, 1),
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment(args.device),
        "results": [asdict(result) | {"met": result.met} for result in results],
    }


def load(path: Path) -> dict[str, Any]:
    """Read the parts of a file, none if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def save(path: Path, name: str, part: dict[str, Any]) -> None:
    """Put one part into a file, leaving the others; the file is replaced whole."""
    parts = load(path) | {name: part}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(parts, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def results_of(part: dict[str, Any]) -> list[Result]:
    """Rows of a saved part."""
    return [Result(**{name: value for name, value in row.items() if name != "met"}) for row in part["results"]]


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


HEADERS = ("claim", "case", "median", "ratio", "of", "goal", "met", "bytes")


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
    from rich.console import Console
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
    # A pipe or a file has no width of its own; a cut number is worse than a long line.
    console = Console()
    (console if console.is_terminal else Console(width=180)).print(table)


def main(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], list[Result]]) -> None:
    """Run one script from its command line."""
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    args = parser.parse_args()
    start = time.perf_counter()
    results = measure(args)
    part = make_part(args, results, time.perf_counter() - start)
    where = part["environment"]
    arguments = ", ".join(f"{name} {value}" for name, value in part["arguments"].items())
    show(results, f"{where['machine']}, {where['threads']} threads, torch {where['versions']['torch']}\n{arguments}")
    if args.json:
        save(args.json, parser.prog.removeprefix("python -m benchmarks."), part)
