"""R-KV: attended to, and not redundant."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._chunks import empty_scores, head_chunks
from ._options import check_int, check_odd, check_share
from .registry import register_policy
from .view import CacheView
from .window import last_queries, pool_by_position

_BLOCK = 4 * 2**20  # bytes of similarities at once, or a quarter of the layer if that is less


@register_policy("rkv")
@dataclass(frozen=True)
class RKVPolicy:
    """Keeps the last ``window`` tokens, and keys that are attended to and unlike others (R-KV, arXiv 2505.24133).

    ``score[k] = mix_lambda * A[k] - (1 - mix_lambda) * S[k]`` (equation 6), ``+inf`` in the window, all in float32:

    - Importance ``A``: logits of the window's queries, the largest over the query group, softmax over the keys outside
      the window, mean over the queries, maximum over the ``kernel_size`` neighbours in position.
    - Redundancy ``S``: ``C[i, k] = cos(keys[i], keys[k])`` over the present keys, zero for ``i = k``. In each row i the
      last key with ``C[i, k] > threshold`` is spared, ``C[i, k] = 0`` (the oldest key where there is none): the newest
      of similar keys is no redundancy. ``S = softmax over k of the mean over i of C[i, k]``, window included.

    The authors evict every 128 tokens: ``CompressedCache(..., evict_every=128)``. Time grows with the square of the
    keys; memory does not, ``C`` is never there as a whole.

    Attributes:
        window: number of last queries that vote, and whose keys are protected.
        kernel_size: number of neighbouring keys over which A is the maximum, odd.
        mix_lambda: share of A in the score, from 0 to 1.
        threshold: cosine above which keys are similar, from 0 to 1.

    Raises:
        TypeError: an option is of the wrong type.
        ValueError: an option is out of range, or ``kernel_size`` even.

    Example:
        >>> keys = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).view(1, 1, 4, 2)
        >>> view = CacheView.of_prompt(keys, budget=2, queries=torch.zeros(1, 1, 1, 2))
        >>> RKVPolicy(window=1, kernel_size=1, mix_lambda=0.5).score(view)  # the oldest of equal keys goes first
        tensor([[[-0.0005,  0.0365,  0.0653,     inf]]])
    """

    window: int = 8
    kernel_size: int = 7
    mix_lambda: float = 0.07
    threshold: float = 0.5

    def __post_init__(self) -> None:
        """Refuses a window without queries, a kernel without a middle, and shares beyond 1."""
        check_int(self, "window", at_least=1)
        check_odd(self, "kernel_size")
        check_share(self, "mix_lambda")
        check_share(self, "threshold")

    @property
    def query_window(self) -> int:
        """Number of last queries that the score needs."""
        return self.window

    def score(self, view: CacheView) -> Tensor:
        """Scores ``[B, H, K]``: importance less redundancy, the window protected; see the class.

        Raises:
            ValueError: the view has no queries, or fewer than the window although the rows are longer.
        """
        queries = last_queries(self, view, self.window)
        window = view.newest(self.window)
        outside = view.present & ~window
        importance, redundancy = empty_scores(view), empty_scores(view)
        block = min(_BLOCK, (view.keys.nbytes + view.values.nbytes) // 4)
        slots, size = view.keys.shape[2:]
        group, width = queries.shape[2:4]
        for row, part in head_chunks(view, scratch=4 * slots * (3 * size + (group + 1) * width)):
            present = view.present[row, part]
            keys = view.keys[row, part].float().masked_fill(~present[..., None], 0.0)  # an empty slot may hold NaN
            logits = queries[row, part].flatten(1, 2).float() @ keys.mT * view.scaling
            logits = logits.unflatten(1, (group, width)).amax(1).masked_fill_(~outside[row, part, None], -torch.inf)
            importance[row, part] = logits.softmax(-1).mean(-2)
            redundancy[row, part] = _redundancy(keys, view.positions[row, part], self.threshold, block)
        pooled = pool_by_position(importance, view.positions, outside, self.kernel_size, "max")
        return view.protect(self.mix_lambda * pooled - (1 - self.mix_lambda) * redundancy, window)


def _redundancy(keys: Tensor, positions: Tensor, threshold: float, scratch: int) -> Tensor:
    """S of the class, ``[h, K]``, for keys ``[h, K, D]`` (zero in empty slots, used up) at ``positions [h, K]``."""
    heads, slots = positions.shape
    present = positions >= 0
    keys.div_(keys.norm(dim=-1, keepdim=True).clamp_(min=1e-12))
    oldest = positions == positions.masked_fill(~present, torch.iinfo(torch.int64).max).amin(-1, keepdim=True)
    total = torch.zeros_like(positions, dtype=torch.float32)
    block = max(1, scratch // (24 * heads * slots))
    for first in range(0, slots, block):
        similar_to = keys[:, first : first + block] @ keys.mT  # [h, block, K]
        similar_to.diagonal(first, -2, -1).zero_()
        spared = (similar_to > threshold) | oldest[:, None]
        last = torch.where(spared, positions[:, None], -1).argmax(-1, keepdim=True)
        total += similar_to.scatter_(-1, last, 0.0).sum(-2)
    mean = total / present.sum(-1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~present, -torch.inf).softmax(-1)
