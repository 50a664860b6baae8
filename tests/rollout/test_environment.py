"""The environment by values: what it hands out, what it pays, and that TorchRL's collectors and buffers take it."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ListStorage, ReplayBuffer
from torchrl.objectives.llm import MCAdvantage

from smdlib import ShadowMask
from smdlib.rollout.environment import dataset_env
from tests.rollout.policies import Echo, length_reward
from tests.tokenizer import byte_tokenizer

ROWS = [{"prompt": "Why " * (number + 1), "number": number} for number in range(5)]
TOKENIZER = byte_tokenizer()


def make(rows=ROWS, reward=length_reward, tokenizer=TOKENIZER, **options):
    return dataset_env(rows, tokenizer, reward, **({"prompts": 3, "group": 2, "shuffle": False} | options))


def lists(batch, key):
    return [row.get(key).tolist() for row in batch.reshape(-1).unbind(0)]


def template(text):
    return TOKENIZER(f"<s>user\n{text}</s><s>assistant\n", add_special_tokens=False)["input_ids"]


def paid(batch):
    """The reward written out from tokens, row and nothing else."""
    expected = []
    for row in batch.reshape(-1).unbind(0):
        response = TOKENIZER.decode(row["tokens", "response"], skip_special_tokens=True)
        expected.append(float(len(response) + 1000 * int(row["row"])))
    return expected


@pytest.mark.parametrize(
    "rows", [ROWS, tuple(ROWS), datasets.Dataset.from_list(ROWS)], ids=["list", "tuple", "Dataset"]
)
def test_reset_gives_each_prompt_group_times(rows):
    batch = make(rows).reset()
    assert lists(batch, ("tokens", "prompt")) == [template(ROWS[number]["prompt"]) for number in (0, 0, 1, 1, 2, 2)]
    assert batch["row"].tolist() == batch["group"].tolist() == [0, 0, 1, 1, 2, 2]
    assert batch["turn"].tolist() == [0] * 6


def test_rollout_pays_the_response_of_each_row():
    batch = make().rollout(1, Echo())
    assert batch.shape == (6, 1)
    assert batch["next", "reward"].shape == (6, 1, 1, 1)
    assert batch["next", "reward"].flatten().tolist() == paid(batch)
    assert len(set(paid(batch))) > 3
    assert batch["next", "terminated"].all() and batch["next", "done"].all() and not batch["next", "truncated"].any()
    assert lists(batch, ("next", "tokens", "prompt")) == lists(batch, ("tokens", "full"))


def test_columns_of_any_type_reach_the_reward():
    seen = []
    extra = {"nested": {"a": [1, [2]]}, "none": None, "set": {1}, "text": "response"}
    rows = [{"prompt": [{"role": "user", "content": "Hi"}], "tokens": extra, "reward": 3, "query": "x"}]
    env = make(rows, lambda response, row: seen.append(row) or 0.5, prompts=1)
    batch = env.rollout(1, Echo())
    assert lists(batch, ("tokens", "prompt")) == [template("Hi")] * 2
    assert seen == rows * 2 and seen[0] is rows[0]


def test_system_prompt_and_template_options_and_plain_text():
    batch = make(system_prompt="Be brief.", prompts=1, template_kwargs={"add_generation_prompt": False}).reset()
    assert TOKENIZER.decode(batch[0]["tokens", "prompt"]) == "<s>system\nBe brief.</s><s>user\nWhy </s>"
    plain = byte_tokenizer()
    plain.chat_template = None
    assert lists(make(tokenizer=plain, prompts=1).reset(), ("tokens", "prompt")) == [plain("Why ")["input_ids"]] * 2


def test_reset_before_a_step_gives_the_same_prompts():
    env = make()
    first, again = env.reset(), env.reset()
    assert first["row"].tolist() == again["row"].tolist() == [0, 0, 1, 1, 2, 2]
    assert env.position == 0
    env.step(Echo()(again))
    assert env.position == 3
    assert env.reset()["row"].tolist() == [3, 3, 4, 4, 0, 0]
    assert env.position == 3  # drawn, not used


@pytest.mark.parametrize("shuffle", [True, False])
def test_collector_uses_every_prompt_once_and_resumes(shuffle):
    """LLMCollector resets twice before its first step; none of the prompts may be lost by it."""
    batches = collect(make(shuffle=shuffle, seed=3), 5)
    groups = [batch["group"].flatten().tolist() for batch in batches]
    assert groups == [[group for group in range(3 * step, 3 * step + 3) for _ in range(2)] for step in range(5)]
    rows = [row for batch in batches for row in batch["row"].flatten()[::2].tolist()]
    assert sorted(rows[:5]) == sorted(rows[5:10]) == sorted(rows[10:]) == list(range(5))
    for batch in batches:
        assert batch["next", "reward"].flatten().tolist() == paid(batch)
    resumed = collect(make(shuffle=shuffle, seed=3, start=6), 3)
    for old, new in zip(batches[2:], resumed, strict=True):
        assert lists(old, "row") == lists(new, "row") and lists(old, "group") == lists(new, "group")
        assert lists(old, ("tokens", "full")) == lists(new, ("tokens", "full"))


def collect(env, steps, **options):
    turns = env.batch_size[0]
    collector = LLMCollector(
        env, policy=Echo(), dialog_turns_per_batch=turns, total_dialog_turns=turns * steps, **options
    )
    return list(collector)


def test_position_of_an_environment_is_where_the_next_one_starts():
    env = make(seed=3, shuffle=True, start=4)
    env.rollout(1, Echo())
    assert env.position == 7
    first = env.rollout(1, Echo())
    second = make(seed=3, shuffle=True, start=7).rollout(1, Echo())
    assert lists(first, ("tokens", "full")) == lists(second, ("tokens", "full"))


def test_no_random_generator_is_advanced():
    torch.manual_seed(0)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    env = make(shuffle=True)
    for _ in range(3):
        env.step(_without_noise(env.reset()))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002
    torch.manual_seed(99)
    assert make(shuffle=True).reset()["row"].tolist() == make(shuffle=True).reset()["row"].tolist()


def _without_noise(batch):
    state = torch.get_rng_state()
    batch = Echo()(batch)
    torch.set_rng_state(state)
    return batch


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_replay_buffer_with_group_advantages(storage):
    buffer = ReplayBuffer(storage=storage(100), transform=MCAdvantage(grpo_size=2, prompt_key="group"), batch_size=12)
    collect(make(reward=lambda response, row: float(len(response))), 2, replay_buffer=buffer)
    assert len(buffer) == 12
    batch = buffer[:]
    rows = batch if isinstance(batch, list) else list(batch.unbind(0))
    by_group = {}
    for row in rows:
        by_group.setdefault(int(row["group"]), []).append(row)
        assert isinstance(row.get("shadow"), ShadowMask)
        assert len(row["shadow"].evicted_at) == len(row["tokens", "full"]) == len(row["log_probs", "full"])
    assert sorted(by_group) == list(range(6))
    for pair in by_group.values():
        rewards = torch.stack([row["next", "reward"].flatten() for row in pair]).flatten()
        expected = (rewards - rewards.mean()) / rewards.std().clamp_min(1e-6)
        got = torch.stack([row["advantage"].flatten() for row in pair]).flatten()
        torch.testing.assert_close(got, expected)
        assert pair[0]["advantage"].shape == (1, 1)


def test_shards_share_the_prompts():
    groups, seen = [], []
    for shard in range(3):
        env = make(shuffle=True, seed=1, prompts=2, start=10, shard=(shard, 3))
        batch = env.rollout(1, Echo())
        groups.append(batch["group"].flatten()[::2].tolist())
        seen += zip(groups[-1], batch["row"].flatten()[::2].tolist(), strict=True)
        assert env.position == 10 + shard + 6
    assert groups == [[10, 13], [11, 14], [12, 15]]
    whole = make(shuffle=True, seed=1, prompts=6, start=10).reset()
    assert sorted(seen) == list(zip(whole["group"].tolist()[::2], whole["row"].tolist()[::2], strict=True))


def test_pickled_environment_goes_on_where_it_was():
    env = make(shuffle=True)
    env.rollout(1, Echo())
    env.reset()
    copy = pickle.loads(pickle.dumps(env))
    torch.manual_seed(0)
    first = env.rollout(1, Echo())
    torch.manual_seed(0)
    second = copy.rollout(1, Echo())
    assert copy.position == env.position == 6
    for key in ("row", ("tokens", "full"), ("next", "reward")):
        assert lists(first, key) == lists(second, key)


WITHOUT_LISTS = """
import tensordict
tensordict.set_list_to_stack(False).set()
from tests.rollout.test_environment import *
test_collector_uses_every_prompt_once_and_resumes(True)
test_replay_buffer_with_group_advantages(ListStorage)
assert not tensordict.list_to_stack()
"""


@pytest.mark.slow
def test_works_whatever_tensordict_makes_of_lists():
    """`set_list_to_stack` is global and the script's own: nothing here may need it or change it."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_LISTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
