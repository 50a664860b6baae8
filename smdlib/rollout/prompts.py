"""Prompts and further turns of a conversation as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

# Stands for a response while a further turn is rendered; no template changes it.
_RESPONSE = "SMDLIB0RESPONSE"


@dataclass(frozen=True)
class ChatTokens:
    r"""Renders prompts with a tokenizer's chat template, and appends further turns without touching earlier tokens.

    A tokenizer without a template gives the plain tokens of a text; it takes no system prompt and no messages.

    Args:
        tokenizer: Any transformers tokenizer.
        system_prompt: Put before every prompt.
        template_kwargs: More options of ``apply_chat_template``, such as ``{"enable_thinking": False}``.

    Raises:
        ValueError: for options of a template that the tokenizer does not have.

    Example:
        >>> from smdlib.testing import byte_tokenizer
        >>> chat = ChatTokens(byte_tokenizer(), system_prompt="Be brief.")
        >>> chat.tokenizer.decode(chat.prompt("Why?"))
        '<s>system\nBe brief.</s><s>user\nWhy?</s><s>assistant\n'
        >>> chat.tokenizer.decode(chat.further("Because.</s>", "Really?"))
        '<s>user\nReally?</s><s>assistant\n'
    """

    tokenizer: PreTrainedTokenizerBase
    system_prompt: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.templated and (self.system_prompt is not None or self.template_kwargs):
            raise ValueError(
                "system_prompt and template_kwargs go through a chat template, and this tokenizer has none; set "
                "tokenizer.chat_template, or write the text into the prompt column."
            )

    @property
    def templated(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def prompt(self, value: str | Sequence[Mapping[str, str]]) -> Tensor:
        """Tokenise a prompt up to where the response starts.

        Args:
            value: A text, which becomes the user's message, or a list of messages with ``role`` and ``content``.

        Returns:
            int64 ``[P]``, P at least 1.

        Raises:
            ValueError: for an empty prompt, or messages where none can be.
            TypeError: for anything else.
        """
        messages = _messages(value)
        if not self.templated:
            if not isinstance(value, str):
                raise ValueError(
                    "the prompt is a list of messages, and this tokenizer has no chat template; set "
                    "tokenizer.chat_template, or make the prompt one text."
                )
            return self._ids(value, special=True)
        if self.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise ValueError("the prompt starts with a system message of its own; leave out system_prompt.")
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        # The template writes every special token itself: the tokenizer must not add another start token.
        return self._ids(self._render(messages), special=False)

    def further(self, response: Tensor | str, message: str) -> Tensor:
        """Tokenise what follows a response: the end of its turn, the user's next message, the start of the next turn.

        Only what follows is tokenised, never the response: its sampled tokens stay as they are.

        Args:
            response: int64 ``[R]``, or a text. If it has ended with a token that ends the turn, that is not repeated.
            message: The user's next message.

        Returns:
            int64 ``[K]``, to be appended to the response.

        Raises:
            ValueError: for an empty message, or a template that does not show earlier responses.
        """
        if not isinstance(message, str) or not message.strip():
            raise ValueError(f"the next message is {message!r}; expected a text that is not blank, or None to end.")
        if not self.templated:
            return self._ids(message, special=False)
        turns = [("user", "?"), ("assistant", _RESPONSE), ("user", message)]
        text = self._render([{"role": role, "content": content} for role, content in turns])
        _, found, rest = text.partition(_RESPONSE)
        if not found:
            raise ValueError("the chat template leaves out earlier responses, so a further turn cannot be appended.")
        ids = self._ids(rest, special=False)
        sampled = self._ids(response, special=False) if isinstance(response, str) else response
        # The template's end of turn may be more than one token; the sampled one may be the last of them.
        end = next((index for index, token in enumerate(ids.tolist()) if token in self._special()), None)
        if end is not None and len(sampled) and sampled[-1] == ids[end]:
            return ids[end + 1 :]
        return ids

    def _render(self, messages: list[dict[str, str]]) -> str:
        options: dict[str, Any] = {"add_generation_prompt": True} | dict(self.template_kwargs)
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def _special(self) -> set[int]:
        # Some tokenizers name only some of their special tokens in all_special_ids.
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {index for index, token in added.items() if token.special} | set(self.tokenizer.all_special_ids)

    def _ids(self, text: str, special: bool) -> Tensor:
        ids = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)


def _messages(value: Any) -> list[dict[str, str]]:
    """Check a prompt and return it as messages."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"the prompt is {value!r}; expected a text that is not blank.")
        return [{"role": "user", "content": value}]
    if not isinstance(value, Sequence) or not all(isinstance(message, Mapping) for message in value):
        raise TypeError(f"the prompt is {value!r}; expected a text or a list of messages with role and content.")
    if not value:
        raise ValueError("the prompt is an empty list; expected at least one message.")
    for message in value:
        wrong = [key for key in ("role", "content") if not isinstance(message.get(key), str)]
        if wrong:
            raise TypeError(f"the message {dict(message)!r} has no text at {wrong}; expected role and content.")
    if not value[-1]["content"].strip():
        raise ValueError("the prompt's last message is blank; expected a text.")
    return [dict(message) for message in value]
