"""Who attends for a model: names of the registered attention, owners, and the choice of a back-end."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from smdlib.cache.support import text_config
from smdlib.masks.calls import prepare_call

_PREFIX = "smdlib_"
# transformers recognises some implementations by substrings of their names, so ours avoid them.
NAMES = {"sdpa": _PREFIX + "fused", "eager": _PREFIX + "plain", "flex": _PREFIX + "limits"}
_OWNER = "_smdlib_adapter"


class _Owner:
    """Points to the adapter without keeping it; a copied model has no owner until its adapter comes along."""

    def __init__(self, adapter: nn.Module | None = None) -> None:
        self._adapter = None if adapter is None else weakref.ref(adapter)

    def __call__(self) -> nn.Module | None:
        return None if self._adapter is None else self._adapter()

    def __reduce__(self) -> tuple[type[_Owner], tuple[()]]:
        return _Owner, ()


def owner_of(model: nn.Module) -> nn.Module | None:
    """The adapter that the model attends through; a copy of a model has none, whatever its configuration says."""
    reference = model.__dict__.get(_OWNER)
    adapter = None if reference is None else reference()
    return adapter if adapter is not None and getattr(adapter, "model", None) is model else None


def take_over(model: nn.Module, adapter: nn.Module | None) -> None:
    """Make ``adapter`` the model's owner, without hooks of an earlier one."""
    for handle, hook in list(model._forward_pre_hooks.items()):
        if hook is prepare_call:
            del model._forward_pre_hooks[handle]
            model._forward_pre_hooks_with_kwargs.pop(handle, None)
    model.__dict__[_OWNER] = _Owner(adapter)


def previous_implementation(model: PreTrainedModel) -> str:
    """What the model attended with before any adapter.

    Raises:
        ValueError: if it has one that is in use.
    """
    name = text_config(model.config)._attn_implementation
    if not name.startswith(_PREFIX):
        return name
    if owner_of(model) is not None:
        raise ValueError("this model already has a MaskedAttentionAdapter; use that one, or remove() it first.")
    # A copy made while an adapter was installed, or an adapter that nobody holds any more.
    return "eager" if name == NAMES["eager"] else "sdpa"


def resolve_backend(model: PreTrainedModel, previous: str, backend: str) -> str:
    """Choose between the model's sdpa and eager attention and FlexAttention, or refuse."""
    if backend not in ("auto", *NAMES):
        raise ValueError(
            f"backend {backend!r} cannot take one mask per KV head; use 'auto', 'sdpa', 'eager' or 'flex' (flash "
            "kernels have no mask argument, and transformers' flex attention takes the mask of one head for all)."
        )
    if previous not in ("sdpa", "eager"):
        raise ValueError(
            f"the model was loaded with attn_implementation={previous!r}, which cannot take a mask per KV head. Load "
            "it with attn_implementation='sdpa' or 'eager', or call model.set_attn_implementation('sdpa') first."
        )
    if backend != "auto":
        return backend
    text: Any = text_config(model.config)
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    has_sinks = any("sinks" in dict(module.named_parameters(recurse=False)) for module in model.modules())
    supported = getattr(model, "_supports_sdpa", False)
    return "eager" if previous == "eager" or capped or has_sinks or not supported else "sdpa"
