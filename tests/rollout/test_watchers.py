"""Where rows end, and what is noted of each sampled token."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import EosTokenCriteria, StoppingCriteria

from smdlib.rollout.options import resolve_options
from smdlib.rollout.watchers import RowEnds, SampledLogProbs
from tests.families import make_model
from tests.rollout.actors import byte_actor, byte_model, gaps, make_actor, make_prompts, run, word_tokenizer
from tests.tokenizer import EOS, byte_tokenizer

PROMPTS = make_prompts(9, 5, 14, 5, vocab=250)


def free_run(**options):
    """Greedy rows that end nowhere: what comes out before and without an end."""
    return run(byte_actor(do_sample=False, max_new_tokens=16, **options), PROMPTS)


def ended(**options):
    actor = byte_actor(do_sample=False, max_new_tokens=16, **options)
    rows = run(actor, PROMPTS)
    assert all(gaps(actor, row)[0] < 1e-4 for row in rows)
    return rows


def assert_cut(rows, lengths):
    """Rows are those without an end, cut after ``lengths`` tokens, in every entry."""
    for row, whole, length in zip(rows, free_run(), lengths, strict=True):
        size = len(row["tokens", "prompt"]) + length
        assert torch.equal(row["tokens", "response"], whole["tokens", "response"][:length])
        assert torch.equal(row["tokens", "full"], whole["tokens", "full"][:size])
        torch.testing.assert_close(
            row["log_probs", "response"], whole["log_probs", "response"][:length], rtol=0, atol=1e-5
        )
        assert len(row["masks", "all_attention_mask"]) == len(row["log_probs", "full"]) == size
        assert torch.equal(row["shadow"].evicted_at, whole["shadow"].crop(size).evicted_at)
        assert row["text", "response"] == byte_tokenizer().decode(row["tokens", "response"], skip_special_tokens=True)


def first_of(tokens, wanted):
    """Tokens up to and with the first of ``wanted``."""
    return next((index + 1 for index, token in enumerate(tokens) if token in wanted), len(tokens))


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("as_int", [False, True])
def test_end_tokens(count, as_int):
    """None, one (as a number, too) or several; rows end at different steps, and the token belongs to its row."""
    responses = [row["tokens", "response"].tolist() for row in free_run()]
    wanted = [response[4 + 3 * index] for index, response in enumerate(responses)][:count]
    if as_int and count != 1:
        return
    rows = ended(eos_token_id=wanted[0] if as_int else wanted or None)
    lengths = [first_of(response, wanted) for response in responses]
    assert count == 0 or len(set(lengths)) > 1
    assert_cut(rows, lengths)


def test_all_rows_end_at_once():
    rows = ended(eos_token_id=list(range(259)))
    assert_cut(rows, [1] * 4)


def test_end_token_of_the_model_then_of_the_tokenizer():
    assert resolve_options({}, byte_model(), byte_tokenizer()).eos_token_ids == (2,)  # LlamaConfig's
    model = byte_model()
    model.generation_config.eos_token_id = [5, 7]
    assert resolve_options({}, model, byte_tokenizer()).eos_token_ids == (5, 7)
    model.generation_config.eos_token_id = None
    assert resolve_options({}, model, byte_tokenizer()).eos_token_ids == (EOS,)
    assert resolve_options({"eos_token_id": None}, model, byte_tokenizer()).eos_token_ids == ()
    assert resolve_options({}, make_model("llama"), word_tokenizer()).eos_token_ids == (2,)


def ascii_model():
    """Writes letters and spaces only, so that its text is the tokens."""
    model, tokenizer = byte_model(), byte_tokenizer()
    head = torch.nn.Linear(32, 259)
    letters = tokenizer("abcdefgh ", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.fill_(-1e4)
        head.bias[letters] = 0.0
    model.lm_head = head
    return model


@pytest.mark.parametrize("evict_every", [None, 1])
def test_stop_strings(evict_every):
    """A row ends with the token that completes a string; the others go on."""
    options = {"max_new_tokens": 40, "evict_every": evict_every, "do_sample": False}
    actor = byte_actor(model=ascii_model(), **options)
    free = [row["text", "response"] for row in run(actor, PROMPTS)]
    strings = [free[0][6:8], free[1][11:14]]
    other = byte_actor(model=ascii_model(), stop_strings=strings, **options)
    rows = run(other, PROMPTS)
    lengths = []
    for row, text in zip(rows, free, strict=True):
        length = min((text.index(one) + len(one) for one in strings if one in text), default=40)
        lengths.append(length)
        assert row["text", "response"] == text[:length]
        assert len(row["tokens", "response"]) == len(row["log_probs", "response"]) == length
        assert gaps(other, row)[0] < 1e-4
    assert len(set(lengths)) > 2 and min(lengths) < 40


def test_stop_strings_are_of_the_response():
    """What the prompt ends with is not the response's."""
    tokenizer = byte_tokenizer()
    prompt = torch.tensor(tokenizer("the word is ab", add_special_tokens=False)["input_ids"])
    (free,) = run(byte_actor(model=ascii_model(), max_new_tokens=12), [prompt])
    text = free["text", "response"]
    straddling = "ab" + text[0]
    assert straddling not in text
    (row,) = run(byte_actor(model=ascii_model(), max_new_tokens=12, stop_strings=straddling), [prompt])
    assert row["text", "response"] == text
    (row,) = run(byte_actor(model=ascii_model(), max_new_tokens=12, stop_strings=[text[:1]]), [prompt])
    assert row["text", "response"] == text[0]


