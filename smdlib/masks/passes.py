"""The passes of the learner: what they are given is checked, and that every layer applied it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smdlib.cache.support import (
    UnsupportedModelError,
    num_kv_heads,
    refuse_active_dropout,
    refuse_dropout,
    rope_limit,
    text_config,
)
from smdlib.masks.attention import REPLAY_ARGUMENT
from smdlib.masks.replay import Pass, check_fits, check_tokens, row_starts
from smdlib.masks.shadow import ShadowMask
from smdlib.masks.sharding import is_sharded, run_inside
from smdlib.masks.shared import PromptPass, ResponsePass, SharedRows, View, tie


def check_rows(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    shadow_masks: Sequence[ShadowMask | None],
    short: bool,
) -> tuple[Tensor, Tensor]:
    """Check the arguments of a pass.

    Args:
        model: The model.
        input_ids: int64 ``[B, T]``.
        attention_mask: ``[B, T]``.
        shadow_masks: Records ``[B, T', L, H]``; ``None`` for a dense pass.
        short: Whether a record may end one token early.

    Returns:
        Where the rows start and how long they are, int64 ``[B]`` each.

    Raises:
        ValueError: if a mask does not fit rows and model, or the model has dropout in train mode.
    """
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids must be [B, T], not of shape {tuple(input_ids.shape)}.")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} and input_ids {tuple(input_ids.shape)} differ in shape."
        )
    if model.training:
        refuse_dropout(model.config, "scoring")
    refuse_active_dropout(model, "scoring")
    starts, lengths = row_starts(attention_mask.bool())
    layers, heads = int(text_config(model.config).num_hidden_layers), num_kv_heads(model.config)
    for shadow_mask in shadow_masks:
        if shadow_mask is None:
            continue
        check_fits(shadow_mask, lengths, input_ids.shape[1], layers, heads, int(short))
        limit = rope_limit(model.config)
        if limit is not None and int(lengths.max()) > limit:
            raise ValueError(
                f"rows of {int(lengths.max())} tokens reach beyond the {limit} up to which the model's rotary "
                "embedding does not depend on the length; they cannot be replayed exactly."
            )
        check_tokens(shadow_mask, input_ids, starts, lengths)
    return starts, lengths


def run_pass(model: PreTrainedModel, module: nn.Module, what: Pass | None, **kwargs: Any) -> Any:
    """Run a model, or its part without the head, without a cache.

    Args:
        model: The model.
        module: The model itself or its base model.
        what: Handed down to attention; ``None`` for the model's own.
        **kwargs: Of ``module``.

    Returns:
        What ``module`` returns.

    Raises:
        UnsupportedModelError: if some layer did not apply ``what``.
    """
    if what is not None:
        kwargs[REPLAY_ARGUMENT] = what
    call = partial(module, use_cache=False, **kwargs)
    # A part of the model runs with what FSDP2 gathers for the whole: its forward is where FSDP2 starts.
    output = call() if module is model else run_inside(model, call)
    layers = int(text_config(model.config).num_hidden_layers)
    missing = [] if what is None else sorted(set(range(layers)) - what.applied)
    if missing:
        raise UnsupportedModelError(
            f"layers {missing} of {type(model).__name__} ran without the shadow mask: the model does not hand "
            "extra arguments down to its attention, so its passes cannot be replayed."
        )
    return output


def gradient_if(wanted: bool) -> AbstractContextManager:
    """Record gradients if they are wanted and the caller records any."""
    return torch.set_grad_enabled(wanted and torch.is_grad_enabled())


def run_whole(
    hidden_states: Callable[..., Tensor],
    input_ids: Tensor,
    attention_mask: Tensor,
    loss_mask: Tensor,
    views: Sequence[View],
) -> list[Tensor]:
    """Run every row whole in every view.

    Args:
        hidden_states: That of an actor: last hidden states ``[B, T, D]`` of ids, attention mask and record.
        input_ids: int64 ``[B, T]``.
        attention_mask: ``[B, T]``.
        loss_mask: bool ``[B, T]``.
        views: What the rows see.

    Returns:
        States ``[N, D]`` of each view that predict loss tokens, row after row.
    """
    states = []
    for view in views:
        with gradient_if(view.gradient):
            hidden = hidden_states(input_ids, attention_mask, view.shadow)
            states.append(hidden[:, :-1][loss_mask[:, 1:]])
    return states


def run_shared(model: PreTrainedModel, rows: SharedRows, views: Sequence[View]) -> list[Tensor] | None:
    """Run each prompt once, and the responses on its keys in every view.

    Args:
        model: The model.
        rows: The batch, split.
        views: What the responses see.

    Returns:
        States ``[N, D]`` of each view that predict loss tokens, row after row; ``None`` if gradients would not reach
        the prompts, as with reentrant activation checkpointing, which hides keys and values from autograd.
    """
    prompt = PromptPass()
    columns = torch.arange(rows.prompts.shape[1], device=rows.prompts.device).expand_as(rows.prompts)
    with gradient_if(any(view.gradient for view in views)):
        wanted = torch.is_grad_enabled() and any(part.requires_grad for part in model.parameters())
        read = run_pass(model, model.base_model, prompt, input_ids=rows.prompts, position_ids=columns)
    prompt.seal()
    if wanted and not any(keys.requires_grad for keys in prompt.keys.values()):
        return None
    positions = rows.first[:, None] + torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
    states = []
    for view in views:
        with gradient_if(view.gradient):
            responses = ResponsePass(prompt, rows, view)
            output = run_pass(model, model.base_model, responses, input_ids=rows.tokens, position_ids=positions)
            chosen = output.last_hidden_state.flatten(0, 1)[rows.wanted]
            tied = view.gradient and is_sharded(model)
            states.append(tie(chosen, read.last_hidden_state) if tied else chosen)
    return states
