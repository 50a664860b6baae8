"""The metrics of a run, as a table on disk and as a picture: python examples/plots.py runs/train_smd/metrics.csv"""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import tyro


def write_table(path: Path, history: list[dict[str, float]]) -> None:
    """Write one line per update; a column for every figure that some update has. Replaces the file at once."""
    columns = list(dict.fromkeys(name for figures in history for name in figures))
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(history)
    os.replace(part, path)


def read_table(path: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Read updates and values of every figure, where it has one."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figures: dict[str, tuple[list[float], list[float]]] = {}
    for name in rows[0] if rows else ():
        known = [row for row in rows if row[name] != ""]
        figures[name] = [float(row["update"]) for row in known], [float(row[name]) for row in known]
    return figures


def plot_run(table: Path, picture: Path, title: str = "", window: int = 8) -> None:
    """Draw reward, mismatch and KL over the updates.

    Args:
        table: Written by `write_table`.
        picture: PNG to write.
        title: Above the picture.
        window: Updates in the moving average of the reward.
    """
    figures = read_table(table)
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    figure.suptitle(title)
    updates, reward = figures["reward"]
    axes[0].plot(updates, reward, color="tab:blue", alpha=0.3, label="sampled, per update")
    means = [sum(reward[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(reward))]
    axes[0].plot(updates, means, color="tab:blue", label=f"sampled, mean of {window}")
    for name, color in (("eval_dense", "tab:green"), ("eval_sparse", "tab:orange")):
        label = f"greedy, held out, {name.removeprefix('eval_')}"
        axes[0].plot(*figures[name], "o--", color=color, label=label, markersize=4)
    _finish(axes[0], "reward", "reward")
    axes[1].semilogy(*figures["max_mismatch"], color="tab:red", label="largest |log learner - log sampler|")
    axes[1].axhline(1e-4, color="gray", linestyle=":", label="promised: 1e-4")
    _finish(axes[1], "mismatch", "nats")
    for name, label in (("kl_dense_to_sparse", "KL(dense || masked)"), ("entropy", "entropy")):
        if name in figures:
            axes[2].plot(*figures[name], label=label)
    _finish(axes[2], "KL and entropy per token", "nats")
    axes[2].set_yscale("log")
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def _finish(axis: Any, title: str, unit: str) -> None:
    axis.set(title=title, xlabel="update", ylabel=unit)
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)


def main(table: Path, picture: Path | None = None, title: str = "") -> None:
    """Plot ``table`` into ``picture``, beside it by default."""
    plot_run(table, picture or table.with_name("run.png"), title)


if __name__ == "__main__":
    tyro.cli(main)
