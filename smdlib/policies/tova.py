"""TOVA: what the newest query looks at, one choice for all heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .registry import register_policy
from .view import CacheView
from .window import window_mass


@register_policy("tova")
@dataclass(frozen=True)
class TOVAPolicy:
    """Keeps the keys that the newest query attends to, averaged over all heads (TOVA, arXiv 2401.06104, section 3.2).

    With ``A[g, k]`` the softmax of the newest query over the present keys in query head g (float32)::

        score[k] = mean over all Hq query heads g of A[g, k]     (one score for every KV head)
        score[k] = +inf                                         (the newest key)

    Heads agree by position, wherever their slots are. A key that some head has lost (its budget was smaller) has no
    weight there. The newest key is protected as kvpress does; the authors leave it to its weight.

    Example:
        >>> keys = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]).view(1, 2, 3, 1)  # two KV heads, three keys
        >>> view = CacheView.of_prompt(keys, budget=2, queries=torch.ones(1, 2, 1, 1))
        >>> TOVAPolicy().score(view)
        tensor([[[0.2199, 0.5602,    inf],
                 [0.2199, 0.5602,    inf]]])
    """

    query_window: ClassVar[int] = 1

    def score(self, view: CacheView) -> Tensor:
        """Scores ``[B, H, K]``: mean attention of the newest query, the newest key protected; see the class.

        Raises:
            ValueError: the view has no queries.
        """
        mass = window_mass(self, view, 1)
        scores = torch.empty_like(mass)
        for row, seen in enumerate(view.seen.tolist()):
            # The last entry takes the empty slots. A table, for a sum by index has no order on an accelerator.
            index = torch.where(view.present[row], view.positions[row], seen)
            table = mass.new_zeros(view.num_kv_heads, seen + 1).scatter_(-1, index, mass[row])
            scores[row] = table.mean(0).expand_as(table).gather(-1, index)
        return view.protect(scores, view.newest(1))
