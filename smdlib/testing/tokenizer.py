"""A tokenizer of single bytes with a chat template, made without any download."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = 256, 257, 258
VOCABULARY = 259
_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def byte_tokenizer(pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    r"""Make a tokenizer with one token per byte and a chat template, for tests and examples.

    Ids 0 to 255 are bytes (sorted by byte-level letter), ``<s>`` is 256, ``</s>`` 257 and ``<pad>`` 258.

    Args:
        pad_is_eos: Pad with ``</s>``, as many pretrained tokenizers do.

    Returns:
        The tokenizer; `tiny_model` has its vocabulary.

    Example:
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer("Hi!")["input_ids"], len(tokenizer)
        ([39, 72, 0], 259)
        >>> tokenizer.apply_chat_template([{"role": "user", "content": "Hi!"}], tokenize=False)
        '<s>user\nHi!</s>'
    """
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>" if pad_is_eos else "<pad>"
    )
    wrapped.chat_template = _TEMPLATE
    return wrapped
