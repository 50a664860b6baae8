"""The recipes on hand-made rows of each schema: prompts and rewards by value, from JSONL and from Parquet."""

from __future__ import annotations

import datetime
import doctest
import importlib
import json
import pickle
import sys
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.recipes import GOVREPORT, GSM8K, HOTPOTQA, RECIPES, TLDR
from examples.recipes.gsm8k import last_number
from examples.recipes.hotpotqa import contains, exact_match, f1
from examples.recipes.rouge import rouge_l
from smdlib.rollout.environment import dataset_env
from tests.rollout.policies import Echo
from tests.tokenizer import byte_tokenizer

ROWS = {
    "gsm8k": [{"question": "Two eggs at $9?", "answer": "2 * 9 = <<2*9=18>>18\n#### 18"}],
    "hotpotqa": [
        {
            "id": "5a",
            "question": "When was it signed?",
            "answer": "2024-05-01",
            "type": "bridge",
            "level": "hard",
            "supporting_facts": {"title": ["Treaty"], "sent_id": [0]},
            "context": {"title": ["Treaty", "Town"], "sentences": [["It was signed", " in 2024."], ["A town."]]},
        }
    ],
    "tldr": [{"prompt": "SUBREDDIT: r/x\n\nPOST: I lost my cat.\n\nTL;DR:", "completion": " Lost my cat."}],
    "govreport": [{"report": "Roads are long.\n", "summary": "Long roads."}],
}
PROMPTS = {
    "gsm8k": "Two eggs at $9?\n\nThink step by step, and end with a line '#### ' and the number.",
    "hotpotqa": "Treaty: It was signed in 2024.\n\nTown: A town.\n\nQuestion: When was it signed?\n"
    "Answer with the answer only, without a sentence.",
    "tldr": "SUBREDDIT: r/x\n\nPOST: I lost my cat.\n\nSummarise this post in one or two sentences.",
    "govreport": "Roads are long.\n\nSummarise this report in a few paragraphs.",
}
PERFECT = {"gsm8k": "18", "hotpotqa": "2024-05-01", "tldr": "Lost my cat.", "govreport": "Long roads."}


def write(folder: Path, kind: str, rows: list[dict]) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n", encoding="utf-8")
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", RECIPES)
def test_rows_and_prompts(tmp_path, name, kind):
    recipe = RECIPES[name]
    (row,) = list(recipe.load(write(tmp_path, kind, ROWS[name])))
    names = [column if isinstance(column, str) else column[0] for column in recipe.columns]
    assert row == {key: ROWS[name][0][key] for key in names} | {"prompt": PROMPTS[name]}
    assert recipe.reward(PERFECT[name], row) == 1.0
    assert recipe.reward("", row) == 0.0


def test_every_recipe_runs_in_the_environment(tmp_path):
    for name, recipe in RECIPES.items():
        data = recipe.load(write(tmp_path, "jsonl", ROWS[name]))
        env = dataset_env(data, byte_tokenizer(), recipe.reward, prompts=1, group=2, system_prompt=recipe.system_prompt)
        pickle.dumps(env)
        row = env.rollout(1, Echo())[0, 0]
        response = byte_tokenizer().decode(row["tokens", "response"], skip_special_tokens=True)
        assert row["next", "reward"].item() == pytest.approx(recipe.reward(response, data[0]))


@pytest.mark.parametrize(("stored", "text"), [(datetime.date(2024, 5, 1), "2024-05-01"), (7, "7"), ("007", "007")])
def test_answers_stay_texts(tmp_path, stored, text):
    row = ROWS["hotpotqa"][0] | {"answer": stored}
    assert HOTPOTQA.load(write(tmp_path, "parquet", [row]))[0]["answer"] == text
    if not isinstance(stored, datetime.date):
        assert HOTPOTQA.load(write(tmp_path, "jsonl", [row]))[0]["answer"] == text


def test_the_other_name_of_a_summary(tmp_path):
    path = write(tmp_path, "jsonl", [{"prompt": "A post. TL;DR:", "label": "Post."}])
    assert TLDR.load(path)[0] == {
        "prompt": "A post.\n\nSummarise this post in one or two sentences.", "completion": "Post."
    }  # fmt: skip


def test_hub_ids_and_configurations(monkeypatch):
    module, asked = sys.modules["examples.recipes.recipe"], []

    def fake(name, config, split):
        asked.append((name, config, split))
        return ROWS["gsm8k"]

    monkeypatch.setattr(module, "load_dataset", fake)
    GSM8K.load()
    GSM8K.load("me/mine", split="test")
    assert asked == [("openai/gsm8k", "main", "train"), ("me/mine", None, "test")]


