"""A picture of a record: what every head kept over the sequence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from smdlib.masks.shadow import ShadowMask

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_retained_keys(
    mask: ShadowMask,
    row: int = 0,
    path: str | Path | None = None,
    *,
    length: int | None = None,
    prompt_length: int | None = None,
    title: str | None = None,
) -> Figure:
    """Draw one line per layer and KV head over the keys of a row: how long each key stayed.

    Args:
        mask: Record ``[B, T, L, H]`` or ``[T, L, H]``.
        row: Row of the batch.
        path: Where to save the picture; not saved by default.
        length: Unpadded length of the row; ``T`` by default.
        prompt_length: Draws the border between prompt and response.
        title: Title of the picture.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: if matplotlib is missing.

    Example:
        >>> figure = plot_retained_keys(ShadowMask.dense(1, 8, 2, 2))
        >>> figure.axes[0].get_xlabel()
        'position of the key (tokens)'
    """
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.figure import Figure

    evicted_at = mask.evicted_at if mask.evicted_at.ndim == 3 else mask.evicted_at[row]
    total = length or evicted_at.shape[0]
    lifetimes = evicted_at[:total].cpu().numpy().astype(np.int64)
    lines = lifetimes.transpose(1, 2, 0).reshape(-1, total)  # [L * H, T]
    border = total if prompt_length is None else prompt_length
    # 0: gone with the prompt, 1: gone while decoding, 2: kept to the end.
    state = np.where(lines >= total, 2, np.where(lines > border, 1, 0))

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    colours = ListedColormap(["#e8e6e1", "#e0a458", "#264653"])
    image = axes.imshow(state, aspect="auto", interpolation="nearest", cmap=colours, norm=BoundaryNorm([0, 1, 2, 3], 3))
    if prompt_length is not None:
        axes.axvline(prompt_length - 0.5, color="#c1121f", linewidth=1)
        axes.annotate("response", (prompt_length, -0.5), color="#c1121f", xytext=(2, 3), textcoords="offset points")
    heads = evicted_at.shape[2]
    axes.set_yticks(np.arange(0, lines.shape[0], heads) + (heads - 1) / 2, [str(i) for i in range(evicted_at.shape[1])])
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("position of the key (tokens)")
    axes.set_ylabel(f"layer (one line per KV head, {heads} each)")
    axes.set_title(title or "What each head kept")
    bar = figure.colorbar(image, ax=axes, ticks=[0.5, 1.5, 2.5], fraction=0.03)
    bar.ax.set_yticklabels(["evicted\nfrom prompt", "evicted while\ndecoding", "kept"])
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure
