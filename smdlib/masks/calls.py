"""Checks every call of a model with a compressed cache, and tells it the positions of its tokens.

The record counts unpadded positions. A call whose padding contradicts what the cache already holds, or whose position
ids are others, would sample from something that no record describes.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from smdlib.cache import CompressedCache
from smdlib.cache.support import refuse_active_dropout, refuse_dropout, rope_limit
from smdlib.masks.spec import left_padding


def prepare_call(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Forward pre-hook of an adapted model; calls without a `CompressedCache` pass untouched.

    Args:
        model: The model being called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        The arguments with position ids, or ``None`` to leave them.

    Raises:
        ValueError: if rows, padding or positions of the call contradict the cache.
    """
    signature = _signature(type(model))
    given = signature.bind_partial(model, *args, **kwargs).arguments
    given = {**given, **given.pop("kwargs", {})}
    cache = given.get("cache", given.get("past_key_values"))
    if not isinstance(cache, CompressedCache):
        return None
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if tokens is None:
        return None
    rows, new, seen = tokens.shape[0], tokens.shape[1], cache.get_seq_length()
    _check_rows(cache, given, rows, new, seen)
    mask = _check_mask(cache, given.get("attention_mask"), tokens, seen + new)
    if mask is None:
        return None
    if seen == 0:
        if model.training:
            refuse_dropout(model.config, "sampling")
        refuse_active_dropout(model, "sampling")
    positions = (mask.long().cumsum(-1) - 1)[:, -new:]
    limit = rope_limit(model.config)
    if limit is not None and int(positions.max()) >= limit:
        raise ValueError(
            f"this call reaches position {int(positions.max())}, but the model's rotary embedding changes beyond "
            f"{limit} tokens, also for keys that are cached already; smdlib cannot replay that exactly. Keep prompt "
            "and response below it."
        )
    own = given.get("position_ids")
    if own is not None:
        if own.shape[-1] != new or bool((own.expand(rows, -1) != positions)[mask[:, -new:]].any()):
            raise ValueError(
                f"position_ids disagree with the unpadded positions {positions.tolist()} of these tokens; leave them "
                "out or pass (attention_mask.cumsum(-1) - 1) of the new columns."
            )
    elif "position_ids" in signature.parameters:
        kwargs = {**kwargs, "position_ids": positions.clamp(min=0)}
    recorder, ids = cache.settings.recorder, given.get("input_ids")
    if cache.settings.tokens is not None:
        if ids is None:
            raise ValueError(
                f"{type(cache.settings.policy).__name__} asks for token ids, but this call has none: pass input_ids "
                "rather than inputs_embeds."
            )
        cache.settings.tokens.append(ids)
    if recorder is not None and ids is not None:
        recorder.observe_tokens(cache.settings.owner, ids)
    return args, kwargs


@lru_cache(maxsize=64)
def _signature(kind: type[nn.Module]) -> inspect.Signature:
    """Signature of a model class's forward; looking it up takes longer than the checks."""
    return inspect.signature(kind.forward)


def _check_rows(cache: CompressedCache, given: dict[str, Any], rows: int, new: int, seen: int) -> None:
    if given.get("use_cache") is False:
        raise ValueError(
            "use_cache=False with a CompressedCache: the cache would stay empty. Leave one of the two out."
        )
    if new == 0:
        raise ValueError(
            f"no new tokens: the cache holds {seen} already. To go on with a conversation pass all of it, old and new "
            "tokens; for another prompt use a new cache or cache.reset()."
        )
    if cache.batch_size not in (-1, rows):
        raise ValueError(
            f"the cache holds {cache.batch_size} rows, the batch has {rows}. For several samples of a prompt call "
            "cache.batch_repeat_interleave(samples) after the prefill; for other prompts use a new cache."
        )
    generators = cache.settings.generators
    if generators is not None and len(generators) != rows:
        raise ValueError(f"{len(generators)} generators for {rows} rows; pass one per row.")


def _check_mask(cache: CompressedCache, mask: Any, tokens: Tensor, columns: int) -> Tensor | None:
    """Return the mask as bool ``[B, columns]``, or ``None`` if it is of a kind that attention will refuse itself."""
    held = cache.layers[0].padding
    if mask is None:
        if held is not None and bool((held > 0).any()):
            raise ValueError(
                f"rows of this cache began with {held.tolist()} padded columns, but no attention_mask was passed; "
                f"pass it for all {columns} columns."
            )
        return torch.ones(tokens.shape[0], columns, dtype=torch.bool, device=tokens.device)
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    if mask.shape[1] != columns:
        if cache.get_seq_length() == 0:
            hint = (
                "If a call came before this one, the model dropped the cache: gradient checkpointing in train mode "
                "does that; call model.eval()."
            )
        else:
            hint = "Does the cache still hold an earlier batch? Use a new one, or cache.reset()."
        raise ValueError(
            f"attention_mask covers {mask.shape[1]} columns, but the cache and the new tokens are {columns}. {hint}"
        )
    mask = mask.to(tokens.device).bool()
    padding = left_padding(mask)
    if held is not None:
        held = held.to(padding.device)
        begun = held < cache.get_seq_length()
        wrong = torch.where(begun, padding != held, padding < held).nonzero().flatten().tolist()
        if wrong:
            row = wrong[0]
            raise ValueError(
                f"row {row} began with {int(held[row])} padded columns, this attention_mask has {int(padding[row])}: "
                "the rows are in another order than in the cache (batch_repeat_interleave repeats [0, 0, 1, 1]), or "
                "the cache still holds an earlier batch."
            )
    return mask