def test_errors(tmp_path):
    with pytest.raises(ValueError, match=r"row 1 has no answer; GSM8K needs it, and got \['question'\]"):
        GSM8K.load(write(tmp_path, "jsonl", [*ROWS["gsm8k"], {"question": "?"}]))
    with pytest.raises(ValueError, match="completion or label"):
        TLDR.load(write(tmp_path, "jsonl", [{"prompt": "?"}]))
    with pytest.raises(ValueError, match="no rows"):
        GSM8K.load(write(tmp_path, "jsonl", []))
    with pytest.raises(FileNotFoundError):
        GSM8K.load(tmp_path / "none.jsonl")
    (tmp_path / "rows.csv").write_text("question,answer\n")
    with pytest.raises(ValueError, match="jsonl"):
        GSM8K.load(tmp_path / "rows.csv")
    with pytest.raises(ValueError, match="does not end in"):
        GSM8K.reward("1", {"answer": "1"})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 18.", "18"),
        ("#### 1,234,567", "1234567"),
        ("$1,234.50 in all", "1234.50"),
        ("-5", "-5"),
        ("minus: -$5", "-5"),
        ("$-5.25", "-5.25"),
        ("\N{MINUS SIGN}3", "-3"),
        ("10-5", "5"),
        ("(2)-1", "1"),
        ("a .5 share", "0.5"),
        ("first 3, then 4", "4"),
        ("**72**", "72"),
        ("x = 7%", "7"),
        ("12,34", "34"),
        ("1,2345", "2345"),
        ("2.0", "2"),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == Decimal(number)
    assert GSM8K.reward(text, {"answer": f"so #### {number}"}) == 1.0
    assert GSM8K.reward(text, {"answer": f"so #### {Decimal(number) + 1}"}) == 0.0


@given(st.integers(-(10**9), 10**9))
def test_every_whole_number_is_read(value):
    for text in (f"It is {value}.", f"It is {value:,} dollars", f"${value:,}.00"):
        assert last_number(text) == value


def test_no_number():
    assert last_number("none at all") is None
    assert GSM8K.reward("none at all", {"answer": "#### 0"}) == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "exact", "part", "score"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1, 1, 1),
        ("It is the Eiffel Tower.", "Eiffel Tower", 0, 1, 2 * 2 / (4 + 2)),
        ("Tower of Eiffel", "Eiffel Tower", 0, 0, 2 * 2 / (3 + 2)),
        ("Eiffel Towers", "Eiffel Tower", 0, 0, 2 * 1 / (2 + 2)),
        ("yes", "Yes.", 1, 1, 1),
        ("yes it is", "yes", 0, 1, 0),
        ("no", "no way", 0, 0, 0),
        ("", "Paris", 0, 0, 0),
        ("anything", "The", 0, 0, 0),
        ("big big big", "big city", 0, 0, 2 * 1 / (3 + 2)),
    ],
)
def test_answers_of_words(response, answer, exact, part, score):
    row = {"answer": answer}
    assert exact_match(response, row) == exact
    assert contains(response, row) == part
    assert f1(response, row) == pytest.approx(score)


def lcs(left: list, right: list) -> int:
    """Length of the longest common subsequence, by its recursion."""
    if not left or not right:
        return 0
    if left[-1] == right[-1]:
        return 1 + lcs(left[:-1], right[:-1])
    return max(lcs(left[:-1], right), lcs(left, right[:-1]))


words = st.lists(st.sampled_from(["cat", "cats", "sat", "Mat", "on"]), max_size=6)


@given(words, words)
def test_rouge_is_that_of_the_longest_common_subsequence(said, wanted):
    common = lcs([word.lower() for word in said], [word.lower() for word in wanted])
    expected = 0.0 if not common else 2 * common / (len(said) + len(wanted))
    response, reference = ", ".join(said), " ".join(wanted)
    assert rouge_l(response, reference) == pytest.approx(expected)
    assert GOVREPORT.reward(response, {"summary": reference}) == pytest.approx(expected)
    excess = min(1, max(0, len(said) / max(1, len(wanted)) - 1))
    assert TLDR.reward(response, {"completion": reference}) == pytest.approx(expected - 0.2 * excess)


@pytest.mark.parametrize("name", ["gsm8k", "hotpotqa", "rouge", "tldr"])
def test_docstring_examples(name):
    failed, tried = doctest.testmod(importlib.import_module(f"examples.recipes.{name}"))
    assert tried and not failed


def test_scripts_in_the_examples_folder_may_import_them(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    assert importlib.import_module("recipes").GSM8K.name == "GSM8K"


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n\n{"question": \n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3 is not JSON"):
        GSM8K.load(path)
