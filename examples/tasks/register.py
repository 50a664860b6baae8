"""A task for RL on a laptop's CPU: find one code in a register of offices.

A prompt is a chat. Its first turn holds the register, one line ``name: code`` per office, and two questions are
answered in the form of such a line before the last one is asked. The form matters: repeating the name leads a small
model to the code; with the bare code as an answer SmolLM2-135M found 1 of 12. The answer stands in the prompt once, as
one of 30 codes.

The question stands inside the prompt, at its end, so a policy that scores keys by the last queries (SnapKV) knows what
is asked before it evicts. That is the mild case: how well keys are chosen *without* the question is not tested here.

Before training, SmolLM2-135M-Instruct (float32) earns on 64 rows of ``make_rows(64, seed=1)``, 421 to 434 tokens long:

============  ======  ===============  =================
keys kept     greedy  temperature 0.7  temperature 1
============  ======  ===============  =================
all           .48     .27 (128)        .24 (128 samples)
SnapKV 50 %   .39     .33 (256)        .23 (512)
Random 50 %   .00                      .00 (64)
============  ======  ===============  =================

At temperature 1 under SnapKV, 56 % of the groups of 8 hold both right and wrong answers; a response has 11 tokens on
average, and 43 / 90 / 97 % end within 10 / 12 / 16.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

from transformers import BatchEncoding, PreTrainedTokenizerBase

FIRST_NAMES = """
Adam Alma Anna Boris Bruno Clara Daniel Diana Elena Emil Felix Greta Hanna Helen Henrik Hugo Ida Igor Ingrid Irene Jonas
Julia Karin Laura Leo Maria Marek Martin Nina Nora Oscar Paula Pavel Robert Rosa Simon Sofia Stefan Tomas Viktor
""".split()
LAST_NAMES = """
Becker Berg Brandt Carter Costa Duval Fischer Grant Hall Hansen Hughes Keller Larsen Lindgren Lopez Meyer Moreau Murphy
Nilsson Novak Olsen Ortiz Petrov Reyes Romano Rossi Sato Silva Stone Vogel Walsh Weber
""".split()
QUESTION = "Which code opens the office of {name}?"
# A run of letters and digits with a digit in it; what joins two of them makes one longer value.
CODE = re.compile(r"\w*\d\w*(?:[.,:/-]\w*\d\w*)*")


def make_rows(count: int, seed: int, lines: int = 30, shots: int = 2) -> list[dict]:
    """Makes prompts, the same ones for the same arguments.

    Within a register no first name, last name or code occurs twice. Two seeds give two splits: that they have no
    register in common is not checked, but their number (about 1e170) leaves no doubt, and the tests look.

    Args:
        count: of rows.
        seed: of everything that is drawn.
        lines: offices in the register, at most 32.
        shots: questions that the prompt answers before it asks its own, at least 1.

    Returns:
        Rows with ``prompt``, a list of chat messages, and the texts ``name`` and ``answer``.

    Raises:
        ValueError: for more lines than names, or no office left to ask for.

    Example:
        >>> row = make_rows(1, seed=0, lines=4)[0]
        >>> [message["content"] for message in row["prompt"][2:]], row["answer"]
        (['Which code opens the office of Leo Weber?', 'Leo Weber: 6866', 'Which code opens the office of Ida Walsh?'],
         '3281')
    """
    most = min(len(FIRST_NAMES), len(LAST_NAMES))
    if not 1 <= shots < lines <= most:
        raise ValueError(f"1 <= shots < lines <= {most} needed, not shots={shots}, lines={lines}")
    rng = random.Random(seed)
    return [_make_row(rng, lines, shots) for _ in range(count)]


def _make_row(rng: random.Random, lines: int, shots: int) -> dict:
    names = zip(rng.sample(FIRST_NAMES, lines), rng.sample(LAST_NAMES, lines), strict=True)
    codes = rng.sample(range(1000, 10_000), lines)
    register = {f"{first} {last}": str(code) for (first, last), code in zip(names, codes, strict=True)}
    *shown, name = rng.sample(list(register), shots + 1)
    prompt = []
    for other in shown:
        prompt.append({"role": "user", "content": QUESTION.format(name=other)})
        prompt.append({"role": "assistant", "content": f"{other}: {register[other]}"})
    prompt.append({"role": "user", "content": QUESTION.format(name=name)})
    listed = "\n".join(f"{name}: {code}" for name, code in register.items())
    prompt[0]["content"] = f"Access codes of the offices:\n\n{listed}\n\n{prompt[0]['content']}"
    return {"prompt": prompt, "name": name, "answer": register[name]}


def build_prompts(rows: Sequence[Mapping], tokenizer: PreTrainedTokenizerBase) -> BatchEncoding:
    """Renders rows with the model's chat template, up to where the assistant's answer starts.

    Returns:
        ``input_ids`` and ``attention_mask``, int64 ``[B, T]``, padded on the left.
    """
    texts = [
        str(tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)) for row in rows
    ]
    # The template has written every special token; a second start token would shift the prompt.
    return tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")


def reward(response: str, row: Mapping) -> float:
    """Returns 1 if the first code in the response is the answer, else 0.

    Only the first value with a digit in it counts, whole: listing codes, running digits together or going on after a
    wrong one earns nothing. There is no credit for single digits, which a policy could collect with likely digits.
    Guessing blindly one of 30 listed codes earns 1/30.

    Args:
        response: decoded without special tokens.
        row: with the ``answer``.

    Example:
        >>> [reward(text, {"answer": "7294"}) for text in ("Maria Keller: 7294", "7294.", "1111 7294", "7294, 1111")]
        [1.0, 1.0, 0.0, 1.0]
        >>> [reward(text, {"answer": "7294"}) for text in ("72941", "7294-1111", "7.294", "")]
        [0.0, 0.0, 0.0, 0.0]
    """
    first = CODE.search(response)
    return float(first is not None and first.group() == row["answer"])
