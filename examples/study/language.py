"""The same question of a pretrained language model: runs of ``examples/train_smd.py``, and a table of them.

``python -m examples.study language`` does all that are missing: SmolLM2-135M on the register task, four arms.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from . import results
from .cells import figure_cell, list_table, worst_cell
from .run import summary

SCRIPT = Path(__file__).resolve().parents[1] / "train_smd.py"
ARMS = ("dense", "naive", "sparse_rl", "smd")


@dataclass(frozen=True)
class Size:
    """How large a run is; all else is as in ``train_smd.py``.

    Attributes:
        updates: Optimizer steps.
        prompts: Per update, of 8 samples each.
        eval_prompts: Held-out prompts, the same ones for all runs.
    """

    updates: int = 40
    prompts: int = 2
    eval_prompts: int = 32


def do_runs(out: Path, size: Size, seeds: Iterable[int], workers: int) -> list[dict[str, Any]]:
    """Do the runs that ``out / "results.jsonl"`` does not have; one that was stopped goes on from its last checkpoint.

    Args:
        out: Folder of the results and the runs.
        size: Of every run.
        seeds: Of each arm.
        workers: Processes of one thread each.

    Returns:
        The records of the results file.

    Raises:
        subprocess.CalledProcessError: if a run fails; its output is in ``log.txt`` in its folder.
        RuntimeError: if a run was interrupted; what it has done is kept.
    """
    path = out / "results.jsonl"
    done = {record["key"] for record in results.load(path)}
    missing = [(arm, seed) for seed in seeds for arm in ARMS if _key(arm, seed) not in done]

    def folder(arm: str, seed: int) -> Path:
        return out / f"{arm}_{seed}"

    with ThreadPoolExecutor(workers) as pool:
        runs = {pool.submit(_do, folder(arm, seed), size, arm, seed): folder(arm, seed) for arm, seed in missing}
        for finished in track(as_completed(runs), "runs", total=len(runs)):
            results.append(path, finished.result())
            # Gigabytes that only an unfinished run needs.
            shutil.rmtree(runs[finished] / "checkpoints")
    return results.load(path)


def _key(arm: str, seed: int) -> str:
    return f"register {arm} seed={seed}"


def _do(folder: Path, size: Size, arm: str, seed: int) -> dict[str, Any]:
    """Run the script in a process of its own; return the run's record."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "arm": arm,
        "seed": seed,
        "updates": size.updates,
        "prompts": size.prompts,
        "eval-prompts": size.eval_prompts,
        "eval-every": size.updates,
        "max-new-tokens": 14,
        "out": folder,
    }
    command = [sys.executable, str(SCRIPT), "--no-checkpoint-activations"]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    if any((folder / "checkpoints").glob("step-*.json")):
        command.append("--resume")
    # One that was stopped after its last update only lacks its record.
    if len(_metrics(folder)) <= size.updates:
        with (folder / "log.txt").open("ab") as log:
            subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log, check=True)
    rows = _metrics(folder)
    if len(rows) <= size.updates:
        raise RuntimeError(f"{folder} was stopped after {len(rows) - 1} updates of {size.updates}; run this again.")
    return record(arm, seed, size, rows)


def _metrics(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's table so far, the one from before training first."""
    path = folder / "metrics.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def record(arm: str, seed: int, size: Size, rows: list[dict[str, float]]) -> dict[str, Any]:
    """Shorten the rows of a run's ``metrics.csv``, of which the first is from before training.

    Returns:
        Greedy accuracy ``before`` and ``after``, with every key and evicting; curve, extremes and costs of
        `study.run.summary`.
    """
    updates = [row | {"wall_seconds": row["seconds"]} for row in rows[1:]]
    before, after = ({name: row[f"eval_{name}"] for name in ("dense", "sparse")} for row in (rows[0], rows[-1]))
    setting = {"arm": arm, "seed": seed, **vars(size)}
    return {"key": _key(arm, seed), "setting": setting, "before": before, "after": after, **summary(updates, 10)}


def language_table(records: Iterable[dict[str, Any]]) -> str:
    """One row per arm: mean over seeds, each seed's own value in brackets where it counts."""
    records = sorted(records, key=lambda one: one["key"])
    columns: list[tuple[str, Callable[[dict[str, Any]], float], Callable]] = [
        ("every key", lambda one: one["after"]["dense"], _each),
        ("evicting", lambda one: one["after"]["sparse"], _each),
        ("sampled reward, last 10", lambda one: one["curve"]["reward"][-1], _each),
        ("KL k3, last 10, nats", lambda one: one["curve"]["kl_approx_k3"][-1], figure_cell),
        ("largest gap of any token, nats", lambda one: one["worst"]["max_mismatch"], worst_cell),
        ("gradient norm, last 10", lambda one: one["curve"]["grad_norm"][-1], figure_cell),
        ("seconds per update", lambda one: one["cost"]["seconds"], figure_cell),
        ("KV, MB per update", lambda one: one["cost"]["kv_bytes"] / 1e6, figure_cell),
    ]
    rows = [["before", *(_each({0: records[0]["before"][name]}) for name in ("dense", "sparse"))]] if records else []
    rows = [row + [""] * (len(columns) + 1 - len(row)) for row in rows]
    for arm in ARMS:
        own = {one["setting"]["seed"]: one for one in records if one["setting"]["arm"] == arm}
        if own:
            cells = [show({seed: read(one) for seed, one in own.items()}) for _, read, show in columns]
            rows.append([arm, *cells])
    return list_table("SmolLM2-135M, register task", ["arm", *(name for name, _, _ in columns)], rows)


def _each(values: dict[int, float]) -> str:
    """Mean, and the values that it is of."""
    mean = f"{sum(values.values()) / len(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ({', '.join(f'{value:.2f}' for value in values.values())})"
