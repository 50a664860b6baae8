"""The language-model head of a model: what turns its last hidden states into logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smdlib.cache.support import UnsupportedModelError, text_config


class LanguageHead(NamedTuple):
    """``softcap(scale * (hidden @ weight.T + bias))``.

    Attributes:
        weight: ``[V, D]``.
        bias: ``[V]`` or ``None``.
        scale: Factor of the logits.
        softcap: ``c`` of ``c * tanh(x / c)``, or ``None``.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[*, V]`` of ``hidden [*, D]``."""
        logits = nn.functional.linear(hidden, self.weight, self.bias) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def language_head(model: Any) -> LanguageHead:
    """Read the head of a causal language model from its output embedding and configuration.

    Args:
        model: A transformers causal language model.

    Returns:
        The head; its tensors are the model's own.

    Raises:
        UnsupportedModelError: if the model has no output embedding that is a plain linear layer.
    """
    layer, config = model.get_output_embeddings(), text_config(model.config)
    if not isinstance(layer, nn.Linear):
        raise UnsupportedModelError(
            f"the head of {type(model).__name__} is {type(layer).__name__}, not a linear layer; it cannot be fused."
        )
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return LanguageHead(layer.weight, layer.bias, scale, getattr(config, "final_logit_softcapping", None))


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
    hidden = model.base_model(input_ids=probe, use_cache=False).last_hidden_state
    mine = head.logits(hidden).float()
    tolerance = 5e-2 if head.weight.dtype in (torch.bfloat16, torch.float16) else 1e-3
    if own.shape != mine.shape or not bool(((own - mine).abs() <= tolerance * own.abs().max().clamp(min=1e-3)).all()):
        raise UnsupportedModelError(
            f"{type(model).__name__} computes its logits from its hidden states by more than weight, bias, logit scale "
            "and final soft-capping, so the fused head would score other distributions than the model."
        )
