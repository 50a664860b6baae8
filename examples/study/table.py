"""Looks up runs by setting: values per seed, ready to be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .arms import samples_dense
from .setting import Eviction, Setting


def first_five(values: Mapping[int, float]) -> dict[int, float]:
    """Of the values by seed those of the seeds that every setting was run with."""
    return {seed: value for seed, value in values.items() if seed < 5}


class Table:
    """The records of a results file.

    Args:
        records: As `study.run.run` returns them.
    """

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        self.records = list(records)
        self.settings = [Setting.from_dict(record["setting"]) for record in self.records]
        self._by_cell: dict[str, dict[int, dict[str, Any]]] = {}
        for setting, record in zip(self.settings, self.records, strict=True):
            self._by_cell.setdefault(setting.cell, {})[setting.seed] = record

    def runs(self, setting: Setting) -> dict[int, dict[str, Any]]:
        """Records of a setting by seed, whatever the setting's own seed."""
        return self._by_cell.get(setting.cell, {})

    def values(self, setting: Setting, evaluation: str) -> dict[int, float]:
        """Share of problems solved by seed.

        Args:
            setting: Whose arm; one that samples dense is found at the default eviction, in the seeds that were
                evaluated under this one.
            evaluation: ``dense``, or ``sparse`` for greedy decoding under the setting's own eviction.
        """
        name, runs = evaluation, self.runs(setting)
        if not runs and samples_dense(setting.arm):
            label = setting.eviction.label
            runs = self.runs(setting.but(eviction=Eviction()))
            runs = {seed: record for seed, record in runs.items() if label in record["solved"]}
            name = label if evaluation == "sparse" else evaluation
        return {seed: record["solved"][name] for seed, record in runs.items() if name in record["solved"]}

    def figure(self, setting: Setting, read: Callable[[dict[str, Any]], float | None]) -> dict[int, float]:
        """Any other number of a setting's runs by seed, where they have it."""
        found = {seed: read(record) for seed, record in self.runs(setting).items()}
        return {seed: value for seed, value in found.items() if value is not None}
