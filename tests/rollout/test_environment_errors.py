"""What cannot be is refused, and the message says which row, which response and what to do."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
import torch

from smdlib.rollout.environment import dataset_env
from smdlib.rollout.rewards import RewardError
from tests.rollout.policies import Echo, length_reward
from tests.rollout.test_environment import ROWS, make
from tests.tokenizer import byte_tokenizer

PLAIN = byte_tokenizer()
PLAIN.chat_template = None


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rows": []}, ValueError, "no rows"),
        ({"rows": datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})}, TypeError, "train.*choose one"),
        ({"rows": datasets.Dataset.from_list(ROWS).to_iterable_dataset()}, TypeError, "IterableDataset"),
        ({"rows": ["Why?"]}, TypeError, "row 0 .* str; expected a dict"),
        ({"rows": "Why?"}, TypeError, "str"),
        ({"prompt": "question"}, ValueError, r"no column 'question'; it has \['number', 'prompt'\]"),
        ({"prompts": 0}, ValueError, "prompts=0"),
        ({"group": 0}, ValueError, "group=0"),
        ({"group": 2.0}, ValueError, "group=2.0"),
        ({"max_turns": 0}, ValueError, "max_turns=0"),
        ({"start": -1}, ValueError, "start=-1"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"shard": (2, 2)}, ValueError, r"shard=\(2, 2\)"),
        ({"next_message": lambda *_: None}, ValueError, "max_turns=1"),
        ({"tokenizer": PLAIN, "system_prompt": "Be brief."}, ValueError, "chat_template"),
        ({"tokenizer": PLAIN, "template_kwargs": {"x": 1}}, ValueError, "chat_template"),
    ],
)
def test_settings(options, error, words):
    with pytest.raises(error, match=words):
        make(**options)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "''.*not blank"),
        (" \n", "not blank"),
        (None, "None.*text or a list of messages"),
        (7, "7"),
        (["Hi"], "list of messages"),
        ([], "empty list"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": " "}], "blank"),
        ([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "system message of its own"),
    ],
)
def test_prompt(value, words):
    rows = [ROWS[0], {"prompt": value, "number": 1}]
    env = make(rows, system_prompt="Be brief.", prompts=1)
    env.rollout(1, Echo())
    for _ in range(2):  # a second try finds the same row: nothing is skipped
        with pytest.raises(ValueError, match=f"row 1, column 'prompt': .*{words}"):
            env.reset()


def test_messages_need_a_template():
    with pytest.raises(ValueError, match=r"row 0.*chat_template"):
        make([{"prompt": [{"role": "user", "content": "Hi"}]}], tokenizer=PLAIN).reset()


def test_a_row_without_the_column():
    with pytest.raises(ValueError, match=r"row 1 has no 'prompt'; it has \['number'\]"):
        make([ROWS[0], {"number": 1}]).reset()


def test_failing_reward_names_row_and_response():
    with pytest.raises(RewardError, match=r"KeyError: 'label' \(row 2, response '[^']+'") as caught:
        make(reward=lambda response, row: row["label"] if row["number"] == 2 else 0.0).rollout(1, Echo())
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e39, None, "1", torch.tensor(1.0), [1.0], 1j])
def test_reward_that_is_no_finite_number(value):
    with pytest.raises(RewardError, match=r"row 1, response"):
        make(reward=lambda response, row: value if row["number"] == 1 else 0.0).rollout(1, Echo())


@pytest.mark.parametrize("value", [True, 1, 1.0, np.float32(1), np.int64(1)])
def test_numbers_of_every_kind(value):
    assert make(reward=lambda response, row: value).rollout(1, Echo())["next", "reward"].flatten().tolist() == [1.0] * 6


def test_policy_that_writes_no_tokens_or_other_prompts():
    env = make()
    with pytest.raises(KeyError, match="full"):
        env.step(env.reset())

    def padded(batch):
        batch = Echo()(batch)
        for row in batch.unbind(0):
            row["tokens"].full = torch.cat([torch.zeros(2, dtype=torch.int64), row["tokens", "full"]])
        return batch

    with pytest.raises(ValueError, match=r"row 0 .* does not start with the"):
        env.step(padded(env.reset()))


def test_another_seed_is_refused():
    with pytest.raises(RuntimeError, match="seed="):
        make().set_seed(1)


def test_prompts_may_outnumber_the_rows():
    env = dataset_env(ROWS[:2], byte_tokenizer(), length_reward, prompts=5, group=1, shuffle=False)
    batch = env.reset()
    assert batch["row"].tolist() == [0, 1, 0, 1, 0] and batch["group"].tolist() == [0, 1, 2, 3, 4]
