"""The two moments of eviction: packing the prompt's best keys, and freeing slots while decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from smdlib.cache.settings import CacheSettings
from smdlib.cache.table import SlotTable
from smdlib.policies import CacheView, checked_scores, evict_indices, keep_indices, worst_indices
from smdlib.policies.adaptive import ScoreAllocation, checked_budgets


def choose_kept(settings: CacheSettings, view: CacheView) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the keys that stay after a prefill (chunk), and record those that go.

    Args:
        settings: Policy, allocation and recorder.
        view: Keys on offer, ``[B, H, K, D]``.

    Returns:
        ``(budget, index, valid)``: int64 ``[B, H]``, that of the view unless the allocation looks at scores; int64 and
        bool ``[B, H, min(largest budget, K)]``, in ascending position order, valid ones first.
    """
    present = view.positions >= 0
    if bool((present.sum(-1) > view.budget).any()):
        scores = checked_scores(settings.policy, view)
    else:
        scores = torch.zeros(view.positions.shape, device=view.positions.device)
    budget = view.budget
    if isinstance(settings.allocation, ScoreAllocation):
        budget = checked_budgets(settings.allocation, scores, view)
    index, valid = keep_indices(scores, view.positions, budget, min(int(budget.max()), view.positions.shape[2]))
    if settings.recorder is not None:
        # Invalid entries go to a column of their own: the index they carry may belong to a kept key.
        stays = torch.zeros(*present.shape[:2], present.shape[2] + 1, dtype=torch.bool, device=present.device)
        stays.scatter_(2, torch.where(valid, index, present.shape[2]), True)
        settings.recorder.record(view.layer_idx, view.positions, present & ~stays[:, :, :-1], view.seen)
    return budget, index, valid


def free_worst(settings: CacheSettings, view: CacheView, slots: SlotTable, most: int, budget: int | None) -> None:
    """Empty the slots of the worst keys of every head that is over its budget, and record them.

    Args:
        settings: Policy and recorder.
        view: The slots in use, ``[B, H, K, D]``.
        slots: Storage that the view looks at; nothing in it is moved.
        most: Upper bound of the number of keys over budget, at most ``K``.
        budget: That of every row and head, where it is one for all.
    """
    scores = checked_scores(settings.policy, view)
    if slots.full and budget is not None and slots.used > budget:
        index = worst_indices(scores, view.positions, slots.used - budget)
        if settings.recorder is not None:
            settings.recorder.record(view.layer_idx, view.positions.gather(2, index), None, view.seen)
        slots.free_for_next(index)
        return
    index, valid = evict_indices(scores, view.positions, view.budget, most)
    if settings.recorder is not None:
        settings.recorder.record(view.layer_idx, view.positions.gather(2, index), valid, view.seen)
    slots.free(index, valid)
