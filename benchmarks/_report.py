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
from benchmarks._table import show

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


def main(name: str, parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], list[Result]]) -> None:
    """Run one script from its command line; ``name`` is that of its part in a file."""
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    args = parser.parse_args()
    start = time.perf_counter()
    results = measure(args)
    part = make_part(args, results, time.perf_counter() - start)
    show(results, f"{describe(part)}\n{settings(part)}")
    if args.json:
        save(args.json, name, part)


def describe(part: dict[str, Any]) -> str:
    """Say in a line on what a part was measured."""
    where = part["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if name != "smdlib")
    return f"{where['machine']}, {where['threads']} threads, {where['memory_gb']} GB; {versions}; {part['date']}"


def settings(part: dict[str, Any]) -> str:
    """Write the arguments of a part in a line."""
    plain = {name: " ".join(map(str, value)) if isinstance(value, list | tuple) else value
             for name, value in part["arguments"].items()}  # fmt: skip
    return ", ".join(f"{name} {value}" for name, value in plain.items())
