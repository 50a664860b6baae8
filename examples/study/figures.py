"""The figures of the report, made from the results file alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .arms import ARMS
from .claims import EVALUATIONS
from .grid import MAIN, RANDOM, RATE, RATES, SEVENTY, TWENTY
from .setting import Scale, Setting
from .statistics import bootstrap
from .table import Table

WORDS = {
    "arms": "Share of problems solved by each arm, with every key and evicting, with intervals",
    "curves": "Reward, mismatch and gradient norm of each arm over the updates",
    "compression": "Share of problems solved over the share of evicted keys",
}
"""Name of each figure, and what it shows."""

COLORS = {name: f"C{index}" for index, name in enumerate(ARMS)}


def draw(table: Table, folder: Path) -> list[Path]:
    """Draw all figures that there are results for.

    Args:
        table: Of the results.
        folder: Where ``study_*.png`` are written.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = {
        "arms": _arms(table),
        "curves": _curves(table, Setting("", "chase", MAIN, RATE)),
        "compression": _compression(table),
    }
    paths = []
    for name, figure in made.items():
        paths.append(folder / f"study_{name}.png")
        # No date and version in the file, so that the same results make the same bytes.
        figure.savefig(paths[-1], dpi=110, metadata={"Software": None})
        plt.close(figure)
    return paths


def _arms(table: Table) -> Any:
    """Solved problems by arm, with every key and evicting, in the settings of the claims."""
    places = [Setting("", task, one, rate) for task, rate in RATES.items() for one in (MAIN, RANDOM, SEVENTY)]
    figure, grid = plt.subplots(2, 3, figsize=(13, 7), constrained_layout=True, sharey=True)
    for axis, at in zip(grid.flat, places, strict=True):
        if not table.runs(at.but(arm="smd")):
            axis.set_axis_off()
            continue
        for offset, evaluation, marker in ((0.12, "dense", "o"), (-0.12, "sparse", "s")):
            for row, arm in enumerate(reversed(ARMS)):
                values = table.values(at.but(arm=arm), evaluation)
                if values:
                    _interval(axis, values, row + offset, COLORS[arm], marker)
        for evaluation in EVALUATIONS:
            before = table.values(at.but(arm="start", rate=0.0), evaluation).values()
            if before:
                axis.axvline(sum(before) / len(before), color="gray", linestyle=":")
        axis.set(title=f"{at.task}, {at.eviction.label}", xlabel="share solved")
        axis.set_yticks(range(len(ARMS)), list(reversed(ARMS)))
        axis.grid(alpha=0.3)
    figure.suptitle(
        "Circles: greedy decoding with every key; squares: with evicted ones. Bars: 95 % intervals; dotted: before"
    )
    return figure


def _interval(axis: Any, values: dict[int, float], row: float, color: str, marker: str) -> None:
    estimate = bootstrap(list(values.values()))
    axis.plot([estimate.low, estimate.high], [row, row], color=color)
    axis.plot(estimate.mean, row, marker, color=color, markersize=5)


def _curves(table: Table, at: Setting) -> Any:
    """Reward, mismatch and gradient norm over the updates, means over seeds."""
    panels = {"reward": "reward", "kl_approx_k3": "KL k3 of sampler and learner, nats", "grad_norm": "gradient norm"}
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for arm in ARMS:
            curves = [run["curve"][name] for run in table.runs(at.but(arm=arm)).values() if name in run["curve"]]
            if curves:
                updates = [Scale().probe_every * (point + 1) for point in range(len(curves[0]))]
                axis.plot(updates, _mean(curves), color=COLORS[arm], label=arm)
        axis.set(title=title, xlabel="updates, means over ten")
        axis.grid(alpha=0.3)
        if name == "kl_approx_k3":
            axis.set_yscale("log")
    if axes[0].lines:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=9)
    return figure


def _mean(curves: Sequence[Sequence[float]]) -> list[float]:
    return [sum(points) / len(points) for points in zip(*curves, strict=True)]


def _compression(table: Table) -> Any:
    """Solved problems over the share of evicted keys."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True, sharey=True)
    for axis, (evaluation, words) in zip(axes, EVALUATIONS.items(), strict=True):
        for arm in ARMS:
            points = []
            for eviction in (TWENTY, MAIN, SEVENTY):
                values = table.values(Setting(arm, "chase", eviction, RATE), evaluation)
                if values:
                    points.append((100 * (1 - eviction.keep), sum(values.values()) / len(values)))
            if len(points) > 1:
                axis.plot(*zip(*points, strict=True), "o-", color=COLORS[arm], label=arm)
        axis.set(title=f"chase, evaluated with {words}", xlabel="keys evicted, %", ylabel="share solved")
        axis.grid(alpha=0.3)
    if axes[0].lines:
        axes[0].legend(fontsize=8)
    return figure
