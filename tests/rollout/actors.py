"""Small actors and their prompts, and the obvious way to score what they sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from smdlib.policies import make_policy
from smdlib.rollout.actor import SparseActor
from tests.families import VOCAB, make_model
from tests.sampling import POLICIES
from tests.tokenizer import VOCABULARY, byte_tokenizer


def word_tokenizer(words: int = VOCAB) -> PreTrainedTokenizerFast:
    """Words w0, w1, ... are tokens 0, 1, ...; no special tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"w{index}": index for index in range(words)}))
    )


def make_actor(
    family: str = "llama",
    policy: str | None = "snapkv",
    budget: float | int | None = 0.5,
    *,
    model: Any = None,
    tokenizer: Any = None,
    evict_every: int | None = None,
    **generate_kwargs: Any,
) -> SparseActor:
    """An actor that samples 6 tokens and never ends a row early, unless told otherwise."""
    return SparseActor(
        make_model(family) if model is None else model,
        word_tokenizer() if tokenizer is None else tokenizer,
        policy=None if policy is None else make_policy(policy, **POLICIES[policy]),
        budget=None if policy is None else budget,
        evict_every=evict_every,
        generate_kwargs={"max_new_tokens": 6, "eos_token_id": None} | generate_kwargs,
    )


def make_prompts(*lengths: int, vocab: int = VOCAB, seed: int = 0) -> list[Tensor]:
    """Random prompts without special tokens; none begins like another."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(12, vocab, (length,), generator=generator) for length in lengths]


def batch_of(prompts: Sequence[Tensor]) -> TensorDictBase:
    """Ragged rows."""
    return lazy_stack([TensorDict({("tokens", "prompt"): prompt}) for prompt in prompts])


def run(actor: SparseActor, prompts: Sequence[Tensor], seed: int = 0) -> list[TensorDictBase]:
    """Sampled rows."""
    torch.manual_seed(seed)
    return list(actor(batch_of(prompts)).unbind(0))


@torch.no_grad()
def gaps(actor: SparseActor, row: TensorDictBase, temperature: float = 1.0) -> tuple[float, float]:
    """Largest differences, in nats, of a row's log-probs to those scored alone with its record, and without it."""
    full, prompt = row["tokens", "full"], len(row["tokens", "prompt"])
    shadow = row["shadow"][None]
    differences = []
    for mask in (shadow, None):
        scored = actor.log_probs(full[None], None, mask, temperature)[0, prompt:]
        differences.append(float((scored - row["log_probs", "response"]).abs().max()))
    return differences[0], differences[1]


def byte_model(seed: int = 0) -> LlamaForCausalLM:
    """A Llama over bytes and their special tokens, with sharp attention and logits."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
        )
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(0, 1.4 / weight.shape[-1] ** 0.5)
    return model.eval()


def byte_actor(policy: str | None = "snapkv", budget: float | int = 0.5, **options: Any) -> SparseActor:
    """`make_actor` on `byte_model`."""
    options = {"model": byte_model(), "tokenizer": byte_tokenizer()} | options
    return make_actor(policy=policy, budget=budget, **options)
