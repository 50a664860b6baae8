"""The student of the study: a Llama of about 0.9 million parameters over a task's own vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .tasks import Task


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; query heads share KV heads two by two."""

    hidden: int = 128
    feed_forward: int = 384
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2


def make_model(task: Task, shape: Shape, seed: int) -> LlamaForCausalLM:
    """Return a fresh model; the global random generator stays as it was."""
    config = LlamaConfig(
        vocab_size=len(task.vocabulary),
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def make_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words, so that prompts and responses can be read."""
    words = {word: index for index, word in enumerate(task.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=task.vocabulary[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
