"""The language-model head of a model: what turns its last hidden states into logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from smdlib.cache.support import UnsupportedModelError, text_config
from smdlib.masks.sharding import is_distributed, run_inside, sharded_owner

T = TypeVar("T")


class LanguageHead(NamedTuple):
    """``softcap(scale * (hidden @ weight.T + bias))``.

    Attributes:
        weight: ``[V, D]``; this rank's shard of it under FSDP2, where `whole` gives the rest.
        bias: ``[V]`` or ``None``, likewise.
        scale: Factor of the logits.
        softcap: ``c`` of ``c * tanh(x / c)``, or ``None``.
        layer: The linear layer that holds weight and bias, if it is sharded.
        owner: The module that FSDP2 gathers it with.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    layer: nn.Linear | None = None
    owner: nn.Module | None = None

    def whole(self, function: Callable[[LanguageHead], T]) -> T:
        """Call ``function`` with this head, weight and bias whole; under FSDP2 on every rank.

        Args:
            function: Takes the head, returns tensors.

        Returns:
            What it returns, differentiable. Under FSDP2 the weights may be freed afterwards, and are gathered again
            for the backward pass.

        Raises:
            ValueError: if weight or bias are sharded by something else than FSDP2, or FSDP2 rounds the result.

        Example:
            >>> head = LanguageHead(torch.eye(3), None, 2.0, None)
            >>> head.whole(lambda head: head.logits(torch.ones(1, 3)))
            tensor([[2., 2., 2.]])
        """
        dtypes: list[torch.dtype] = []

        def run() -> T:
            head = self if self.layer is None else self._replace(weight=self.layer.weight, bias=self.layer.bias)
            if is_distributed(head.weight) or is_distributed(head.bias):
                raise ValueError(
                    "the head's weight is a DTensor that FSDP2 does not gather (tensor parallelism?); the losses "
                    "score with a whole head only. Shard the model with fully_shard alone."
                )
            result = function(head)
            dtypes.extend(_dtypes(result))
            return result

        result = run_inside(self.owner, run)
        if dtypes != _dtypes(result):
            raise ValueError(
                "MixedPrecisionPolicy(output_dtype=...) rounds the scores of the head; leave output_dtype out where "
                "the model and its head are sharded."
            )
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[*, V]`` of ``hidden [*, D]``."""
        logits = nn.functional.linear(hidden, self.weight, self.bias) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def language_head(model: Any) -> LanguageHead:
    """Read the head of a causal language model from its output embedding and configuration.

    Args:
        model: A transformers causal language model.

    Returns:
        The head; its tensors are the model's own, under FSDP2 this rank's shards.

    Raises:
        UnsupportedModelError: if the model has no output embedding that is a plain linear layer.
    """
    layer, config = model.get_output_embeddings(), text_config(model.config)
    if not isinstance(layer, nn.Linear):
        raise UnsupportedModelError(
            f"the head of {type(model).__name__} is {type(layer).__name__}, not a linear layer; it cannot be fused."
        )
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    softcap, owner = getattr(config, "final_logit_softcapping", None), sharded_owner(model, layer)
    return LanguageHead(layer.weight, layer.bias, scale, softcap, None if owner is None else layer, owner)


def _dtypes(values: Any) -> list[torch.dtype]:
    return [value.dtype for value in tree_leaves(values) if isinstance(value, Tensor)]


@torch.no_grad()
def check_head(model: Any, head: LanguageHead) -> None:
    """Compare the head with the model's own logits on a few tokens, so that no other transform goes unnoticed.

    Args:
        model: A transformers causal language model.
        head: What `language_head` read.

    Raises:
        UnsupportedModelError: if they differ.
    """
    # Several tokens: a padding token's embedding may be 0, and 0 passes through most transforms.
    probe = torch.linspace(0, head.weight.shape[0] - 1, 8, device=head.weight.device).long()[None]
    own = model(input_ids=probe, use_cache=False).logits.float()
    hidden = run_inside(model, lambda: model.base_model(input_ids=probe, use_cache=False).last_hidden_state)
    mine = head.whole(lambda head: head.logits(hidden)).float()
    tolerance = 5e-2 if head.weight.dtype in (torch.bfloat16, torch.float16) else 1e-3
    if own.shape != mine.shape or not bool(((own - mine).abs() <= tolerance * own.abs().max().clamp(min=1e-3)).all()):
        raise UnsupportedModelError(
            f"{type(model).__name__} computes its logits from its hidden states by more than weight, bias, logit scale "
            "and final soft-capping, so the fused head would score other distributions than the model."
        )
