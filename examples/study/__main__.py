"""Command line of the study: ``python -m examples.study run | report | compare | try | language``, with ``--help``."""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from . import results

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "docs" / "runs" / "study.jsonl"
LANGUAGE = COMMITTED.with_name("study_smollm2.jsonl")


@dataclass(frozen=True)
class Run:
    """Do all runs that are missing, then write the tables and figures of what there is into the folder."""

    out: Path = ROOT / "runs" / "study"
    quick: bool = False
    """Every arm for two updates of a small model: whether it all works, in a few minutes."""
    workers: int = 2
    """Processes of one thread each."""

    def __call__(self, console: Console) -> int:
        """Do it."""
        from .grid import full_grid, quick_grid
        from .work import do_grid

        records = do_grid(quick_grid() if self.quick else full_grid(), self.out, self.workers)
        report = Report(self.out / "results.jsonl", tables=self.out / "study_tables.inc", figures=self.out)
        code = report(console)
        if not self.quick and COMMITTED.exists():
            code = max(code, _tell_differences(console, records, results.load(COMMITTED)))
        return code


@dataclass(frozen=True)
class Report:
    """Write the tables and figures of a results file; by default those of the documentation."""

    results: Path = COMMITTED
    language: Path = LANGUAGE
    tables: Path = ROOT / "docs" / "runs" / "study_tables.inc"
    figures: Path = ROOT / "docs" / "_static"

    def __call__(self, console: Console) -> int:
        """Do it."""
        from .figures import WORDS, draw
        from .language import language_table
        from .report import arms_table, images, tables
        from .table import Table

        table = Table(results.load(self.results))
        self.tables.parent.mkdir(parents=True, exist_ok=True)
        self.tables.write_text(tables(table), encoding="utf-8")
        self.tables.with_name("study_arms.inc").write_text(arms_table(), encoding="utf-8")
        language = language_table(results.load(self.language))
        self.tables.with_name("study_language.inc").write_text(language, encoding="utf-8")
        # Seen from the page that includes it, one folder above.
        pictures = images(table, {f"_static/study_{name}.png": words for name, words in WORDS.items()})
        self.tables.with_name("study_images.inc").write_text(pictures, encoding="utf-8")
        drawn = draw(table, self.figures) if table.records else []
        console.print(f"{len(table.records)} runs: {self.tables} and {len(drawn)} figures in {self.figures}")
        return 0


@dataclass(frozen=True)
class Compare:
    """Tell which runs of a results file have other numbers than the committed ones."""

    results: Path = ROOT / "runs" / "study" / "results.jsonl"
    committed: Path = COMMITTED

    def __call__(self, console: Console) -> int:
        """Do it."""
        return _tell_differences(console, results.load(self.results), results.load(self.committed))


@dataclass(frozen=True)
class Try:
    """Run one arm once, as the full grid would, and print its record."""

    file: tyro.conf.Positional[Path]
    """Python file that registers the arm; of one that ships, any file that imports."""
    arm: tyro.conf.Positional[str]
    task: str = "chase"
    seed: int = 0
    out: Path = ROOT / "runs" / "study"

    def __call__(self, console: Console) -> int:
        """Do it."""
        from .grid import RATES, full_grid
        from .run import run
        from .setting import Setting
        from .work import one_thread

        one_thread()
        runpy.run_path(str(self.file))
        grid, setting = full_grid(), Setting(self.arm, self.task, rate=RATES[self.task], seed=self.seed)
        console.print_json(data=run(setting, grid.scale, grid.shape, grid.pretraining, self.out / "checkpoints"))
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


def _tell_differences(console: Console, ours: list[dict], committed: list[dict]) -> int:
    shared = {record["key"] for record in ours} & {record["key"] for record in committed}
    other = results.differences(ours, committed)
    console.print(f"{len(shared)} runs are committed too; {len(other)} have other numbers.")
    for key in other:
        console.print(f"  {key}")
    return int(bool(other))


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code."""
    command = tyro.cli(Run | Report | Compare | Try | Language, args=arguments)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return command(Console())


if __name__ == "__main__":
    sys.exit(main())
