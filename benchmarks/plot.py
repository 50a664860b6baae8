"""Growth curves as small multiples: python -m benchmarks.plot docs/runs/bench.json docs/_static/bench_growth.png"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from benchmarks._measure import Result
from benchmarks._report import describe, load, results_of

# Curve and what of it is drawn.
PANELS = (
    ("decode-keys", "seconds"),
    ("decode-budget", "seconds"),
    ("decode-budget", "bytes"),
    ("prefill-prompt", "seconds"),
    ("learner-prompt", "seconds"),
    ("learner-prompt", "bytes"),
    ("learner-group", "seconds"),
    ("learner-response", "seconds"),
    ("learner-budget", "seconds"),
)
# Unit from what value on, the largest first.
UNITS = {
    "seconds": ((1.0, "time (s)"), (1e-3, "time (ms)")),
    "bytes": ((1e9, "memory (GB)"), (1e6, "memory (MB)"), (1e3, "memory (kB)")),
}
# What is held depends on the curve.
MEMORY = {"decode-budget": "keys and values held", "learner-prompt": "peak of a learner step"}
COLORS = ("#2266bb", "#dd7711")


def plot(parts: dict[str, Any], picture: Path) -> None:
    """Draw the curves of a file, as many as it has."""
    panels = [(name, field) for name, field in PANELS if f"growth/{name}" in parts]
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.6 * columns, 3.5 * lines), squeeze=False, layout="constrained"
    )
    for axis, (name, field) in zip(axes.flat, panels, strict=False):
        draw(axis, results_of(parts[f"growth/{name}"]), field, MEMORY.get(name, ""))
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    figure.suptitle(describe(parts[f"growth/{panels[0][0]}"]), fontsize=8, color="gray")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def draw(axis: Any, results: list[Result], field: str, memory: str) -> None:
    """Draw one panel: the peer in grey, ours in colour, each named at its end."""
    peer, colors = results[0].of, iter(COLORS)
    title, _, label = results[0].claim.partition(", against ")
    most = max(getattr(result, field) for result in results)
    size, unit = next((unit for unit in UNITS[field] if most >= unit[0]), UNITS[field][-1])
    ends = []
    for case in dict.fromkeys(result.case for result in results):
        points = [(result.at, getattr(result, field) / size) for result in results if result.case == case]
        across, up = zip(*points, strict=True)
        color = "#777777" if case == peer else next(colors)
        axis.plot(across, up, "o-", color=color, markersize=3.5, linewidth=1.6)
        ends.append((up[-1], case, color))
    percent = "%" in label
    axis.set(xscale="linear" if percent else "log", yscale="linear" if percent else "log")
    axis.set(title=memory if field == "bytes" else title, xlabel=label, ylabel=unit)
    axis.title.set_fontsize(9)
    if percent:
        axis.set_ylim(bottom=0)
    else:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_locator(NullLocator())
    places = sorted({result.at for result in results if result.at is not None})
    axis.xaxis.set_major_locator(FixedLocator(places))
    axis.xaxis.set_minor_locator(NullLocator())
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    name_ends(axis, places[-1], ends)


def name_ends(axis: Any, right: float, ends: list[tuple[float, str, str]]) -> None:
    """Write each line's name beside its last point, kept apart where lines end close together."""
    to_pixels = axis.transData.transform
    below = None
    for height, case, color in sorted(ends):
        pixel = to_pixels((right, height))[1]
        lifted = pixel if below is None else max(pixel, below + 13)
        below = lifted
        axis.annotate(
            case.split(",")[0],
            (right, height),
            xytext=(6, (lifted - pixel) * 72 / axis.figure.dpi),
            textcoords="offset points",
            color=color,
            fontsize=8.5,
            va="center",
            annotation_clip=False,
        )


if __name__ == "__main__":
    plot(load(Path(sys.argv[1])), Path(sys.argv[2]))
