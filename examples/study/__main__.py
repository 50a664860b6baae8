"""Command line of the study: ``python -m examples.study run | report | compare | try | language``, with ``--help``."""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table as Rows

from . import results

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "runs" / "study"
COMMITTED = ROOT / "docs" / "runs" / "study.jsonl"
LANGUAGE = COMMITTED.with_name("study_smollm2.jsonl")


@dataclass(frozen=True)
class Run:
    """Do all runs that are missing, then write the tables and figures of what there is into the folder."""

    out: Path | None = None
    """Folder; by default ``runs/study``, of the quick runs ``runs/study_quick``."""
    quick: bool = False
    """Every arm for two updates of a small model: whether it all works, in a few minutes."""
    workers: int = 2
    """Processes of one thread each."""

    def __call__(self, console: Console) -> int:
        """Do it."""
        from .grid import full_grid, quick_grid
        from .work import do_grid

        grid, out = (quick_grid(), RUNS.with_name("study_quick")) if self.quick else (full_grid(), RUNS)
        out = self.out or out
        records = do_grid(grid, out, self.workers)
        _write(console, out / "results.jsonl", out / "study_tables.inc", out)
        if self.quick:
            console.print("All arms run. Numbers of so small a model, after two updates, mean nothing.")
        elif COMMITTED.exists():
            return _tell_differences(console, records, results.load(COMMITTED))
        return 0


@dataclass(frozen=True)
class Report:
    """Write all tables and figures of the documentation's page."""

    results: Path = COMMITTED
    language: Path = LANGUAGE
    tables: Path = ROOT / "docs" / "runs" / "study_tables.inc"
    figures: Path = ROOT / "docs" / "_static"

    def __call__(self, console: Console) -> int:
        """Do it."""
        from .figures import WORDS
        from .language import language_table
        from .report import arms_table, images

        table = _write(console, self.results, self.tables, self.figures)
        # Seen from the page that includes it, one folder above.
        pictures = images(table, {f"_static/study_{name}.png": words for name, words in WORDS.items()})
        parts = {"arms": arms_table(), "language": language_table(results.load(self.language)), "images": pictures}
        for name, text in parts.items():
            self.tables.with_name(f"study_{name}.inc").write_text(text, encoding="utf-8")
        return 0


@dataclass(frozen=True)
class Compare:
    """Tell which runs of a results file have other numbers than the committed ones."""

    results: Path = RUNS / "results.jsonl"
    committed: Path = COMMITTED

    def __call__(self, console: Console) -> int:
        """Do it."""
        return _tell_differences(console, _read(self.results), _read(self.committed))


@dataclass(frozen=True)
class Try:
    """Run one arm once, as the full grid would; print what it solved beside the committed arms of that seed.

    Takes a minute, and a few more where the checkpoint has to be pre-trained first.
    """

    file: tyro.conf.Positional[Path]
    """Python file that registers the arm. It is run first; any other file will do for an arm that the study has."""
    arm: tyro.conf.Positional[str]
    task: str = "chase"
    seed: int = 0
    out: Path = RUNS
    """Folder with the checkpoints; the record is added to its ``tries.jsonl``."""

    def __call__(self, console: Console) -> int:
        """Do it."""
        from .claims import EVALUATIONS
        from .grid import RATES, full_grid
        from .run import run
        from .setting import Setting
        from .work import one_thread

        one_thread()
        runpy.run_path(str(self.file))
        grid, setting = full_grid(), Setting(self.arm, self.task, rate=RATES.get(self.task, 0.0), seed=self.seed)
        with console.status(
            f"{setting.key}: pre-training if there is no checkpoint yet, then {grid.scale.updates} updates"
        ):
            record = run(setting, grid.scale, grid.shape, grid.pretraining, self.out / "checkpoints")
        path = self.out / "tries.jsonl"
        results.append(path, record)
        known = {one["key"]: one for one in results.load(COMMITTED)}
        others = [known.get(setting.but(arm=name).key) for name in ("dense", "naive", "smd")]
        rows = Rows("arm", *EVALUATIONS.values(), title=f"{self.task}, seed {self.seed}: share solved")
        for one in [record, *(one for one in others if one is not None)]:
            rows.add_row(one["setting"]["arm"], *(f"{one['solved'][name]:.3f}" for name in EVALUATIONS))
        console.print(rows, f"all figures: {path}", sep="\n")
        return 0


@dataclass(frozen=True)
class Language:
    """Train SmolLM2 with four arms; what is missing of them takes about a quarter of an hour a run."""

    out: Path = ROOT / "runs" / "study_smollm2"
    seeds: int = 2
    workers: int = 2
    """Processes of one thread and about 6 GB each."""

    def __call__(self, console: Console) -> int:
        """Do it."""
        from .language import Size, do_runs

        records = do_runs(self.out, Size(), range(self.seeds), self.workers)
        console.print(f"{len(records)} runs: {self.out / 'results.jsonl'}")
        return 0


def _read(path: Path) -> list[dict[str, Any]]:
    """The records of a file that has to be there."""
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; `make study` writes one.")
    return results.load(path)


def _write(console: Console, path: Path, tables: Path, figures: Path) -> Any:
    """Write the tables and figures of a results file; return its table."""
    from .figures import draw
    from .report import tables as all_tables
    from .table import Table

    table = Table(_read(path))
    tables.parent.mkdir(parents=True, exist_ok=True)
    tables.write_text(all_tables(table), encoding="utf-8")
    drawn = draw(table, figures) if table.records else []
    console.print(f"{len(table.records)} runs: {tables} and {len(drawn)} figures in {figures}")
    return table


def _tell_differences(console: Console, ours: list[dict], committed: list[dict]) -> int:
    """1 where shared runs differ, or there are none."""
    shared = {record["key"] for record in ours} & {record["key"] for record in committed}
    other = results.differences(ours, committed)
    console.print(f"{len(shared)} runs are committed too; {len(other)} have other numbers.")
    for key in other:
        console.print(f"  {key}")
    return int(bool(other) or not shared)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code."""
    command = tyro.cli(Run | Report | Compare | Try | Language, args=arguments)  # pyright: ignore[reportCallIssue, reportArgumentType]
    try:
        return command(Console())
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False)
        return 2
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; finished runs are kept, and the same command goes on.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
