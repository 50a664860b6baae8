"""A model small enough for a test, and sharp enough that an evicted key shows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from smdlib.testing.tokenizer import VOCABULARY


def tiny_model(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """Make a random Llama of two layers, in eval mode, that needs no download.

    Its weights are larger than those of a fresh model: attention and logits are peaked, so that losing a key changes
    the log-probs by nats. The global random generator stays as it was.

    Args:
        seed: Of the weights.
        **overrides: Fields of ``LlamaConfig``.

    Returns:
        The model, with the vocabulary of `byte_tokenizer`.

    Example:
        >>> model = tiny_model(num_hidden_layers=3)
        >>> model(torch.arange(5)[None]).logits.shape
        torch.Size([1, 5, 259])
    """
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(sizes | overrides)))
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(0, 1.4 / weight.shape[-1] ** 0.5)
    return model.eval()
