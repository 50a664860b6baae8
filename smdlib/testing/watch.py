"""A policy and a recorder that watch a rollout: an evicted key must never be seen again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smdlib.masks import ShadowMaskRecorder
from smdlib.policies import CacheView, EvictionPolicy, PolicyError
from smdlib.testing.guard import check_protected, score


class WatchingRecorder(ShadowMaskRecorder):
    """A recorder that also knows, at any time, which keys are gone.

    Example:
        >>> recorder = WatchingRecorder()
        >>> recorder.begin(num_layers=1, owner=None)
        >>> at = torch.tensor([[[0, 1, 2]]])
        >>> recorder.record(0, at, at == 1, torch.tensor([3]))
        >>> recorder.gone(0, torch.tensor([[[2, 1]]]))
        tensor([[[False,  True]]])
    """

    def __init__(self) -> None:
        super().__init__()
        self._gone: dict[tuple[int, int, int], set[int]] = {}

    def begin(self, num_layers: int, owner: object) -> None:
        """Start an empty record."""
        super().begin(num_layers, owner)
        self._gone = {}

    def record(self, layer_idx: int, positions: Tensor, evicted: Tensor, seen: Tensor) -> None:
        """Note evictions of one layer."""
        super().record(layer_idx, positions, evicted, seen)
        for row, head, slot in evicted.nonzero().tolist():
            self._gone.setdefault((layer_idx, row, head), set()).add(int(positions[row, head, slot]))

    def gone(self, layer_idx: int, positions: Tensor) -> Tensor:
        """Which of the keys at ``positions [B, H, K]`` were evicted, bool ``[B, H, K]``."""
        sets = [
            [self._gone.get((layer_idx, row, head), set()) for head in range(positions.shape[1])]
            for row in range(len(positions))
        ]
        listed = positions.tolist()
        found = [
            [[position in evicted for position in head] for head, evicted in zip(*pair, strict=True)]
            for pair in zip(listed, sets, strict=True)
        ]
        return torch.tensor(found, dtype=torch.bool).reshape(positions.shape)


class Watched:
    """Passes every view on to a policy, and looks at what comes in and out.

    Args:
        policy: The policy.
        recorder: That of the same cache.
    """

    def __init__(self, policy: EvictionPolicy, recorder: WatchingRecorder) -> None:
        self._policy, self._recorder = policy, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def score(self, view: CacheView) -> Tensor:
        """Score, after making sure that every key on offer has been there all along; see `EvictionPolicy`.

        Raises:
            PolicyError: if an evicted key is back, or the policy breaks its contract here.
        """
        back = self._recorder.gone(view.layer_idx, view.positions) & view.present
        if back.any():
            row, head, slot = back.nonzero()[0].tolist()
            raise PolicyError(
                f"{type(self._policy).__name__} lets a key return: position {int(view.positions[row, head, slot])} of "
                f"row {row}, layer {view.layer_idx}, KV head {head} was evicted, and is in the cache again. A policy "
                "scores the keys on offer, and never writes to a view or keeps one."
            )
        scores = score(self._policy, view)
        check_protected(self._policy, view, scores)
        return scores
