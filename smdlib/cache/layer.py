"""One layer of a `CompressedCache`: takes keys in, hands them to attention, and evicts afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from einops import repeat
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from smdlib.cache.eviction import choose_kept, free_worst
from smdlib.cache.queries import QueryWindow
from smdlib.cache.ragged import Block, RaggedSlots
from smdlib.cache.settings import CacheSettings
from smdlib.cache.slots import KVSlots
from smdlib.cache.support import UnsupportedModelError
from smdlib.cache.table import EMPTY
from smdlib.policies import CacheView, query_window, resolve_budget, tracks_attention
from smdlib.policies.adaptive import ScoreAllocation
from smdlib.policies.steps import StepwiseAllocation, stepped

_ATTRIBUTE = "_smdlib_cache_layer"


def cache_layer_of(key: Tensor) -> CompressedLayer | None:
    """Return the layer that handed out ``key``, or ``None`` for keys of another cache or of none.

    The layer travels with the tensor that its ``update`` returns: every attention module passes that on untouched,
    whereas not all of them offer the cache a dict of keyword arguments.
    """
    return getattr(key, _ATTRIBUTE, None)


class _Step(NamedTuple):
    """Keys and values handed out by ``update`` and not yet attended to, ``[B, H, K, D]``."""

    prefill: bool
    in_slots: bool  # whether they are the slots in use, rather than a copy with the new ones behind
    keys: Tensor
    values: Tensor


class CompressedLayer(CacheLayerMixin):
    """Fixed slots of one layer: ``update`` before attention, ``commit`` after it.

    Args:
        layer_idx: Index of the layer.
        settings: What the layers share.
    """

    is_sliding = False

    def __init__(self, layer_idx: int, settings: CacheSettings) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.settings = settings
        # Asked at every token, and protocols are slow to recognise.
        self._stepwise = settings.allocation if isinstance(settings.allocation, StepwiseAllocation) else None
        self.tracks_attention = tracks_attention(settings.policy)  # whether the policy asks for attention mass
        self.reset()

    def reset(self) -> None:
        """Forget everything; storage is allocated anew at the next prefill."""
        self.slots: KVSlots | RaggedSlots | None = None
        window = query_window(self.settings.policy)
        self.queries = QueryWindow(window) if window else None
        self.budget: Tensor | None = None  # [B, H]
        self._full_budget: Tensor | None = None  # [B, H], that of the prefill
        self.padding: Tensor | None = None  # [B], padded columns in front of each row
        self.prompt_lengths = self.settings.prompt_lengths  # [B]
        self.columns = 0
        self._decoded = 0
        self._most_present = 0
        self._budgets = (0, 0)  # least and largest of all rows and heads
        self._prompt_complete = False
        self._step: _Step | None = None
        self._announced: int | None = None
        self._show_storage()

    def _show_storage(self) -> None:
        """Keep the attributes that transformers looks at in step with the slots."""
        self.keys = self.slots.keys if isinstance(self.slots, KVSlots) else None
        self.values = self.slots.values if isinstance(self.slots, KVSlots) else None
        self.is_initialized = self.slots is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do before the first eviction: the prompt is attended to where the model put it."""

    def get_seq_length(self) -> int:
        """Tokens (columns) seen so far, evicted ones included: what position ids count."""
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Logical key length and offset ``(seen + query_length, 0)``; the adapter maps them to slots."""
        self.check_attended()
        if self._announced not in (None, query_length):
            raise RuntimeError(
                f"layer {self.layer_idx} of a CompressedCache was asked for a mask but never given the keys: the model "
                "dropped the cache. Gradient checkpointing in train mode does that unless it runs without gradients; "
                "sample under torch.no_grad(). (After an exception inside the model, start again with a new cache.)"
            )
        self._announced = query_length
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        """``-1``: the number of tokens is not limited."""
        return -1

    @property
    def batch_size(self) -> int:
        """Rows held, ``-1`` before the first call."""
        return -1 if self.slots is None else self.slots.batch_size

    @property
    def is_first(self) -> bool:
        """Whether the keys on offer are exactly the new tokens, so that the model's own mask is right."""
        return self.slots is None

    @property
    def _decoding(self) -> bool:
        """Whether the keys on offer are those of the slots, with one decoded token among them."""
        return self._step is not None and not self._step.prefill

    @property
    def gapless(self) -> bool:
        """Whether the keys on offer are those of slots all of which are known to hold one."""
        return self._decoding and self.slots is not None and self.slots.full

    @property
    def blocks(self) -> list[Block] | None:
        """The blocks to attend to instead of what ``update`` returned: when decoding with heads of unequal budgets."""
        return self.slots.blocks if self._decoding and isinstance(self.slots, RaggedSlots) else None

    def check_attended(self) -> None:
        """Raise if the last keys were attended to by something that knows nothing of eviction."""
        if self._step is not None:
            raise RuntimeError(
                f"layer {self.layer_idx} of a CompressedCache was attended to without a MaskedAttentionAdapter. "
                "Install one first, `adapter = MaskedAttentionAdapter(model)`, and keep it installed while the cache "
                "is in use. If one is installed, the model changes its keys between cache and attention, and is not "
                "supported. (After an exception inside the model, start again with a new cache.)"
            )

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take the new keys and values and return those that attention may look at.

        Args:
            key_states: ``[B, H, Q, D]``.
            value_states: ``[B, H, Q, D]``.
            *args: Part of the transformers interface, not needed here.
            **kwargs: Part of the transformers interface, not needed here.

        Returns:
            Keys and values ``[B, H, K, D]``, the kept ones and the new ones, in the order of `offered_positions`; only
            the new ones where the rest is to be read from `blocks`.

        Raises:
            RuntimeError: if the previous call was never attended to by an adapter.
            UnsupportedModelError: if keys and values differ in shape (latent attention).
        """
        self.check_attended()
        self._announced = None
        if key_states.shape != value_states.shape:
            raise UnsupportedModelError(
                f"layer {self.layer_idx} caches keys {tuple(key_states.shape)} and values {tuple(value_states.shape)} "
                "of unequal shapes (latent attention?); a mask per KV head does not describe them."
            )
        # One token is decoding, unless it is known to belong to the prompt.
        decoding = self.slots is not None and key_states.shape[2] == 1 and self._prompt_complete
        keys, values, in_slots = key_states, value_states, False
        if decoding:
            assert self.slots is not None and self.padding is not None
            if self.slots.room == 0:
                self._grow(self.slots)
            with torch.no_grad():
                self.slots.write(key_states, value_states, self.columns - self.padding)
            if isinstance(self.slots, KVSlots):
                keys, values = self.slots.shown()
        elif self.slots is not None:
            keys, values, in_slots = self.slots.extended(key_states, value_states)
        self._step = _Step(not decoding, in_slots, keys, values)
        setattr(keys, _ATTRIBUTE, self)
        return keys, values

    def _grow(self, slots: KVSlots | RaggedSlots) -> None:
        slots.grow(self.settings.reserve)
        slots.find_free(self.settings.reserve)
        self.settings.on_grow(self.layer_idx, slots.size)
        self._show_storage()

    def offered_positions(self, padding: Tensor, query_length: int) -> Tensor:
        """Positions of the keys that ``update`` returned.

        Args:
            padding: int64 ``[B]``, padded columns in front of each row so far.
            query_length: Number of new tokens Q.

        Returns:
            int64 ``[B, H, K]``, ``-1`` for slots without a key and for padding.

        Raises:
            UnsupportedModelError: if these keys have been attended to before.
        """
        if self._step is None:
            raise UnsupportedModelError(
                f"layer {self.layer_idx} attends more than once to the keys of one step; which of these queries evicts "
                "is not defined, so smdlib cannot record this model."
            )
        self.padding = padding
        cached = None if self.slots is None else self.slots.positions[:, :, : self.slots.used]
        if cached is not None and not self._step.prefill:
            return cached
        columns = torch.arange(self.columns, self.columns + query_length, device=padding.device)
        new = repeat((columns - padding[:, None]).clamp(min=EMPTY), "b q -> b h q", h=self._step.keys.shape[1])
        if cached is None:
            return new
        if not self._step.in_slots:
            return torch.cat([cached, new], dim=2)
        cached[:, :, -query_length:] = new
        return cached

    @torch.no_grad()
    def commit(self, query: Tensor, positions: Tensor, mass: Tensor | None, scaling: float) -> None:
        """Evict, now that the queries have attended.

        Args:
            query: ``[B, Hq, Q, D]``.
            positions: What `offered_positions` returned, int64 ``[B, H, K]``.
            mass: float32 ``[B, H, K]``, the attention mass that these queries gave, where the policy tracks it.
            scaling: Factor of the attention logits.
        """
        step, self._step = self._step, None
        assert step is not None and self.padding is not None
        if self.queries is not None:
            self.queries.push(query)
        self.columns += query.shape[2]
        seen = self.columns - self.padding
        if self.layer_idx == 0 and self.settings.recorder is not None:
            self.settings.recorder.observe(self.settings.owner, seen, self.columns)
        if step.prefill:
            if mass is not None and self.slots is not None and self.slots.mass is not None:
                mass[:, :, : self.slots.used] += self.slots.mass[:, :, : self.slots.used]
            self._set_budget(seen, heads=step.keys.shape[1])
            self._compact(self._view(step.keys, step.values, positions, mass, seen, scaling))
            return
        assert self.slots is not None
        if mass is not None and self.slots.mass is not None:
            mass = self.slots.mass[:, :, : self.slots.used].add_(mass)
        self._decoded += 1
        self._most_present += 1
        every = self.settings.evict_every
        if every is not None and self._decoded % every == 0:
            most = every + self._shrink_budget()
            least, largest = self._budgets
            if self._most_present > least:
                view = self._view(*self.slots.shown(), positions, mass, seen, scaling, self.slots.full)
                budget = least if least == largest else None
                free_worst(self.settings, view, self.slots, min(most, positions.shape[2]), budget)
            if self.slots.room < every:
                self.slots.find_free(every)

    def _shrink_budget(self) -> int:
        """Follow an allocation that shrinks while decoding; return by how many keys a head's budget fell at most."""
        if self._stepwise is None:
            return 0
        before = self.budget
        assert before is not None and self._full_budget is not None
        self.budget = stepped(self._stepwise, self._full_budget, self._decoded)
        self._budgets = int(self.budget.min()), int(self.budget.max())
        return max(0, int((before - self.budget).max()))

    def _set_budget(self, seen: Tensor, heads: int) -> None:
        lengths = seen
        if self.prompt_lengths is not None:
            if len(self.prompt_lengths) != len(seen):
                raise ValueError(
                    f"prompt_lengths has {len(self.prompt_lengths)} entries for a batch of {len(seen)} rows."
                )
            lengths = torch.maximum(self.prompt_lengths.to(seen.device), seen)
        # A row that is all padding so far still waits for its prompt, whatever was said about lengths.
        self._prompt_complete = bool(((seen >= lengths) & (seen > 0)).all())
        rows = resolve_budget(self.settings.budget, lengths)
        self.budget = self.settings.allocation(rows, self.settings.num_layers, heads)[self.layer_idx]

    def _view(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        mass: Tensor | None,
        seen: Tensor,
        scaling: float,
        gapless: bool = False,
    ) -> CacheView:
        assert self.budget is not None
        return CacheView(
            layer_idx=self.layer_idx,
            num_layers=self.settings.num_layers,
            keys=keys,
            values=values,
            positions=positions,
            seen=seen,
            queries=None if self.queries is None else self.queries.newest_last(),
            attention=mass if self.tracks_attention else None,
            budget=self.budget,
            scaling=scaling,
            generators=self.settings.generators,
            token_ids=self._token_ids(positions),
            gapless=positions if gapless else None,
        )

    def _token_ids(self, positions: Tensor) -> Tensor | None:
        tokens = self.settings.tokens
        return None if tokens is None or self.padding is None else tokens.at(positions, self.padding)

    def _compact(self, view: CacheView) -> None:
        """After a prefill (chunk): keep the best keys of each head, packed to the front of the slots."""
        self.budget, index, valid = choose_kept(self.settings, view)
        self._full_budget, self._budgets = self.budget, (int(self.budget.min()), int(self.budget.max()))
        needs = self.budget + self.settings.reserve
        if isinstance(self.settings.allocation, ScoreAllocation):
            self.slots = RaggedSlots(view.keys, view.values, needs, self.tracks_attention)
        elif self.slots is None or self.slots.size < int(needs.max()):
            self.slots = None  # released before the larger storage is allocated
            self.slots = KVSlots(view.keys, view.values, int(needs.max()), self.tracks_attention)
        self.slots.fill(view.keys, view.values, view.positions, view.attention, index, valid)
        self.slots.find_free(self.settings.reserve)
        self._decoded, self._most_present = 0, index.shape[2]
        self._show_storage()

    def map_rows(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Replace every row-wise tensor by ``rows(tensor)``."""
        self.check_attended()
        for part in (self.slots, self.queries):
            if part is not None:
                part.map_rows(rows)
        self.budget = None if self.budget is None else rows(self.budget)
        self._full_budget = None if self._full_budget is None else rows(self._full_budget)
        self.padding = None if self.padding is None else rows(self.padding)
        self.prompt_lengths = None if self.prompt_lengths is None else rows(self.prompt_lengths)
        self._show_storage()
