"""A Llama written out from its weights: an oracle that shares no attention code with smdlib or transformers.

Every query is computed alone, on the keys that it may see: they are gathered, and there is no mask anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu
from transformers import PreTrainedModel


class PlainLlama:
    """Log-probs of one unpadded row, from the weights of a `LlamaForCausalLM`.

    Keeps what it computed on the way: ``queries`` and ``keys`` (rotated), ``values``, and ``seen_by``, attention
    weights summed over the query heads of a KV head; each one tensor a layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self.weight = dict(model.named_parameters())
        self.layers, self.pad = config.num_hidden_layers, config.pad_token_id
        self.heads, self.groups = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
        self.size = config.hidden_size // config.num_attention_heads
        self.queries: list[Tensor] = []  # [T, Hq, D]
        self.keys: list[Tensor] = []  # [T, H, D]
        self.values: list[Tensor] = []  # [T, H, D]
        self.seen_by: list[Tensor] = []  # [H, T queries, T keys]
        self.eps, self.theta = config.rms_norm_eps, config.rope_parameters["rope_theta"]

    def log_probs(self, ids: Tensor, visible: list[Tensor]) -> Tensor:
        """``log p(ids[t + 1] | ids[:t + 1])`` for every t, ``[T - 1]``; ``visible`` is bool ``[H, T, T]`` a layer."""
        # transformers gives the embedding of the pad token no gradient, even where it is sampled.
        hidden = embedding(ids, self.weight["model.embed_tokens.weight"], padding_idx=self.pad)
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            hidden = hidden + self.attention(self.norm(hidden, name + "input_layernorm"), name, visible[layer])
            normed = self.norm(hidden, name + "post_attention_layernorm")
            gate = silu(self.project(normed, name + "mlp.gate_proj"))
            hidden = hidden + self.project(gate * self.project(normed, name + "mlp.up_proj"), name + "mlp.down_proj")
        logits = self.project(self.norm(hidden, "model.norm"), "lm_head")
        return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)

    def attention(self, hidden: Tensor, name: str, visible: Tensor) -> Tensor:
        query, key, value = (
            self.project(hidden, f"{name}self_attn.{kind}_proj").unflatten(-1, (-1, self.size)) for kind in "qkv"
        )
        query, key = self.rotate(query), self.rotate(key)
        outputs, seen_by = [], torch.zeros(visible.shape)
        for q in range(len(hidden)):
            for head in range(self.heads):
                seen = visible[head, q].nonzero().squeeze(-1)
                keys, values = key[seen, head], value[seen, head]
                for group in range(self.groups):
                    logits = keys @ query[q, head * self.groups + group] / self.size**0.5
                    weights = logits.softmax(-1)
                    seen_by[head, q, seen] += weights.detach()
                    outputs.append(weights @ values)
        for kept, computed in ((self.queries, query), (self.keys, key), (self.values, value), (self.seen_by, seen_by)):
            kept.append(computed.detach())
        return self.project(torch.stack(outputs).view(len(hidden), -1), name + "self_attn.o_proj")

    def rotate(self, x: Tensor) -> Tensor:
        """Turn the pairs ``(i, i + D / 2)`` of ``x [T, heads, D]`` by ``position * theta ** (-2 i / D)``."""
        rates = self.theta ** (-torch.arange(0, self.size, 2) / self.size)
        angle = torch.arange(len(x))[:, None, None] * rates
        first, second = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight[name + ".weight"]

    def project(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weight[name + ".weight"])
