"""Which model architectures keep the promise, and the words in which the others are refused."""

from __future__ import annotations

from typing import Any

from torch import nn

_LINEAR_LAYERS = ("linear_attention", "conv", "mamba", "recurrent", "ssm", "hybrid", "hybrid_sliding")
_ATTENTION_LAYERS = ("full_attention", "attention", "sliding_attention", "chunked_attention")


class UnsupportedModelError(ValueError):
    """The model's attention cannot be evicted and replayed exactly; the message says why."""


def text_config(config: Any) -> Any:
    """Return the decoder's own configuration, also of a multimodal one.

    Args:
        config: A transformers ``PreTrainedConfig``.

    Returns:
        The configuration that holds ``num_hidden_layers`` and the head counts.

    Raises:
        TypeError: if ``config`` is not a transformers configuration.

    Example:
        >>> from transformers import LlamaConfig
        >>> text_config(LlamaConfig(num_hidden_layers=2)).num_hidden_layers
        2
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(
            f"config must be a transformers configuration such as model.config, not {type(config).__name__}."
        )
    return config.get_text_config(decoder=True)


def check_supported(config: Any) -> None:
    """Refuse configurations whose attention smdlib cannot replay exactly.

    Args:
        config: A transformers ``PreTrainedConfig`` (the text part of it is looked at).

    Raises:
        UnsupportedModelError: for encoder-decoder models, multi-head latent attention, linear-attention
            or state-space layers, layers that share their keys, and bidirectional decoders.

    Example:
        >>> from transformers import LlamaConfig
        >>> check_supported(LlamaConfig())
    """
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; smdlib evicts keys of decoder-only models.")
    text = text_config(config)
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"{name} uses multi-head latent attention (kv_lora_rank={text.kv_lora_rank}): its cache holds compressed "
            "latents instead of keys per head, so a mask per KV head does not describe it."
        )
    layer_types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    foreign = sorted({kind for kind in layer_types if kind not in _ATTENTION_LAYERS})
    if foreign:
        what = "linear-attention or state-space" if set(foreign) & set(_LINEAR_LAYERS) else "unknown"
        raise UnsupportedModelError(
            f"{name} mixes in {what} layers {foreign}: their state cannot forget one key, so eviction has no exact "
            f"mask there. Supported layer types: {list(_ATTENTION_LAYERS)}."
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(
            f"{name} shares keys between layers (num_kv_shared_layers={text.num_kv_shared_layers}); "
            "a record per layer does not describe that."
        )
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", False) is True:
        raise UnsupportedModelError(f"{name} attends in both directions; eviction is defined for causal decoding only.")
    if not getattr(text, "num_hidden_layers", None):
        raise UnsupportedModelError(
            f"{name} does not say num_hidden_layers, so its attention layers cannot be counted."
        )


def num_kv_heads(config: Any) -> int:
    """Return the number of KV heads of a layer.

    Args:
        config: A transformers ``PreTrainedConfig``.

    Returns:
        ``num_key_value_heads``, or the number of attention heads where keys are not shared.

    Example:
        >>> from transformers import GPT2Config
        >>> num_kv_heads(GPT2Config(n_head=4))
        4
    """
    text = text_config(config)
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def refuse_dropout(config: Any, doing: str) -> None:
    """Refuse dropout where the same forward pass has to be repeated.

    Args:
        config: A transformers ``PreTrainedConfig`` of a model in train mode.
        doing: What was attempted, for the message.

    Raises:
        ValueError: if any dropout probability is above zero.

    Example:
        >>> from transformers import GPT2Config
        >>> refuse_dropout(GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.1), "sampling")
        Traceback (most recent call last):
        ...
        ValueError: sampling in train mode with dropout ...
    """
    text = text_config(config)
    rates = {
        name: rate
        for name, rate in text.to_dict().items()
        if any(word in name for word in ("dropout", "pdrop", "layerdrop", "jitter_noise"))
        and isinstance(rate, float)
        and rate > 0
    }
    # Heads that a causal language model does not run.
    rates = {name: rate for name, rate in rates.items() if "classifier" not in name and "summary" not in name}
    if rates:
        raise ValueError(
            f"{doing} in train mode with dropout ({rates}) cannot be repeated exactly: every pass drops other units. "
            "Call model.eval(), or set these probabilities to 0 in the configuration."
        )


def rope_limit(config: Any) -> int | None:
    """Number of tokens up to which the rotary embedding of a token does not depend on the length of its sequence.

    Args:
        config: A transformers ``PreTrainedConfig``.

    Returns:
        The limit for rotary embeddings that change with the length ("dynamic", "longrope"), ``None`` for all others.

    Example:
        >>> from transformers import LlamaConfig
        >>> rope_limit(LlamaConfig()) is None
        True
    """
    text = text_config(config)
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    limits = []
    for kind in kinds:
        if kind.get("rope_type") == "dynamic":
            limits.append(text.max_position_embeddings)
        if kind.get("rope_type") == "longrope":
            original = kind.get("original_max_position_embeddings")
            limits.append(original or getattr(text, "original_max_position_embeddings", text.max_position_embeddings))
    return min(limits, default=None)


def refuse_active_dropout(model: nn.Module, doing: str) -> None:
    """Refuse dropout modules that are active, whatever the configuration says (adapters bring their own).

    Args:
        model: The model.
        doing: What was attempted, for the message.

    Raises:
        ValueError: if a dropout module is in train mode with a probability above zero.

    Example:
        >>> refuse_active_dropout(nn.Sequential(nn.Dropout(0.1)).eval(), "sampling")
    """
    active = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
    ]
    if active:
        raise ValueError(
            f"{doing} with active dropout ({active[0]} and {len(active) - 1} more) cannot be repeated exactly: every "
            "pass drops other units. Call model.eval()."
        )
