"""What a task consists of, and reading its rows from the hub or from a local file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from datasets import Dataset, load_dataset

FILES = (".jsonl", ".parquet")


@dataclass(frozen=True)
class Recipe:
    """A data set with a prompt and a reward, for `smdlib.rollout.dataset_env`.

    ``dataclasses.replace`` changes a part of it.
    """

    name: str
    hub: str
    """Id on the hub, and after a colon the configuration."""
    columns: tuple[str | tuple[str, ...], ...]
    """Columns that a source must have; of a tuple, one (it is read under the first name)."""
    build: Callable[[Mapping[str, Any]], str]
    """The prompt of a row."""
    reward: Callable[[str, Mapping[str, Any]], float]
    """Of a response and its row."""
    system_prompt: str | None = None

    def load(self, source: str | Path | None = None, split: str = "train") -> Dataset:
        """Rows with the columns above and ``prompt``.

        Args:
            source: a .jsonl or .parquet file with the columns of the hub's data set, or an id on the hub
                (``id:config``); ``None`` is the recipe's own.
            split: of a data set on the hub; a file is taken whole.

        Raises:
            ValueError: for a missing column or a file of another kind.
        """
        rows = read_rows(self.hub if source is None else source, split)
        picked = [self._pick(row, number) for number, row in enumerate(rows)]
        if not picked:
            raise ValueError(f"{source or self.hub} has no rows")
        return Dataset.from_list([row | {"prompt": self.build(row)} for row in picked])

    def _pick(self, row: Mapping[str, Any], number: int) -> dict[str, Any]:
        picked = {}
        for column in self.columns:
            names = (column,) if isinstance(column, str) else column
            found = [name for name in names if row.get(name) is not None]
            if not found:
                raise ValueError(
                    f"row {number} has no {' or '.join(names)}; {self.name} needs it, and got {sorted(row)}"
                )
            value = row[found[0]]
            # An answer that a reader took for a number or a date is a text again; lists and dicts stay.
            picked[names[0]] = value if isinstance(value, (str, list, dict)) else str(value)
        return picked


def read_rows(source: str | Path, split: str) -> Iterable[Any]:
    """Rows of a local file or of a data set on the hub, as they are."""
    path = Path(source)
    if path.suffix == ".jsonl":
        # The JSON reader of `datasets` guesses types: 2024-05-01 would come back as a time stamp.
        with path.open(encoding="utf-8") as lines:
            return [_parsed(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(path).to_pylist()
    if path.exists():
        raise ValueError(f"{path} is not one of {', '.join(FILES)}")
    name, _, config = str(source).partition(":")
    return cast(Dataset, load_dataset(name, config or None, split=split))


def _parsed(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number} is not JSON: {error.msg} at column {error.colno}") from error
