"""Rows that have ended leave the batch: they cost nothing more, and the others never notice."""

from __future__ import annotations

import pytest
import torch
from transformers import StoppingCriteria
from transformers.generation import stopping_criteria

from smdlib import NEVER
from smdlib.policies import AdaptiveHeadAllocation, PyramidAllocation, make_policy
from smdlib.rollout import SparseActor, generation
from tests.families import make_model
from tests.rollout.actors import POLICIES, byte_actor, gaps, make_actor, make_prompts, run, word_tokenizer
from tests.rollout.test_generation import count_forwards
from tests.rollout.test_watchers import ascii_model

STEPS = [3, 14, 1, 2, 6, 9, 2, 1]  # tokens of each response: batches of 8 (2 tokens), 4 (4), 2 (3) and 1 (5)
MOST = 16


class After(StoppingCriteria):
    """Row ``b`` of the batch as it was given ends after ``steps[b]`` tokens."""

    def __init__(self, steps):
        self.steps, self.step = torch.tensor(steps), 0

    def __call__(self, input_ids, scores, **kwargs):
        assert len(input_ids) == len(self.steps)
        self.step += 1
        return self.steps == self.step


def eight_prompts():
    """Of unequal lengths, one of one token, some twice, in no order."""
    a, b, c, d, e = make_prompts(11, 19, 1, 7, 14)
    return [a, b, c, a, d, e, b, b]


def run_steps(actor, prompts, steps):
    """Sampled rows of these lengths."""
    actor.options = generation.GenerateOptions(**{**vars(actor.options), "stopping_criteria": (After(steps),)})
    return run(actor, prompts)


def check_as_if_alone(actor, steps=STEPS, close=1e-5):
    """Every row is the one that its prompt gives alone; log-probs to the rounding of batches of other sizes."""
    prompts = eight_prompts()
    for row, prompt, step in zip(run_steps(actor, prompts, steps), prompts, steps, strict=True):
        (alone,) = run_steps(actor, [prompt], [step])
        assert torch.equal(row["tokens", "prompt"], prompt) and len(row["tokens", "response"]) == step
        assert torch.equal(row["tokens", "full"], alone["tokens", "full"])
        assert torch.equal(row["shadow"].evicted_at, alone["shadow"].evicted_at)
        assert torch.equal(row["shadow"].token_ids[:-1], row["tokens", "full"][:-1].int())  # the last is seldom fed
        sampled, expected = row["log_probs", "response"], alone["log_probs", "response"]
        torch.testing.assert_close(sampled, expected, rtol=0, atol=close)


def greedy(family="llama", policy=None, **options):
    return make_actor(family, policy, do_sample=False, max_new_tokens=MOST, **options)


