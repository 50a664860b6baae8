"""The padded token batch that a loss works on, read from a TensorDict with TorchRL's keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from smdlib.masks import ShadowMask


@dataclass
class TokenKeys:
    """Where the entries of a batch lie; TorchRL's names, changed with ``loss.set_keys(name=key)``.

    Attributes:
        action: int64 tokens of prompt and response, ``[B, T]``.
        attention_mask: bool ``[B, T]``, real tokens. Without this entry all tokens of a row are real, so a padded batch
            must have it.
        loss_mask: bool ``[B, T]``, tokens that the policy sampled. Without this entry they are the tokens with a finite
            ``sample_log_prob``, so an engine that reports log-probs of the prompt needs it.
        sample_log_prob: float32 ``[B, T]`` in nats, the sampler's ``log p(x_t | x_<t)``, NaN on the prompt.
        old_log_prob: float32 ``[B, T]`` in nats at the loss's temperature, the dense policy's when the data was
            sampled; read by corrections.
        ref_log_probs: float32 ``[B, T]`` in nats at the loss's temperature, a reference policy's; read if its KL
            has a weight.
        advantage: ``[B]``, ``[B, 1]``, ``[B, T]`` or ``[B, T, 1]``.
        shadow: the recorded `smdlib.masks.ShadowMask` of the unpadded rows.
    """

    action: NestedKey = ("tokens", "full")
    attention_mask: NestedKey = ("masks", "all_attention_mask")
    loss_mask: NestedKey = ("masks", "all_assistant_mask")
    sample_log_prob: NestedKey = ("log_probs", "full")
    old_log_prob: NestedKey = ("log_probs", "old")
    ref_log_probs: NestedKey = ("next", "ref_log_probs", "full")
    advantage: NestedKey = "advantage"
    shadow: NestedKey = "shadow"


@dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens; what belongs to the N loss tokens lies flat, row after row.

    Attributes:
        input_ids: int64 ``[B, T]``.
        attention_mask: bool ``[B, T]``.
        loss_mask: bool ``[B, T]``, the tokens that count.
        shadow: record ``[B, T', L, H]``, or ``None`` for dense data.
        sample_log_prob: float32 ``[N]`` in nats; ``None`` if not asked for.
        old_log_prob: float32 ``[N]`` in nats; ``None`` if not asked for.
        ref_log_probs: float32 ``[N]`` in nats; ``None`` if not asked for.
        advantage: float32 ``[N]``; ``None`` if not asked for.
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    shadow: ShadowMask | None
    sample_log_prob: Tensor | None = None
    old_log_prob: Tensor | None = None
    ref_log_probs: Tensor | None = None
    advantage: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        """Loss tokens of each row, int64 ``[B]``."""
        return self.loss_mask.sum(-1)

    def retained_keys(self) -> Tensor | None:
        """Share of the keys that the queries predicting loss tokens could see, a scalar; ``None`` for dense data."""
        if self.shadow is None or not bool(self.loss_mask.any()):
            return None
        evicted_at = self.shadow.evicted_at.long()
        tokens, layers, heads = evicted_at.shape[-3:]
        # The query that predicts the token at position p of a row is the one at p - 1.
        query = (self.attention_mask.cumsum(-1) - 2)[self.loss_mask]
        row = self.loss_mask.nonzero()[:, 0]
        asked = evicted_at.new_zeros(self.loss_mask.shape[0], tokens + 1)
        before = asked.index_put((row, query + 1), torch.ones_like(query)).cumsum(1)  # queries below a position
        # Key k is seen by the queries from k to evicted_at - 1.
        until = before[:, :, None, None].expand(-1, -1, layers, heads).gather(1, evicted_at.clamp(max=tokens))
        seen = (until - before[:, :-1, None, None]).clamp(min=0).sum((1, 2, 3))
        possible = torch.zeros_like(seen).index_add(0, row, query + 1) * layers * heads
        return (seen / possible)[possible > 0].mean()

    @property
    def targets(self) -> Tensor:
        """Ids of the loss tokens, int64 ``[N]``."""
        return self.input_ids[self.loss_mask]


def read_tokens(
    data: TensorDictBase,
    keys: TokenKeys,
    *,
    shadow: bool,
    policy: bool = True,
    old: bool = False,
    reference: bool = False,
) -> TokenBatch:
    """Read a batch of rows, ragged or padded on either side.

    Args:
        data: One-dimensional batch, such as a sample of a replay buffer.
        keys: Where the entries lie.
        shadow: Whether the rows must carry their shadow mask.
        policy: Whether ``sample_log_prob`` and ``advantage`` are needed.
        old: Whether ``old_log_prob`` is needed.
        reference: Whether ``ref_log_probs`` are needed.

    Returns:
        The padded batch.

    Raises:
        KeyError: if an entry is missing, the shadow mask among them.
        ValueError: if shapes disagree, or a loss token has no finite value.
    """
    if data.ndim != 1:
        raise ValueError(f"a loss takes a one-dimensional batch of rows, not one of shape {tuple(data.shape)}.")
    if data.shape[0] == 0:
        raise ValueError("a loss needs at least one row; this batch is empty.")
    ids = _rows(data, keys.action, 0)
    if ids is None:
        raise KeyError(f"no tokens at {keys.action!r}; the batch has {_names(data)}.")
    attention = _rows(data, keys.attention_mask, False)
    if attention is None:
        attention = _lengths_mask(data, keys.action, ids)
    attention = attention.bool()
    sampled = _rows(data, keys.sample_log_prob, torch.nan)
    if sampled is None and policy:
        raise KeyError(f"no sampled log-probs at {keys.sample_log_prob!r}; the batch has {_names(data)}.")
    loss_mask = _rows(data, keys.loss_mask, False)
    if loss_mask is None:
        if sampled is None:
            raise KeyError(
                f"neither a loss mask at {keys.loss_mask!r} nor sampled log-probs at {keys.sample_log_prob!r}, so the "
                "response tokens are unknown."
            )
        if bool((sampled.isinf() & attention).any()):
            raise ValueError(
                f"{keys.sample_log_prob!r} is infinite at real tokens; NaN marks the prompt, anything else must be "
                "finite."
            )
        loss_mask = sampled.isfinite()
    loss_mask = loss_mask.bool() & attention
    for name, entry in ((keys.attention_mask, attention), (keys.loss_mask, loss_mask), (keys.sample_log_prob, sampled)):
        if entry is not None and entry.shape != ids.shape:
            raise ValueError(f"{name!r} has shape {tuple(entry.shape)}, the tokens {tuple(ids.shape)}.")
    # The first real token of a row has no log-prob: there is nothing before it.
    first = attention & (attention.cumsum(-1) == 1)
    if bool((loss_mask & first).any()):
        raise ValueError("the first token of a row is marked as sampled, but nothing comes before it to condition on.")
    record = _shadow(data, keys.shadow) if shadow else None
    if shadow and record is None:
        raise KeyError(
            f"no shadow mask at {keys.shadow!r}: these tokens would be scored with keys that the sampler had evicted. "
            "Store recorder.shadow_mask(lengths) there, or build the loss with dense=True for data that was sampled "
            f"without eviction. The batch has {_names(data)}."
        )

    def chosen(key: NestedKey, wanted: bool) -> Tensor | None:
        return _loss_values(data, key, loss_mask) if wanted else None

    return TokenBatch(
        ids,
        attention,
        loss_mask,
        record,
        sample_log_prob=chosen(keys.sample_log_prob, policy),
        old_log_prob=chosen(keys.old_log_prob, old),
        ref_log_probs=chosen(keys.ref_log_probs, reference),
        advantage=_finite(_advantage(data, keys.advantage, ids)[loss_mask], keys.advantage) if policy else None,
    )


def _each_row(data: LazyStackedTensorDict, key: NestedKey) -> list[Any] | None:
    """Read one entry per row of a ragged batch; ``None`` if a row lacks it."""
    rows = [row.get(key, None) for row in data.unbind(0)]
    return None if any(row is None for row in rows) else rows


def _rows(data: TensorDictBase, key: NestedKey, padding: float | bool) -> Tensor | None:
    """Read ``[B, T]``; ragged rows are padded on the left, as TorchRL does."""
    if not isinstance(data, LazyStackedTensorDict):
        return data.get(key, None)
    rows = _each_row(data, key)
    return None if rows is None else _pad_left(rows, padding)


def _pad_left(rows: list[Tensor], padding: float | bool) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding, padding_side="left")


def _lengths_mask(data: TensorDictBase, key: NestedKey, ids: Tensor) -> Tensor:
    rows = _each_row(data, key) if isinstance(data, LazyStackedTensorDict) else list(ids)
    assert rows is not None
    return _pad_left([torch.ones_like(row, dtype=torch.bool) for row in rows], False)


def _advantage(data: TensorDictBase, key: NestedKey, ids: Tensor) -> Tensor:
    rows = _each_row(data, key) if isinstance(data, LazyStackedTensorDict) else data.get(key, None)
    if rows is None:
        raise KeyError(f"no advantage at {key!r}; the batch has {_names(data)}.")
    # One value per token carries a trailing 1 or none, one value per row likewise.
    flat = [row.reshape(-1) for row in rows]
    per_row = all(row.shape[0] == 1 for row in flat)
    advantage = torch.stack(flat) if per_row else _pad_left(flat, 0.0)
    if advantage.shape[0] != ids.shape[0] or advantage.shape[1] not in (1, ids.shape[1]):
        raise ValueError(
            f"advantage at {key!r} has {[row.shape[0] for row in flat]} values per row; expected 1 or one per token of "
            f"{tuple(ids.shape)}."
        )
    return advantage.expand_as(ids)


def _loss_values(data: TensorDictBase, key: NestedKey, mask: Tensor) -> Tensor:
    """Read log-probs ``[B, T]`` and select those of loss tokens, ``[N]``."""
    values = _rows(data, key, torch.nan)
    if values is None:
        raise KeyError(f"no log-probs at {key!r}; the batch has {_names(data)}.")
    if values.shape != mask.shape:
        raise ValueError(f"{key!r} has shape {tuple(values.shape)}, the tokens {tuple(mask.shape)}.")
    chosen = _finite(values[mask], key)
    if bool((chosen > 1e-3).any()):
        raise ValueError(f"{key!r} holds values above 0 (up to {float(chosen.max()):.3g}); log-probs are 0 or less.")
    return chosen


def _finite(values: Tensor, key: NestedKey) -> Tensor:
    """Check the values ``[N]`` of loss tokens; what lies at other tokens (NaN, too) was never selected."""
    values = values.detach().float()
    if not bool(values.isfinite().all()):
        raise ValueError(f"{key!r} is not finite at {int((~values.isfinite()).sum())} of {len(values)} loss tokens.")
    return values


def _shadow(data: TensorDictBase, key: NestedKey) -> ShadowMask | None:
    if isinstance(data, LazyStackedTensorDict):
        rows = _each_row(data, key)
        return None if rows is None else ShadowMask.stack(rows)
    shadow = data.get(key, None)
    if isinstance(shadow, TensorDictBase):
        shadow = ShadowMask.from_tensordict(shadow)
    return shadow


def _names(data: TensorDictBase) -> list[NestedKey]:
    return sorted(data.keys(include_nested=True, leaves_only=True), key=str)
