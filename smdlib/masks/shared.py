"""Each prompt of a batch computed once: its keys serve the responses of its whole group, in every pass.

A response's states depend on its prompt through the prompt's keys and values alone. So one plain causal pass over the
distinct prompts leaves them in a stash, with gradient; the responses then attend to the keys that their own record
left them, gathered per KV head, and to each other's past. The dense teacher runs on the same stash, detached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smdlib.masks.limits import Limits
from smdlib.masks.shadow import NEVER, ShadowMask
from smdlib.masks.spec import MaskSpec


@dataclass(frozen=True)
class View:
    """One way of looking at a batch: through a record, or dense.

    Attributes:
        shadow: Record ``[B, T', L, H]`` of the unpadded rows; ``None`` for every key.
        gradient: Whether the states carry gradient.
    """

    shadow: ShadowMask | None
    gradient: bool = True


@dataclass(frozen=True)
class SharedRows:
    """A batch split into distinct prompts and responses; positions are unpadded.

    The last token of a prompt goes with the response: it is the first query whose state is wanted.

    Attributes:
        prompts: int64 ``[U, P]``, padded on the right, each without its last token.
        lengths: int64 ``[U]``, at least 1.
        group: int64 ``[B]``, which prompt a row has.
        tokens: int64 ``[B, Q]``, padded on the right: last prompt token and response, but for the row's last token.
        counts: int64 ``[B]``, how many of them are real.
        wanted: int64 ``[N]``, flat index into ``[B, Q]`` of the states that predict loss tokens, row after row.
    """

    prompts: Tensor
    lengths: Tensor
    group: Tensor
    tokens: Tensor
    counts: Tensor
    wanted: Tensor

    @property
    def first(self) -> Tensor:
        """Position of each row's first response query, int64 ``[B]``."""
        return self.lengths[self.group]


def distinct_prompts(prompts: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Find the distinct ones among prompts.

    Args:
        prompts: int64 ``[P]`` each.

    Returns:
        The distinct prompts, in order of appearance, and int64 ``[B]``, which of them each is; on the CPU.

    Example:
        >>> found, index = distinct_prompts([torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([1, 2])])
        >>> [prompt.tolist() for prompt in found], index.tolist()
        ([[1, 2], [3]], [0, 1, 0])
    """
    found: dict[tuple[int, ...], int] = {}
    index = [found.setdefault(tuple(prompt.tolist()), len(found)) for prompt in prompts]
    return [torch.tensor(prompt) for prompt in found], torch.tensor(index)


def split_rows(
    input_ids: Tensor, starts: Tensor, lengths: Tensor, loss_mask: Tensor, shadows: Sequence[ShadowMask]
) -> SharedRows | None:
    """Split rows into distinct prompts and responses.

    Args:
        input_ids: int64 ``[B, C]``.
        starts: int64 ``[B]``, first real column of each row.
        lengths: int64 ``[B]``, real tokens of each row.
        loss_mask: bool ``[B, C]``, tokens whose predicting states are wanted.
        shadows: Records of the views.

    Returns:
        The parts; ``None`` where a prompt cannot be computed for its group: a prompt of one token, or keys evicted
        while the prompt itself was still read (prefill in chunks).
    """
    columns = torch.arange(input_ids.shape[1], device=input_ids.device)
    position = columns - starts[:, None]
    # The first loss token ends the prompt; a row without any has nothing but its last token to run.
    last = starts + lengths - 1
    begin = torch.where(loss_mask.any(1), loss_mask.int().argmax(1), last)
    cut = begin - starts - 1  # prompt tokens but the last
    if bool((cut < 1).any()):
        return None
    for shadow in shadows:
        evicted_at = shadow.evicted_at.to(cut.device)
        inside = torch.arange(evicted_at.shape[1], device=cut.device) < cut[:, None]
        if bool(((evicted_at < cut[:, None, None, None]) & inside[:, :, None, None]).any()):
            return None
    spans = zip(input_ids.cpu(), starts.tolist(), cut.tolist(), strict=True)
    found, group = distinct_prompts([row[at : at + size] for row, at, size in spans])
    prompts = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
    counts = (last - begin + 1).clamp(min=1)
    offset = torch.arange(int(counts.max()), device=input_ids.device)
    tokens = input_ids.gather(1, (begin[:, None] - 1 + offset).clamp(max=input_ids.shape[1] - 1))
    tokens = torch.where(offset < counts[:, None], tokens, 0)
    row, column = loss_mask.nonzero(as_tuple=True)
    wanted = row * len(offset) + (position[row, column] - 1 - cut[row])
    return SharedRows(
        prompts=prompts.to(input_ids.device),
        lengths=torch.tensor([len(prompt) for prompt in found], device=input_ids.device),
        group=group.to(input_ids.device),
        tokens=tokens,
        counts=counts,
        wanted=wanted,
    )


class PromptPass:
    """The pass over the prompts: plain causal attention, whose keys and values are kept.

    Handed down to attention as it is: FSDP2 would copy a container.
    """

    def __init__(self) -> None:
        self.applied: set[int] = set()
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._sealed = False

    def seal(self) -> None:
        """Keep what there is: activation checkpointing runs the layers again in the backward pass."""
        self._sealed = True

    def limits(self, layer_idx: int, key: Tensor, value: Tensor) -> None:
        """Nothing is evicted while a prompt is read; see `smdlib.masks.replay.Pass`."""

    def seen(self, layer_idx: int, key: Tensor, value: Tensor, spec: MaskSpec) -> tuple[Tensor, Tensor, Tensor | None]:
        """Note the keys and values ``[U, H, P, D]`` of one layer, and leave attention as it is."""
        self.applied.add(layer_idx)
        if not self._sealed:
            self.keys[layer_idx], self.values[layer_idx] = key, value
        return key, value, spec.dense(key.device)


class ResponsePass:
    """A pass over the responses, on the prompts' keys that a view leaves them.

    Args:
        prompt: The finished pass over the prompts.
        rows: The batch.
        view: What the responses see.
    """

    def __init__(self, prompt: PromptPass, rows: SharedRows, view: View) -> None:
        self.applied: set[int] = set()
        self._prompt, self._rows, self._gradient = prompt, rows, view.gradient
        columns = torch.arange(rows.prompts.shape[1], device=rows.first.device)
        self._prompt_positions = torch.where(columns < rows.first[:, None], columns, -1)  # [B, P]
        self._queries = rows.first[:, None] + torch.arange(rows.tokens.shape[1], device=columns.device)  # [B, Q]
        self._evicted_at = None if view.shadow is None else view.shadow.evicted_at.to(columns.device)
        self._blocks: dict[Any, Any] = {}

    def limits(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Limits] | None:
        """Put the prompts' keys that a record left in front of the responses' own, with the limits of all.

        Args:
            layer_idx: Index of the layer.
            key: ``[B, H, Q, D]``, the responses' own.
            value: ``[B, H, Q, D]``.

        Returns:
            Keys and values ``[B, H, K, D]`` and their limits, counted in positions; ``None`` for a dense view.
        """
        if self._evicted_at is None:
            return None
        self.applied.add(layer_idx)
        keys, values = self._stash(layer_idx)
        rows, device = self._rows.group.to(key.device), key.device
        queries = self._queries.to(device)
        gone = self._evicted_at[:, :, layer_idx].to(device).transpose(1, 2)  # [B, H, T]
        kept = self._kept(gone)
        head = torch.arange(key.shape[1], device=device)[:, None]
        positions = torch.cat([kept, queries[:, None].expand(-1, key.shape[1], -1)], 2)
        until = gone.gather(2, positions.clamp(0, gone.shape[2] - 1))
        # The record may end one token early; what it does not cover was never evicted.
        until = torch.where(positions < gone.shape[2], until, NEVER)
        until = torch.where(positions >= 0, until, 0)
        chosen = rows[:, None, None], head, kept.clamp(min=0)
        limits = Limits(queries.int(), positions.clamp(min=0).int(), until, self._blocks)
        return torch.cat([keys[chosen], key], 2), torch.cat([values[chosen], value], 2), limits

    def seen(self, layer_idx: int, key: Tensor, value: Tensor, spec: MaskSpec) -> tuple[Tensor, Tensor, Tensor]:
        """Put the prompts' keys in front of the responses' own.

        Args:
            layer_idx: Index of the layer.
            key: ``[B, H, Q, D]``, the responses' own.
            value: ``[B, H, Q, D]``.
            spec: The model's own pattern.

        Returns:
            Keys and values ``[B, H, K, D]``, and what may be seen of them, bool ``[B, 1 | H, Q, K]``.
        """
        offered = self.limits(layer_idx, key, value)
        if offered is not None:
            key, value, limits = offered
            return key, value, spec.between(limits.queries, limits.keys) & limits.visible()
        self.applied.add(layer_idx)
        keys, values = self._stash(layer_idx)
        rows, queries = self._rows.group.to(key.device), self._queries.to(key.device)
        positions = torch.cat([self._prompt_positions.to(key.device), queries], 1)[:, None]
        visible = spec.between(queries, positions)
        return torch.cat([keys[rows], key], 2), torch.cat([values[rows], value], 2), visible

    def _stash(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[U, H, P, D]`` of the prompts in one layer."""
        keys, values = self._prompt.keys[layer_idx], self._prompt.values[layer_idx]
        return (keys, values) if self._gradient else (keys.detach(), values.detach())

    def _kept(self, gone: Tensor) -> Tensor:
        """Positions of the prompt's keys that the first response query still sees, int64 ``[B, H, K]``, -1 for none."""
        positions = self._prompt_positions.to(gone.device)[:, None]  # [B, 1, P]
        # Records are as long as the longest row, prompts may be padded further.
        until = torch.nn.functional.pad(gone, (0, max(0, positions.shape[2] - gone.shape[2])), value=NEVER)
        alive = (until[:, :, : positions.shape[2]] > self._rows.first.to(gone.device)[:, None, None]) & (positions >= 0)
        most = int(alive.sum(2).max())
        order = alive.byte().argsort(dim=2, descending=True, stable=True)[:, :, :most]
        return torch.where(alive.gather(2, order), order, -1)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, prompt_states: Tensor) -> Tensor:
        ctx.other = prompt_states.shape, prompt_states.dtype
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype = ctx.other
        return gradients[0], gradients[0].new_zeros(shape, dtype=dtype)


def tie(states: Tensor, prompt_states: Tensor) -> Tensor:
    """Return ``states``, whose backward pass also sends zeros into the output of the prompt pass.

    Gradients reach the prompt pass through its keys and values. FSDP2 gathers a layer again when a gradient reaches the
    layer's output, which the last layer's never would.

    Args:
        states: ``[N, D]``.
        prompt_states: ``[U, P, D]``, last hidden states of the prompt pass.
    """
    return _Tie.apply(states, prompt_states)
