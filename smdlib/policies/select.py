"""From scores to the keys that stay and the keys that go: the same choice for every shape and batch size."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import PolicyError
from .protocol import EvictionPolicy
from .view import CacheView

_INT32_MAX = torch.iinfo(torch.int32).max
_INT64 = torch.iinfo(torch.int64)


def checked_scores(policy: EvictionPolicy, view: CacheView) -> Tensor:
    """A policy's scores for a layer, refused if they could not be used.

    Args:
        policy: the policy.
        view: the layer, with K slots.

    Returns:
        ``[B, H, K]`` float32, as the policy made them. Only empty slots may be NaN.

    Raises:
        PolicyError: the policy changed the view; scores that are no tensor, or of the wrong shape, dtype or device;
            NaN for a key; or a head in which fewer keys
            score above ``-inf`` than it has to keep.

    Example:
        >>> from smdlib.policies import make_policy
        >>> view = CacheView.of_prompt(torch.zeros(1, 1, 3, 2), budget=2)
        >>> checked_scores(make_policy("streaming", sinks=1), view)
        tensor([[[inf, 1., 2.]]])
    """
    before = _versions(view)
    scores = policy.score(view)
    where = f"policy {type(policy).__name__} at layer {view.layer_idx}"
    changed = [name for name, version in _versions(view).items() if version != before[name]]
    if changed:
        raise PolicyError(f"{where}: score changed view.{changed[0]} in place, but a view is read-only: clone first")
    if not isinstance(scores, Tensor):
        raise PolicyError(f"{where}: score returned {type(scores).__name__}, expected a tensor [B, H, K]")
    if scores.shape != view.positions.shape:
        raise PolicyError(
            f"{where}: scores have shape {list(scores.shape)}, expected [B, H, K] = {list(view.positions.shape)}"
        )
    if scores.dtype != torch.float32:
        raise PolicyError(f"{where}: scores are {scores.dtype}, expected torch.float32: return scores.float()")
    if scores.device != view.positions.device:
        raise PolicyError(f"{where}: scores are on {scores.device}, expected {view.positions.device}, like the keys")
    # One number to read in the good case: the smallest score of a key is NaN if any is, and -inf if any is.
    known = scores if view.all_present else torch.where(view.present, scores, float("inf"))
    if scores.numel() and not known.amin() > float("-inf"):
        _explain(scores, view, where)
    return scores


def _versions(view: CacheView) -> dict[str, int]:
    """How often each tensor of the view was changed in place (not known of tensors of inference mode)."""
    names = ("keys", "values", "positions", "seen", "queries", "attention", "token_ids", "budget")
    tensors = {name: getattr(view, name) for name in names}
    return {name: t._version for name, t in tensors.items() if t is not None and not t.is_inference()}


def _explain(scores: Tensor, view: CacheView, where: str) -> None:
    """Raises for NaN or for too few keepable keys; a key that scores -inf may be one that need not be kept."""
    nan = scores.isnan() & view.present
    if nan.any():
        row, head, slot = nan.nonzero()[0].tolist()
        position = int(view.positions[row, head, slot])
        raise PolicyError(
            f"{where}: {int(nan.sum())} keys score NaN, expected a number; "
            f"the first is position {position} of row {row}, KV head {head}"
        )
    keepable = ((scores > float("-inf")) & view.present).sum(-1)
    needed = torch.minimum(view.budget, view.present.sum(-1))
    short = keepable < needed
    if short.any():
        row, head = short.nonzero()[0].tolist()
        raise PolicyError(
            f"{where}: {int(keepable[row, head])} keys of row {row}, KV head {head} score above -inf, "
            f"expected at least {int(needed[row, head])} (its budget, or all it has): "
            "give keys low scores rather than -inf, or lower the budget"
        )


def keep_indices(scores: Tensor, positions: Tensor, budget: Tensor, max_keep: int) -> tuple[Tensor, Tensor]:
    """The best keys of each head, ``min(budget, present)`` of them; the newer one of equals.

    Args:
        scores: ``[B, H, K]`` float32, checked. Empty slots may hold anything.
        positions: ``[B, H, K]`` int64 below 2**31, -1 for an empty slot, no position twice in a head.
        budget: ``[B, H]`` int64, keys.
        max_keep: M, at least the largest number that a head keeps (the largest budget will do); it is known without
            reading a tensor, so that the device need not wait.

    Returns:
        Slots ``[B, H, M]`` int64 in ascending order of position, and ``[B, H, M]`` bool, which of them are meant. Those
        that are not come last and are 0.

    Example:
        >>> scores = torch.tensor([[[0.5, 9.0, 0.1, 0.5]]])
        >>> slots, valid = keep_indices(scores, torch.tensor([[[2, -1, 1, 0]]]), torch.tensor([[2]]), max_keep=3)
        >>> slots.tolist(), valid.tolist()
        ([[[3, 0, 0]]], [[[True, True, False]]])
    """
    present = positions >= 0
    count = torch.minimum(budget, present.sum(-1))
    rank = rank_keys(scores, positions).masked_fill(~present, _INT64.min)
    best = rank.topk(min(max_keep, rank.shape[-1]), dim=-1).indices
    valid = _first(count, best.shape[-1])
    order = positions.gather(-1, best).masked_fill(~valid, _INT64.max).argsort(-1)
    slots = best.gather(-1, order).masked_fill(~valid, 0)  # the valid ones come first before and after sorting
    return _padded(slots, valid, max_keep)


def evict_indices(scores: Tensor, positions: Tensor, budget: Tensor, max_evict: int) -> tuple[Tensor, Tensor]:
    """The worst keys of each head, ``present - budget`` of them; the older one of equals. What `keep_indices` leaves.

    Args:
        scores: ``[B, H, K]`` float32, checked. Empty slots may hold anything.
        positions: ``[B, H, K]`` int64 below 2**31, -1 for an empty slot, no position twice in a head.
        budget: ``[B, H]`` int64, keys.
        max_evict: M, at least the largest number that a head evicts. 1, as in decoding with an eviction after every
            token, sorts nothing.

    Returns:
        Slots ``[B, H, M]`` int64, the worst first, and ``[B, H, M]`` bool, which of them are meant. Those that are not
        come last and are in range.

    Example:
        >>> scores = torch.tensor([[[0.5, 0.0, 0.7, 0.5]]])
        >>> slots, valid = evict_indices(scores, torch.tensor([[[2, -1, 1, 0]]]), torch.tensor([[2]]), max_evict=1)
        >>> slots.tolist(), valid.tolist()
        ([[[3]]], [[[True]]])
    """
    present = positions >= 0
    count = present.sum(-1) - budget
    rank = rank_keys(scores, positions)
    if max_evict == 1:
        return rank.argmin(-1, keepdim=True), _first(count, 1)
    slots = rank.topk(min(max_evict, rank.shape[-1]), dim=-1, largest=False).indices
    return _padded(slots, _first(count, slots.shape[-1]), max_evict)


def worst_indices(scores: Tensor, positions: Tensor, count: int) -> Tensor:
    """The ``count`` worst keys of each head, as `evict_indices` chooses them, where it is known that no slot is empty.

    Args:
        scores: ``[B, H, K]`` float32, checked.
        positions: ``[B, H, K]`` int64 from 0 to below 2**31, no position twice in a head.
        count: M, from 1 to K.

    Returns:
        Slots ``[B, H, M]`` int64, the worst first.

    Example:
        >>> worst_indices(torch.tensor([[[0.5, 0.0, 0.7, 0.0]]]), torch.tensor([[[2, 5, 1, 0]]]), count=1)
        tensor([[[3]]])
    """
    if count > 1:
        return rank_keys(scores, positions).topk(count, dim=-1, largest=False).indices
    # No ranks, but three looks at the scores: this runs at every decoded token.
    lowest = scores.amin(-1, keepdim=True)
    return torch.where(scores == lowest, positions, _INT64.max).argmin(-1, keepdim=True)


def rank_keys(scores: Tensor, positions: Tensor) -> Tensor:
    """One int64 per key that orders keys by score, then by position, so that no two are equal; empty slots above all.

    ``topk`` breaks ties as it likes, and differently for different shapes. Without ties it has no choice. Integer
    arithmetic only, without masks, because this runs at every decoded token.
    """
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 makes -0.0 a 0.0
    bits = bits ^ ((bits >> 31) & _INT32_MAX)  # negative floats grow with falling bits: turn them round
    rank = (bits.to(torch.int64) << 32) | positions  # -1, all bits set, for an empty slot
    return rank ^ (positions & _INT64.min)  # flips its sign: the largest int64


def _first(count: Tensor, length: int) -> Tensor:
    """``[..., length]`` bool, true for the first ``count`` entries."""
    return torch.arange(length, device=count.device) < count.unsqueeze(-1)


def _padded(slots: Tensor, valid: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Both with invalid entries up to ``length``, where there are fewer slots than were asked for."""
    missing = length - slots.shape[-1]
    if missing <= 0:
        return slots, valid
    return torch.nn.functional.pad(slots, (0, missing)), torch.nn.functional.pad(valid, (0, missing))
