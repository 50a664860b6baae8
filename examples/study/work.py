"""Does the jobs of a grid in a few processes of one thread each, and goes on where it was stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from . import results
from .grid import Grid, Job, check_unique


def begin_worker() -> None:
    """Prepare a process of the pool."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A pool whose owner was killed would wait for work for ever.
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    # Of an interrupt its owner tells.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    one_thread()


def one_thread() -> None:
    """Make this process compute in one thread: sums in another order would be other numbers."""
    import tensordict
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tensordict.set_list_to_stack(True).set()


def do_checkpoint(grid: Grid, folder: Path, which: tuple[str, int]) -> str:
    """Pre-train one checkpoint unless it is there."""
    from .pretrain import checkpoint
    from .run import TASKS

    name, seed = which
    return str(checkpoint(folder, TASKS[name], grid.shape, seed, grid.pretraining))


def do_job(grid: Grid, folder: Path, job: Job) -> dict[str, Any]:
    """Do one run."""
    from .run import run

    return run(job.setting, grid.scale, grid.shape, grid.pretraining, folder, job.also)


def do_grid(grid: Grid, out: Path, workers: int) -> list[dict[str, Any]]:
    """Do all jobs that ``out / "results.jsonl"`` does not have yet; each is written as soon as it is finished.

    Args:
        grid: The jobs.
        out: Folder of the results and checkpoints.
        workers: Processes.

    Returns:
        The records of the grid's jobs, in the grid's order.

    Raises:
        ValueError: for less than one worker, or a folder with runs of another size.
        RuntimeError: if runs failed; the others are done.
    """
    check_unique(grid.jobs)
    if workers < 1:
        raise ValueError(f"workers is {workers}; runs need at least 1 process.")
    path, folder = out / "results.jsonl", out / "checkpoints"
    _claim(out, grid.size)
    done = {record["key"] for record in results.load(path)}
    missing = [job for job in grid.jobs if job.setting.key not in done]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    if missing:
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress, _pool(workers) as pool:
            rest = Grid(tuple(missing), grid.scale, grid.shape, grid.pretraining)
            for _ in _each(pool, partial(do_checkpoint, grid, folder), rest.checkpoints, progress, "pre-training"):
                pass
            for record in _each(pool, partial(do_job, grid, folder), missing, progress, "runs"):
                results.append(path, record)
    found = {record["key"]: record for record in results.load(path)}
    return [found[job.setting.key] for job in grid.jobs]


def _claim(out: Path, size: dict[str, Any]) -> None:
    """Note the size of the folder's runs; refuse a folder with others, whose settings have the same names."""
    note, text = out / "size.json", json.dumps(size, indent=1)
    if note.exists() and json.loads(note.read_text(encoding="utf-8")) != size:
        raise ValueError(f"{out} has runs of another size ({note}); give another folder with --out.")
    out.mkdir(parents=True, exist_ok=True)
    note.write_text(text, encoding="utf-8")


def _pool(workers: int) -> ProcessPoolExecutor:
    # Read when the libraries are loaded, so before the processes start.
    os.environ["OMP_NUM_THREADS"] = "1"
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=begin_worker)


def _each(pool: ProcessPoolExecutor, do: Callable, items: list, progress: Progress, what: str) -> Iterator[Any]:
    """Yield what comes out as it comes; one that fails does not stop the others, and is raised when all are through."""
    bar = progress.add_task(what, total=len(items))
    waiting = {pool.submit(do, item): item for item in items}
    failed: list[tuple[Any, BaseException]] = []
    try:
        for future in as_completed(waiting):
            error = future.exception()
            if error is None:
                yield future.result()
            else:
                failed.append((waiting[future], error))
            progress.advance(bar)
    finally:
        for future in waiting:
            future.cancel()
    if failed:
        item, error = failed[0]
        raise RuntimeError(f"{len(failed)} of {len(items)} {what} failed, the first was {item}: {error}") from error
