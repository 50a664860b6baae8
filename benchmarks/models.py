"""Models of the usual shapes with random weights; the vocabulary is small where the head costs both sides the same."""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES: dict[str, dict[str, Any]] = {
    # 3 query heads on each KV head, as SmolLM2-135M.
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    # 2 on each.
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    # As many KV heads as query heads.
    "mha": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
    },
    # The KV cache of Qwen3-4B, 147,456 bytes a token in bfloat16 over 36 layers; the rest of the model is small.
    "qwen3-4b-kv": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    # For tests.
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}


def add_model_arguments(parser: argparse.ArgumentParser, *, layers: int, vocabulary: int = 4096) -> None:
    """Arguments that every script takes."""
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--vocabulary", type=int, default=vocabulary)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])


def make_model(shape: str, args: argparse.Namespace) -> LlamaForCausalLM:
    """Build a random Llama of a shape, in eval mode."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        num_hidden_layers=args.layers,
        max_position_embeddings=65536,
        **SHAPES[shape],
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(args.device, getattr(torch, args.dtype)).eval()


def plain_twin(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same weights without an adapter: what a peer runs. Call it before an adapter is installed."""
    twin: Any = type(model)(copy.deepcopy(model.config))
    twin = twin.to(model.device, model.dtype).eval()
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin


def token_bytes(model: Any) -> int:
    """Bytes of the keys and values of one token in all layers."""
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values in a cache of any kind."""
    if hasattr(cache, "kv_bytes"):
        return cache.kv_bytes()
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