@pytest.mark.parametrize("evict_every", [None, 1, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_as_if_alone(policy, evict_every):
    check_as_if_alone(greedy("llama", policy, evict_every=evict_every))


# Absolute positions; a sliding window of 12; soft-capping; sinks and experts.
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("policy", [None, "h2o"])
def test_families_as_if_alone(family, policy):
    check_as_if_alone(greedy(family, policy, evict_every=policy and 2))


@pytest.mark.parametrize("evict_every", [None, 1, 4])
@pytest.mark.parametrize("allocation", [PyramidAllocation(), AdaptiveHeadAllocation()])
@pytest.mark.parametrize("policy", ["snapkv", "h2o", "protected(policy='h2o', token_ids=[20, 30, 40])"])
def test_allocations_and_token_ids_as_if_alone(policy, allocation, evict_every):
    """Slots of each head's own number are laid out anew; policies that ask find each row's own tokens."""
    actor = SparseActor(
        make_model("llama"),
        word_tokenizer(),
        policy=make_policy(policy, **POLICIES.get(policy, {})),
        budget=0.5,
        allocation=allocation,
        evict_every=evict_every,
        generate_kwargs={"max_new_tokens": MOST, "eos_token_id": None, "do_sample": False},
    )
    check_as_if_alone(actor, close=3e-5)  # 1.05e-5 in the first segment, before any row has left


def batches(steps, most=MOST):
    """Rows in each forward pass: a batch that is half through goes on with the other half."""
    rows, sizes = list(steps), []
    for step in range(1, most + 1):
        sizes.append(len(rows))
        left = [row for row in rows if row > step]
        rows = left if 2 * len(left) <= len(rows) else rows
        if not left:
            break
    return sizes


@pytest.mark.parametrize("policy", [None, "snapkv"])
@pytest.mark.parametrize("steps", [STEPS, [2] * 7 + [15], [16] * 8, [3], list(range(1, 9)), [99, 1, 1, 1, 1, 1, 1, 1]])
def test_rows_that_are_decoded(steps, policy):
    """Fewer than two for each that has to be; one long row of eight costs little more than its own."""
    actor = greedy("llama", policy)
    shapes = count_forwards(actor.model)
    run_steps(actor, make_prompts(*[9] * len(steps)), steps)
    assert shapes[0] == (len(steps), 8) and {columns for _, columns in shapes[1:]} == {1}
    decoded = [rows for rows, _ in shapes[1:]]
    assert decoded == batches(steps)
    assert sum(decoded) < 2 * sum(min(step, MOST) for step in steps)
    if steps == [2] * 7 + [15]:
        assert sum(decoded) == 8 * 2 + 13  # 120 if all were decoded to the end


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("evict_every", [1, 4])
@pytest.mark.parametrize("policy", [None, "streaming", "h2o", "snapkv"])
def test_replay(policy, evict_every, temperature):
    """Sampled log-probs of rows that end by chance, at end tokens, against those scored row by row."""
    if policy is None and evict_every > 1:
        return
    options = {"eos_token_id": list(range(0, 250, 9)), "max_new_tokens": 40, "temperature": temperature}
    actor = byte_actor(policy, evict_every=policy and evict_every, **options)
    shapes = count_forwards(actor.model)
    rows = run(actor, make_prompts(21, 13, 13, 30, 2, 17, 8, 25, vocab=250))
    lengths = [len(row["tokens", "response"]) for row in rows]
    assert [size for size, _ in shapes[1:]] == batches(lengths, 40) and min(size for size, _ in shapes[1:]) < 8
    differences = [gaps(actor, row, temperature) for row in rows]
    assert max(near for near, _ in differences) <= 1e-4
    assert policy is None or max(dense for _, dense in differences) > 0.3
    for row in rows:
        gone = row["shadow"].evicted_at
        assert len(gone) == len(row["tokens", "full"]) and (gone[gone < NEVER] < len(gone)).all()


@pytest.mark.parametrize("policy", [None, "snapkv"])
@pytest.mark.parametrize("ended", [8, 9])
def test_a_stop_string_across_two_segments(policy, ended):
    """Its letters are sampled before, at and after the step at which other rows leave."""
    prompts = make_prompts(9, 5, 14, 5, vocab=250)
    options = {"model": ascii_model(), "do_sample": False, "max_new_tokens": 30}
    free = [row["text", "response"] for row in run(byte_actor(policy, **options), prompts)]
    word = free[1][7:10]
    assert free[1].index(word) == 7
    actor = byte_actor(policy, stop_strings=[word], **options)
    shapes = count_forwards(actor.model)
    rows = run_steps(actor, prompts, [ended, 99, ended, ended])
    assert [size for size, _ in shapes[1:]] == [4] * ended + [1] * (10 - ended)
    texts = [text[: 10 if row == 1 else ended] for row, text in enumerate(free)]
    assert [row["text", "response"] for row in rows] == texts


@pytest.mark.parametrize("most", [1, 2, 7])
@pytest.mark.parametrize("policy", [None, "streaming"])
def test_the_longest_response_counts_from_the_prompt(policy, most):
    actor = make_actor(policy=policy, max_new_tokens=most, evict_every=policy and 2)
    rows = run_steps(actor, make_prompts(9, 4, 4, 6), [1, 99, 1, 2])
    assert [len(row["tokens", "response"]) for row in rows] == [1, most, 1, min(2, most)]
    assert all(gaps(actor, row)[0] < 1e-4 for row in rows)


def test_the_longest_time_counts_from_the_first_segment(monkeypatch):
    """Seconds by a clock that every step moves by one."""
    now = [0.0]

    class Tick(After):
        def __call__(self, input_ids, scores, **kwargs):
            now[0] += 1.0
            return super().__call__(input_ids, scores, **kwargs)

    monkeypatch.setattr(stopping_criteria.time, "time", lambda: now[0])
    actor = make_actor(max_new_tokens=12, max_time=5.5, stopping_criteria=[Tick([2, 99, 2, 99])])
    assert [len(row["tokens", "response"]) for row in run(actor, make_prompts(9, 5, 7, 5))] == [2, 6, 2, 6]


class Watch(StoppingCriteria):
    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.clone())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_criteria_see_the_whole_batch():
    """In the order in which it was given; rows that have left are padded."""
    watch, steps = Watch(), [1, 6, 2, 1]
    actor = make_actor(max_new_tokens=9, pad_token_id=5, stopping_criteria=[watch, After(steps)])
    prompts = make_prompts(9, 4, 9, 6)
    rows = run(actor, prompts)
    assert [ids.shape for ids in watch.seen] == [(4, 9 + step) for step in range(1, 7)]
    for row, prompt, step, ids in zip(rows, prompts, steps, watch.seen[-1], strict=True):
        assert torch.equal(ids[9 - len(prompt) : 9 + step], row["tokens", "full"])
        assert (ids[: 9 - len(prompt)] == 5).all()
    assert (watch.seen[-1][[0, 3], 10:] == 5).all()


def test_bytes_are_those_of_the_cache_at_its_largest():
    """Budget and response of all rows; without eviction, whichever segment held most."""
    slot = 3 * 2 * 2 * 12 * 4  # 3 layers, 2 heads, keys and values of 12 floats
    prompts = make_prompts(20, 9, 20, 6)
    for row in run_steps(make_actor(budget=5, max_new_tokens=30), prompts, [2, 30, 2, 2]):
        assert row["kv_bytes"].item() == slot * (5 + 30)
    for longest, held in ((9, 4 * (19 + 2)), (30, 4 * (19 + 2)), (80, 19 + 80)):
        actor = make_actor(policy=None, max_new_tokens=80)
        for row in run_steps(actor, prompts, [2, longest, 2, 2]):
            assert row["kv_bytes"].item() == slot * held // 4


@pytest.mark.parametrize("policy", [None, "snapkv", "h2o"])
def test_rows_are_copied_less_than_once(monkeypatch, policy):
    """However the rows end, and none of the cache's storage is allocated anew on the way."""
    taken, caches = [], []
    for name in ("CompressedCache", "DynamicCache"):

        class Spy(getattr(generation, name)):
            def batch_select_indices(self, indices):
                taken.append(len(indices))
                caches.append(self)
                super().batch_select_indices(indices)

        monkeypatch.setattr(generation, name, Spy)
    actor = greedy("llama", policy)
    for steps in (STEPS, list(range(1, 9)), list(range(15, 7, -1)), [9] * 8):
        taken.clear()
        run_steps(actor, make_prompts(*[9] * 8), steps)
        assert taken[0] == 8 and sum(taken[1:]) < 8  # the first repeats the prompts
        assert policy is None or caches[-1].growths == 0
