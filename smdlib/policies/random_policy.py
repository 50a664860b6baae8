"""Random keys, the baseline that knows nothing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ._options import check_int
from .registry import register_policy
from .view import CacheView


@register_policy("random")
@dataclass(frozen=True)
class RandomPolicy:
    """Keeps the last ``recent`` tokens and, of the others, a uniform choice that differs from head to head.

    ``score[b, h, k] = u_b[h, positions[b, h, k]]`` with ``u_b ~ U[0, 1)`` of shape ``[H, seen[b]]``. The numbers belong
    to positions, and each row has its own generator, so a row's choice depends neither on its padding, nor on the order
    of its slots, nor on its batch-mates. This is the "random" arm of Shadow Mask Distillation (arXiv 2605.06850).

    Attributes:
        recent: number of last tokens that are protected.
        seed: used where the cache gives no generators. Each row then draws from a generator seeded by
            ``(seed, layer_idx, seen)``: the same call gives the same scores, another layer or length gives others.

    Raises:
        TypeError: an option is not an int.
        ValueError: ``recent`` is negative.

    Example:
        >>> view = CacheView.of_prompt(torch.zeros(1, 1, 4, 2), budget=2)
        >>> scores = RandomPolicy(recent=2).score(view)
        >>> scores.isinf().tolist()
        [[[False, False, True, True]]]
        >>> torch.equal(scores, RandomPolicy(recent=2).score(view))
        True
    """

    recent: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses options that are not numbers of tokens, or no seed."""
        check_int(self, "recent", at_least=0)
        check_int(self, "seed")

    def score(self, view: CacheView) -> Tensor:
        """Scores ``[B, H, K]``: uniform in [0, 1), the last tokens protected; see the class."""
        # A row draws when it has to evict itself: its later choices must not depend on its batch-mates.
        evicts = (view.present.sum(-1) > view.budget).any(-1).tolist()
        rows = enumerate(zip(view.seen.tolist(), evicts, strict=True))
        idle = torch.zeros(view.positions.shape[1:], device=view.positions.device)
        scores = torch.stack([self._row(view, row, seen) if over else idle for row, (seen, over) in rows])
        return view.protect(scores, view.newest(self.recent))

    def _row(self, view: CacheView, row: int, seen: int) -> Tensor:
        """The numbers of one row, ``[H, K]``, on the view's device."""
        if view.generators is None:
            generator = torch.Generator().manual_seed(_mix(self.seed, view.layer_idx, seen))
        else:
            generator = view.generators[row]
        # One number more than tokens, so that an empty row has something to gather.
        uniform = torch.rand(view.num_kv_heads, seen + 1, generator=generator, device=generator.device)
        return uniform.to(view.positions.device).gather(-1, view.positions[row].clamp(min=0))


def _mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers; a sum would give neighbouring layers and lengths the same one."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
