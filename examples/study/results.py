"""The results file: one JSON line per finished run, written at once, never lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def load(path: Path) -> list[dict[str, Any]]:
    """Read all whole lines; a last one that was cut off while writing does not count.

    Raises:
        ValueError: for a damaged line that is not the last one.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines) - 1:
                raise ValueError(f"line {number + 1} of {path} is damaged.") from error
    return records


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one line, on disk before this returns; cuts off a line that an earlier writer left unfinished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.seek(0, os.SEEK_END)
        file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def numbers(record: dict[str, Any]) -> dict[str, Any]:
    """All of a record that has to be the same on a second run: everything but times."""
    cost = {name: value for name, value in record.get("cost", {}).items() if not name.endswith("seconds")}
    return record | {"cost": cost}


def differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    """Keys of runs that both files have, with other numbers."""
    known = {record["key"]: numbers(record) for record in other}
    return [r["key"] for r in one if r["key"] in known and known[r["key"]] != numbers(r)]
