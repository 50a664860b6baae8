"""The figures of the report, made from the results file alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from .arms import ARMS, START
from .claims import EVALUATIONS
from .grid import MAIN, RANDOM, RATE, RATES, SEVENTY, TWENTY
from .setting import Scale, Setting
from .statistics import bootstrap
from .table import Table, first_five

WORDS = {
    "arms": "Share of problems solved by each arm, with every key and evicting, with intervals",
    "curves": "Reward, gradient norm and mismatch of each arm over the updates",
    "compression": "Share of problems solved over the share of evicted keys",
}
"""Name of each figure, and what it shows."""

MARKS = {"dense": ("o", ":"), "sparse": ("s", "--")}
"""Of an evaluation: marker of what came out, line of what was there before."""

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
    places = [Setting("", task, one, rate) for task, rate in RATES.items() for one in (MAIN, SEVENTY, RANDOM)]
    places = [at for at in places if table.runs(at.but(arm="smd"))]
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), constrained_layout=True, sharey=True)
    for axis in axes.flat[len(places) :]:
        axis.set_axis_off()
    for axis, at in zip(axes.flat, places, strict=False):
        for offset, (evaluation, (marker, line)) in zip((0.15, -0.15), MARKS.items(), strict=True):
            for row, arm in enumerate(reversed(ARMS)):
                values = table.values(at.but(arm=arm), evaluation)
                if values:
                    _interval(axis, values, row + offset, COLORS[arm], marker)
            before = table.values(at.but(arm=START, rate=0.0), evaluation).values()
            if before:
                axis.axvline(sum(before) / len(before), color="gray", linestyle=line)
        axis.set(title=f"{at.task}, {at.eviction.label}", xlabel="share solved")
        axis.set_yticks(range(len(ARMS)), list(reversed(ARMS)))
        axis.grid(alpha=0.3)
    named = [Line2D([], [], color="gray", marker=MARKS[name][0], linestyle="") for name in EVALUATIONS]
    named += [Line2D([], [], color="gray", ls=MARKS[name][1]) for name in EVALUATIONS]
    words = [f"{words}{when}" for when in (", after", ", before training") for words in EVALUATIONS.values()]
    figure.legend(named, words, loc="outside lower center", ncols=4)
    return figure


def _interval(axis: Any, values: dict[int, float], row: float, color: str, marker: str) -> None:
    """A mean, and its 95 % interval."""
    estimate = bootstrap(list(values.values()))
    axis.plot([estimate.low, estimate.high], [row, row], color=color)
    axis.plot(estimate.mean, row, marker, color=color, markersize=5)


def _curves(table: Table, at: Setting) -> Any:
    """Reward, gradient norm and mismatch over the updates: means over seeds, of gaps the largest."""
    replays = [name for name, arm in ARMS.items() if arm.agrees]
    others = [name for name in ARMS if name not in replays]
    panels: list[tuple[str, str, Iterable[str], Callable[[Iterable[float]], float]]] = [
        ("reward", "reward of the samples", ARMS, fmean),
        ("grad_norm", "gradient norm, before clipping", ARMS, fmean),
        ("kl_approx_k3", "KL k3 of sampler and learner, nats: the others", others, fmean),
        ("max_mismatch", "largest gap of any token, nats: arms that agree", replays, max),
    ]
    figure, axes = plt.subplots(2, 2, figsize=(12, 7), constrained_layout=True)
    for axis, (name, title, arms, combine) in zip(axes.flat, panels, strict=True):
        for arm in arms:
            curves = [run["curve"][name] for run in table.runs(at.but(arm=arm)).values() if name in run["curve"]]
            if curves:
                points = [combine(values) for values in zip(*curves, strict=True)]
                updates = [Scale().probe_every * (point + 1) for point in range(len(points))]
                axis.plot(updates, points, color=COLORS[arm], label=arm)
        axis.set(title=title, xlabel="updates, in stretches of ten")
        axis.grid(alpha=0.3)
    axes.flat[3].set_yscale("log")
    axes.flat[3].axhline(1e-4, color="gray", linestyle=":")
    axes.flat[3].text(10, 0.9e-4, "what the library promises: 1e-4", va="top", color="gray")
    if axes.flat[0].lines:
        figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right center", fontsize=9)
    return figure


def _compression(table: Table) -> Any:
    """Solved problems over the share of evicted keys: means of the same five seeds everywhere."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    for axis, (evaluation, words) in zip(axes, EVALUATIONS.items(), strict=True):
        for arm in ARMS:
            points = []
            for eviction in (TWENTY, MAIN, SEVENTY):
                values = first_five(table.values(Setting(arm, "chase", eviction, RATE), evaluation))
                if values:
                    points.append((100 * (1 - eviction.keep), fmean(values.values())))
            if len(points) > 1:
                axis.plot(*zip(*points, strict=True), "o-", color=COLORS[arm], label=arm)
        title = f"evaluated with {words}" if evaluation == "dense" else "evaluated while evicting"
        axis.set(title=f"chase, SnapKV, {title}", xlabel="keys evicted, %", ylabel="share solved")
        axis.grid(alpha=0.3)
    if axes[0].lines:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=9)
    return figure
