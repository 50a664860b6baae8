"""KeyDiff: keys unlike the others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from ._chunks import empty_scores, head_chunks
from .registry import register_policy
from .view import CacheView


@register_policy("keydiff")
@dataclass(frozen=True)
class KeyDiffPolicy:
    """Keeps the keys least similar to the mean direction of all (KeyDiff, arXiv 2504.15364, equation 3).

    With the mean over the present keys of a row and head, in float32::

        anchor   = mean over k of keys[k] / ||keys[k]||
        score[k] = -cos(keys[k], anchor)

    Nothing is protected: `Protected` adds sinks or recent tokens.

    Example:
        >>> import torch
        >>> keys = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]).view(1, 1, 3, 2)
        >>> KeyDiffPolicy().score(CacheView.of_prompt(keys, budget=2))
        tensor([[[-0.8944, -0.8944, -0.4472]]])
    """

    def score(self, view: CacheView) -> Tensor:
        """Scores ``[B, H, K]``: minus the cosine to the mean direction; see the class."""
        scores = empty_scores(view)
        slots, size = view.keys.shape[2:]
        for row, part in head_chunks(view, scratch=3 * 4 * slots * size):
            present = view.present[row, part]
            keys = view.keys[row, part].float().masked_fill(~present[..., None], 0.0)  # an empty slot may hold NaN
            keys = F.normalize(keys, dim=-1)
            # The direction of the sum is that of the mean.
            anchor = F.normalize(keys.sum(-2), dim=-1)
            scores[row, part] = -(keys @ anchor[..., None]).squeeze(-1)
        return view.protect(scores, view.newest(0))
