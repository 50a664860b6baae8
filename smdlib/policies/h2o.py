"""H2O: heavy hitters by accumulated attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ._options import check_int
from .registry import register_policy
from .view import CacheView


@register_policy("h2o")
@dataclass(frozen=True)
class H2OPolicy:
    """Keeps the keys that received the most attention, and the last ones (H2O, arXiv 2306.14048, algorithm 1).

    ``score[b, h, k] = sum over queries q so far, and query heads g of the group, of softmax_k(q_g . k * scaling)``, the
    attention that the model itself computed, ``view.attention``. It moves with the key's slot. The last ``recent``
    tokens are protected.

    Attributes:
        recent: number of last tokens that are protected. None is half of the budget of each row and head, rounded
            down, as in the paper (the other half goes to the heavy hitters).

    Raises:
        TypeError: ``recent`` is neither None nor an int.
        ValueError: ``recent`` is negative.

    Example:
        >>> import torch
        >>> attention = torch.tensor([[[2.0, 0.5, 1.0, 0.5]]])
        >>> view = CacheView.of_prompt(torch.zeros(1, 1, 4, 2), budget=2, attention=attention)
        >>> H2OPolicy().score(view)
        tensor([[[2.0000, 0.5000, 1.0000, inf]]])
    """

    recent: int | None = None

    tracks_attention: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuses a negative number of recent tokens."""
        if self.recent is not None:
            check_int(self, "recent", at_least=0)

    def score(self, view: CacheView) -> Tensor:
        """Scores ``[B, H, K]``: attention received, the last tokens protected; see the class.

        Raises:
            ValueError: the view has no attention mass.
        """
        if view.attention is None:
            raise ValueError(
                f"H2OPolicy needs view.attention at layer {view.layer_idx}, got None: "
                "what calls it must honour tracks_attention"
            )
        recent = view.budget // 2 if self.recent is None else self.recent
        return view.protect(view.attention.float(), view.newest(recent))