class After(StoppingCriteria):
    """Row ``b`` ends after ``steps[b]`` tokens, says so once, and then changes its mind."""

    def __init__(self, steps):
        self.steps, self.step = torch.tensor(steps), 0

    def __call__(self, input_ids, scores, **kwargs):
        self.step += 1
        return self.steps == self.step


def test_stopping_criteria():
    assert_cut(ended(stopping_criteria=[After([3, 7, 99, 1])]), [3, 7, 16, 1])
    assert_cut(ended(stopping_criteria=After([5, 5, 5, 5])), [5] * 4)  # one that is not in a list
    assert_cut(ended(stopping_criteria=[After([9, 2, 99, 99]), After([3, 7, 99, 6])]), [3, 2, 16, 6])


class Slow(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        time.sleep(0.3)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_max_time_ends_all_rows():
    rows = ended(stopping_criteria=[Slow()], max_time=0.5)
    (length,) = {len(row["tokens", "response"]) for row in rows}
    assert 1 <= length < 16
    assert_cut(rows, [length] * 4)


def test_row_ends_by_hand():
    options = resolve_options({"eos_token_id": [7, 8], "max_new_tokens": 4}, byte_model(), byte_tokenizer())
    tokens = torch.tensor([[7, 7, 1, 2, 8, 1], [1, 7, 7, 7, 7, 7], [1, 1, 1, 1, 1, 1]])  # the prompts have some, too
    ends = RowEnds(options, byte_tokenizer(), tokens[:, :2])
    done = [ends(tokens[:, :columns], None).tolist() for columns in (3, 4, 5, 6)]
    assert done == [[False, True, False], [False, True, False], [True, True, True], [True, True, True]]
    assert ends.lengths(4).tolist() == [3, 1, 4] and ends.ended(4).tolist() == [True, True, True]
    assert ends.lengths(2).tolist() == [2, 1, 2]  # a loop that took steps back
    assert [ends.ended(columns).tolist() for columns in (2, 3)] == [[False, True, False], [True, True, False]]
    assert hasattr(EosTokenCriteria([7]), "eos_token_id") and not hasattr(ends, "eos_token_id")


def test_row_ends_of_the_rows_that_go_on():
    """Rows are named by their place in the batch being decoded; what a loop took back ends nobody."""
    options = resolve_options({"eos_token_id": [7], "max_new_tokens": 9}, byte_model(), byte_tokenizer())
    tokens = torch.tensor([[1, 7, 1, 1], [1, 1, 1, 7], [1, 7, 1, 1], [1, 1, 7, 1], [1, 1, 1, 1]])
    ends = RowEnds(options, byte_tokenizer(), tokens[:, :1])
    done = [ends(tokens[:, :columns], None).tolist() for columns in (2, 3, 4)]
    assert done == [[True, False, True, False, False], [True] * 5, [True] * 5]
    assert ends.ended(2).tolist() == [True, False, True, True, False]
    ends.keep(torch.tensor([1, 4]))
    assert ends.ended(2).tolist() == [False, False]
    tokens = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 7]])
    assert [ends(tokens[:, :columns], None).tolist() for columns in (4, 5)] == [[False, False], [True, True]]
    assert ends.ended(4).tolist() == [False, True] and ends.lengths(4).tolist() == [4, 4]
    ends.keep(torch.tensor([0]))
    assert ends.ended(8).tolist() == [False] and ends.ended(9).tolist() == [True]


def test_log_probs_by_hand():
    """The last token is scored when all are asked for; steps beyond those asked for are left out."""
    logits = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])
    expected = torch.stack([(one / 0.7).log_softmax(-1) for one in logits], 1)
    expected = expected.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    for asked in (1, 3, 4):
        watcher = SampledLogProbs(0.7)
        for step in range(4):
            scores = logits[step]
            assert watcher(tokens[:, : step + 1], scores) is scores
        torch.testing.assert_close(watcher.log_probs(tokens[:, 1 : asked + 1]), expected[:, :asked])
    bf16 = SampledLogProbs(1.0)
    bf16(tokens[:, :1], logits[0].bfloat16())
    assert bf16.log_probs(tokens[:, 1:2]).dtype == torch.float32


def test_log_probs_of_one_token():
    (row,) = run(make_actor(max_new_tokens=1), make_prompts(6))
    assert row["log_probs", "response"].shape == (1,)
