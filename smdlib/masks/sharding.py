"""Parameters sharded by FSDP2 (``torch.distributed.fsdp.fully_shard``), used outside a module's own forward.

FSDP2 gathers a module's parameters before its forward, and reduces their gradients over ranks after its backward. The
losses run the model without its head, and the head in blocks of their own. Both run here as if they were the forward
of the module that owns the parameters, so FSDP2 gathers, frees and reduces by its own settings and nothing is done
twice. Without FSDP2 nothing here imports ``torch.distributed``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

_METHOD = "_smdlib_run"


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on the module.

    Example:
        >>> is_sharded(nn.Linear(2, 2))
        False
    """
    # Who never imported FSDP2 has sharded nothing.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def is_distributed(tensor: Tensor | None) -> bool:
    """Whether this is a ``DTensor``, of which a rank holds a part."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def run_inside(module: nn.Module | None, function: Callable[[], T]) -> T:
    """Run ``function`` as if it were the forward of ``module``, with its parameters whole.

    Every rank has to do so, in the same order. Gradients flow through the tensors of the result.

    Args:
        module: A module that ``fully_shard`` was called on; for others the function is just called.
        function: Reads the parameters from their modules, since FSDP2 exchanges them there.

    Returns:
        What the function returns.

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> run_inside(layer, lambda: layer.weight.shape)
        torch.Size([3, 2])
    """
    if module is None or not is_sharded(module):
        return function()
    if _METHOD not in module.__dict__:
        from torch.distributed.fsdp import register_fsdp_forward_method

        setattr(module, _METHOD, _call)
        register_fsdp_forward_method(module, _METHOD)
    return getattr(module, _METHOD)(function)


def _call(function: Callable[[], Any]) -> Any:
    return function()


def sharded_owner(model: nn.Module, layer: nn.Module) -> nn.Module | None:
    """Find the module whose forward gathers the parameters of ``layer``: the closest around it that is sharded.

    Args:
        model: A model.
        layer: One of its modules.

    Returns:
        The module, or ``None`` without FSDP2.
    """
    path = next(name for name, module in model.named_modules() if module is layer)
    while True:
        module = model.get_submodule(path)
        if is_sharded(module):
            return module
        if not path:
            return None
        path = path.rpartition(".")[0]


def agree(module: nn.Module, mine: bool) -> bool:
    """Whether all ranks that share the parameters of ``module`` say so; FSDP2 hangs where ranks run other passes.

    Args:
        module: A model.
        mine: This rank's answer.

    Example:
        >>> agree(nn.Linear(2, 2), True)
        True
    """
    if not is_sharded(module):
        return mine
    import torch.distributed as dist

    flag = torch.tensor(int(mine), device=next(module.parameters()).device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def check_sharding(adapter: nn.Module, model: nn.Module) -> None:
    """Refuse a model of which only a part is sharded: nobody would reduce the gradients of the rest.

    Args:
        adapter: The adapter around the model.
        model: The model.

    Raises:
        ValueError: if ``fully_shard`` was called on parts of the model, or on the adapter, but not on the model.
    """
    if is_sharded(model):
        return
    if is_sharded(adapter) or any(is_sharded(module) for module in model.modules()):
        raise ValueError(
            f"fully_shard was called on the adapter or on parts of the {type(model).__name__}, but not on the model "
            "itself, so the embedding and the head would not be gathered, or their gradients not be reduced over "
            "ranks. Call fully_shard on the layers and then on the whole model: fully_shard(adapter.model)."
        )
