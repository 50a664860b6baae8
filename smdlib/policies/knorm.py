"""Keys of small norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .registry import register_policy
from .view import CacheView


@register_policy("knorm")
@dataclass(frozen=True)
class KnormPolicy:
    """Keeps the keys of smallest norm, which tend to be attended to most (arXiv 2406.11430, section 3).

    ``score[b, h, k] = -||keys[b, h, k]||_2``, in float32. Nothing is protected: `Protected` adds sinks or recent
    tokens.

    Example:
        >>> view = CacheView.of_prompt(torch.tensor([[3.0, 4.0], [1.0, 0.0]]).view(1, 1, 2, 2), budget=1)
        >>> KnormPolicy().score(view)
        tensor([[[-5., -1.]]])
    """

    def score(self, view: CacheView) -> Tensor:
        """Scores ``[B, H, K]``: minus the norm of the key; see the class."""
        norms = torch.linalg.vector_norm(view.keys, dim=-1, dtype=torch.float32)
        return torch.where(view.present, -norms, float("-inf"))
