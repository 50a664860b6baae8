"""Small random models of every supported family, sharp enough that evicting a key changes the logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from torch import nn

VOCAB = 97


def _common(**overrides: object) -> dict:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    } | overrides


def _llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_common()))


def _qwen2() -> nn.Module:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**_common()))


def _qwen3() -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_common(head_dim=16)))


def _qwen3_moe() -> nn.Module:
    return hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**_common(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32))
    )


def _mistral() -> nn.Module:
    return hf.MistralForCausalLM(hf.MistralConfig(**_common(sliding_window=12, head_dim=12)))


def _gemma2() -> nn.Module:
    return hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**_common(sliding_window=12, head_dim=16, query_pre_attn_scalar=16, attn_logit_softcapping=5.0))
    )


def _gemma3() -> nn.Module:
    return hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            **_common(
                sliding_window=12,
                head_dim=16,
                query_pre_attn_scalar=16,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            )
        )
    )


def _phi3() -> nn.Module:
    return hf.Phi3ForCausalLM(hf.Phi3Config(**_common()))


def _olmo2() -> nn.Module:
    return hf.Olmo2ForCausalLM(hf.Olmo2Config(**_common()))


def _gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCAB,
            n_embd=48,
            n_layer=3,
            n_head=4,
            n_positions=512,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def _gpt_neox() -> nn.Module:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_common(num_key_value_heads=None)))


def _gpt_oss() -> nn.Module:
    return hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **_common(
                head_dim=16,
                sliding_window=12,
                num_local_experts=4,
                num_experts_per_tok=2,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            )
        )
    )


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
}


def make_model(family: str, seed: int = 0) -> hf.PreTrainedModel:
    """Build a model in eval mode whose weights are large enough for peaked attention and logits."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 1.4 / weight.shape[-1] ** 0.5)
            elif "sinks" in name:
                weight.normal_(0, 1.0)
            elif name.endswith("bias"):
                weight.normal_(0, 0.1)
    return model.eval()
