"""SnapKV: what the last queries look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ._options import check_int, check_odd
from .registry import register_policy
from .view import CacheView
from .window import pool_by_position, window_mass


@register_policy("snapkv")
@dataclass(frozen=True)
class SnapKVPolicy:
    """Keeps the last ``window`` tokens and the neighbourhoods they attend to (SnapKV, arXiv 2404.14469, listing 1).

    With ``A[g, i, k]`` the causal softmax over the present keys of query i of the window in query head g (float32)::

        mass[k]  = mean over the group's heads g of sum over the window's queries i of A[g, i, k]
        score[k] = max or mean of mass over the kernel_size keys around k        (keys outside the window)
        score[k] = +inf                                                         (keys of the window)

    Neighbours are neighbours in position among the keys that are still there and outside the window; beyond the first
    and the last of them there is nothing (``avg`` divides by ``kernel_size`` all the same, as the authors' code does).
    Padding and empty slots are outside, too: a row scores as it would alone. A row no longer than the window is all
    window.

    Attributes:
        window: number of last queries that vote, and whose keys are protected. Budgets no larger than it keep the most
            recent keys, whatever the queries look at.
        kernel_size: number of neighbouring keys that are pooled, odd; 1 pools nothing.
        pooling: "max" or "avg".

    Raises:
        TypeError: ``window`` or ``kernel_size`` is not an int.
        ValueError: ``window`` below 1, ``kernel_size`` even or below 1, or an unknown ``pooling``.

    Example:
        >>> import torch
        >>> keys = torch.tensor([0.0, 2.0, 0.0, 0.0, 0.0]).view(1, 1, 5, 1)
        >>> view = CacheView.of_prompt(keys, budget=2, queries=torch.ones(1, 1, 1, 1))
        >>> SnapKVPolicy(window=1, kernel_size=1).score(view)
        tensor([[[0.0878, 0.6488, 0.0878, 0.0878, inf]]])
        >>> SnapKVPolicy(window=1, kernel_size=3).score(view)
        tensor([[[0.6488, 0.6488, 0.6488, 0.0878, inf]]])
    """

    window: int = 32
    kernel_size: int = 7
    pooling: Literal["max", "avg"] = "max"

    def __post_init__(self) -> None:
        """Refuses a window without queries, and a kernel without a middle."""
        check_int(self, "window", at_least=1)
        check_odd(self, "kernel_size")
        if self.pooling not in ("max", "avg"):
            raise ValueError(f"SnapKVPolicy.pooling is {self.pooling!r}, expected 'max' or 'avg'")

    @property
    def query_window(self) -> int:
        """Number of last queries that the score needs."""
        return self.window

    def score(self, view: CacheView) -> Tensor:
        """Scores ``[B, H, K]``: pooled attention of the window, the window protected; see the class.

        Raises:
            ValueError: the view has no queries, or fewer than the window although the rows are longer.
        """
        window = view.newest(self.window)
        others = view.present & ~window
        mass = window_mass(self, view, self.window)
        scores = pool_by_position(mass, view.positions, others, self.kernel_size, self.pooling)
        return view.protect(scores, window)
