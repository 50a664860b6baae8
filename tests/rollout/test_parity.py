"""Sampled log-probs equal those replayed row by row under the record: the promise, for all that the actor takes."""

from __future__ import annotations

import pytest
import torch

from smdlib import NEVER
from smdlib.policies import PyramidAllocation
from smdlib.rollout import SparseActor
from tests.families import make_model
from tests.rollout.actors import POLICIES, byte_actor, gaps, make_actor, make_prompts, run, word_tokenizer

# Absolute positions, a sliding window of 12 with grouped queries, soft-capping with a window, sinks with a window.
FAMILIES = ["gpt2", "mistral", "gemma2", "gpt_oss"]


def duplicated():
    """Unequal prompts, two of them twice, in no order; one shorter than its budget of 6, one of one token."""
    a, b, c, d = make_prompts(21, 13, 4, 1)
    return [a, b, a, c, d, b]


def check(actor, rows, temperature=1.0):
    """Every row replays to 1e-4 nats; without the record some would be far off, if keys were evicted."""
    differences = [gaps(actor, row, temperature) for row in rows]
    assert max(near for near, _ in differences) <= 1e-4
    assert actor.eviction is None or max(dense for _, dense in differences) > 0.3


def visible_keys(size, total, kept, evict_every):
    """Keys that each query sees, its own included: evictions follow both parts of the prompt and every n tokens."""
    present, seen = 0, []
    for query in range(total):
        present += 1
        seen.append(present)
        decoded = query - size + 1
        if decoded in (-1, 0) or (evict_every and decoded > 0 and decoded % evict_every == 0):
            present = min(present, kept)
    return seen


@pytest.mark.parametrize("evict_every", [None, 1, 4])
@pytest.mark.parametrize("budget", [0.5, 6])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_and_schedules(policy, budget, evict_every):
    for family in ("llama", FAMILIES[list(POLICIES).index(policy) % 4]):
        actor = make_actor(family, policy, budget, evict_every=evict_every, max_new_tokens=9)
        rows = run(actor, duplicated())
        check(actor, rows)
        for row in rows:
            gone, size = row["shadow"].evicted_at, len(row["tokens", "prompt"])
            alive = torch.stack([(gone[: query + 1] > query).sum(0) for query in range(len(gone))])  # [T, L, H]
            kept = 6 if budget == 6 else -(-size // 2)
            expected = torch.tensor(visible_keys(size, len(gone), kept, evict_every))
            assert torch.equal(alive, expected[:, None, None].expand_as(alive))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "gemma3", "phi3", "olmo2", "gpt_neox", *FAMILIES])
def test_families(family):
    for policy in ("snapkv", None):
        actor = make_actor(family, policy, evict_every=policy and 4, max_new_tokens=9)
        rows = run(actor, duplicated())
        check(actor, rows)
        if policy is None:
            assert all((row["shadow"].evicted_at == NEVER).all() for row in rows)


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_temperature_is_part_of_the_log_probs(temperature):
    actor = make_actor(temperature=temperature, evict_every=2)
    rows = run(actor, duplicated())
    check(actor, rows, temperature)
    assert min(gaps(actor, row, 1.0)[0] for row in rows) > 0.01


def test_greedy_scores_at_temperature_one():
    actor = make_actor(do_sample=False)
    rows = run(actor, duplicated())
    check(actor, rows)
    assert torch.equal(rows[0]["tokens", "full"], rows[2]["tokens", "full"])


@pytest.mark.parametrize("evict_every", [None, 1, 3])
def test_rows_that_end_at_different_steps(evict_every):
    actor = byte_actor(evict_every=evict_every, eos_token_id=list(range(0, 250, 7)), max_new_tokens=16)
    rows = run(actor, make_prompts(21, 13, 13, 30, 2, vocab=250))
    lengths = {len(row["tokens", "response"]) for row in rows}
    assert len(lengths) > 2
    check(actor, rows)
    for row in rows:  # an eviction after the row's end has left no trace
        gone = row["shadow"].evicted_at
        assert len(gone) == len(row["tokens", "full"]) and (gone[gone < NEVER] < len(gone)).all()


def test_allocation():
    actor = SparseActor(
        make_model("llama"),
        word_tokenizer(),
        policy="streaming",
        budget=8,
        allocation=PyramidAllocation(),
        generate_kwargs={"max_new_tokens": 6, "eos_token_id": None},
    )
    rows = run(actor, make_prompts(30, 21))
    check(actor, rows)
    kept = [(rows[0]["shadow"].evicted_at[:30, layer] == NEVER).sum().item() for layer in range(3)]
    assert kept[0] > kept[1] > kept[2] and sum(kept) == 3 * 2 * 8


def test_autocast_replays_under_the_same_autocast():
    actor = byte_actor(evict_every=4)
    prompts = make_prompts(21, 13, vocab=250)
    with torch.autocast("cpu", torch.bfloat16):
        rows = run(actor, prompts)
        assert all(row["log_probs", "full"].dtype == torch.float32 for row in rows)
        inside = max(gaps(actor, row)[0] for row in rows)
    assert inside < 0.08  # the bfloat16 band of the README
    assert min(gaps(actor, row)[1] for row in rows) > 0.5


def test_a_model_whose_configuration_turns_the_cache_off():
    """Training scripts set use_cache=False for activation checkpointing."""
    for policy in (None, "h2o"):
        actor = byte_actor(policy)
        actor.model.config.use_cache = False
        check(actor, run(actor, make_prompts(12, 7, 12, vocab=250)))
        assert actor.model.config.use_cache is False
