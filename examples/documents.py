"""The demo's task: read a document of about 300 tokens, answer one question with a value that stands in it."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

from datasets import Dataset
from transformers import BatchEncoding, PreTrainedTokenizerBase

DOCUMENTS = Path(__file__).parent / "data" / "documents.jsonl"
FIELDS = ("id", "document", "question", "answer")

PROMPT = """Read the document and answer the question with the value only.

Document: {document}

Question: {question}
Answer:"""


def load_documents(path: str | Path | None = None) -> Dataset:
    """Loads documents with a question and its answer.

    Args:
        path: a file with one JSON object a line, with the texts ``id``, ``document``, ``question`` and ``answer``;
            ``None`` is the file that ships with the examples.

    Example:
        >>> load_documents().column_names
        ['id', 'document', 'question', 'answer']
    """
    # The JSON reader of `datasets` guesses types: an answer that looks like a date would come back as another text.
    with Path(path or DOCUMENTS).open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return Dataset.from_list([{field: str(row[field]) for field in FIELDS} for row in rows])


def build_prompts(rows: Iterable[Mapping[str, str]], tokenizer: PreTrainedTokenizerBase) -> BatchEncoding:
    """Renders rows with the model's chat template, up to where the assistant's answer starts.

    Returns:
        ``input_ids`` and ``attention_mask``, int64 ``[B, T]``, padded on the left.
    """
    chats = [[{"role": "user", "content": PROMPT.format(**row)}] for row in rows]
    texts = [str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)) for chat in chats]
    # The template has written every special token; a second start token would shift the prompt.
    return tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")


def reward(completion: str, answer: str) -> float:
    """Returns 1 if the completion contains the answer as whole words, else 0.

    This is plain accuracy, with nothing for style: a small model mostly answers in a sentence, so the words around the
    value neither help nor hurt. A completion that lists many values would be paid as well; what keeps that out is a
    short limit on the new tokens, not this function.

    Args:
        completion: decoded without special tokens.
        answer: the value, without a unit.

    Raises:
        ValueError: if the answer has no letter or digit.

    Example:
        >>> reward("The access code of room 214 is **7731**.", "7731")
        1.0
        >>> reward("17731", "7731")
        0.0
    """
    said, wanted = normalise(completion), normalise(answer)
    if not wanted:
        raise ValueError(f"The answer {answer!r} has no letter or digit, so it cannot be checked")
    starts = range(len(said) - len(wanted) + 1)
    return float(any(said[start : start + len(wanted)] == wanted for start in starts))


def normalise(text: str) -> list[str]:
    """Splits a text into words, leaving out what may differ between two spellings of one value.

    That is: case, Unicode variants, the separator of thousands, hyphens inside a word, the punctuation around it, and a
    possessive ending. What makes a different value stays: a minus sign, a decimal point, a colon.

    Example:
        >>> normalise("“Kestrel Mill’s” KF-2087 costs 2,380 euros at 9:40.")
        ['kestrel', 'mill', 'kf', '2087', 'costs', '2380', 'euros', 'at', '9:40']
    """
    text = unicodedata.normalize("NFKC", text).casefold()
    text = "".join("-" if unicodedata.category(char) == "Pd" or char == "\N{MINUS SIGN}" else char for char in text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<=\w)-(?=\w)", " ", text)
    words = (re.sub(r"^(?:(?!-\d)[\W_])+|(?:['’]s)?[\W_]*$", "", word) for word in text.split())
    return [word for word in words if word]
