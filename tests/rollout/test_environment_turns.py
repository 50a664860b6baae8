"""Several turns: every turn's tokens extend those of the turn before, and nothing sampled is tokenised again."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.objectives.llm import MCAdvantage

from smdlib.rollout.prompts import ChatTokens
from tests.rollout.policies import Echo, length_reward
from tests.rollout.test_environment import TOKENIZER, lists, make, paid
from tests.tokenizer import BOS, EOS, byte_tokenizer


def ask_again(response: str, row: dict, turn: int) -> str | None:
    """Row n ends after n % 3 + 1 responses."""
    return None if turn > row["number"] % 3 else f"Turn {turn} of {row['number']}: {len(response)}?"


def tokens(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("end", [True, False], ids=["ended", "cut"])
def test_each_turn_extends_the_one_before(end):
    env = make(max_turns=4, next_message=ask_again)
    batch, policy = env.reset(), Echo(end)
    for _ in range(3):
        stepped = env.step(policy(batch))
        following = stepped["next"]
        for row, after in zip(stepped.unbind(0), following.unbind(0), strict=True):
            full, prompt = row["tokens", "full"].tolist(), after["tokens", "prompt"].tolist()
            text = TOKENIZER.decode(row["tokens", "response"], skip_special_tokens=True)
            message = ask_again(text, {"number": int(row["row"])}, int(row["turn"]) + 1)
            added = "" if message is None else f"{'' if end else '</s>'}<s>user\n{message}</s><s>assistant\n"
            assert prompt == full + tokens(added)
            assert int(after["turn"]) == int(row["turn"]) + 1
            assert bool(after["done"]) == bool(after["terminated"]) == (message is None)
        batch = following.select("tokens", "row", "group", "turn")


def test_sampled_tokens_that_would_be_tokenised_otherwise_stay():
    """The end token spelled out in four letters: decoded and tokenised again it would be one token."""
    letters = [token for letter in "</s>" for token in tokens(letter)]
    assert len(letters) == 4 and tokens(TOKENIZER.decode(letters)) == [EOS]
    env = make(max_turns=2, next_message=lambda *_: "And?", prompts=1, group=1)
    batch = Echo()(env.reset())
    prompt = batch[0]["tokens", "prompt"]
    batch[0]["tokens"].full = torch.cat([prompt, torch.tensor([*letters, EOS])])
    following = env.step(batch)["next"][0]["tokens", "prompt"].tolist()
    assert following == [*prompt.tolist(), *letters, EOS, *tokens("<s>user\nAnd?</s><s>assistant\n")]


def test_only_the_end_of_the_turn_is_left_out():
    chat, rest = ChatTokens(TOKENIZER), tokens("</s><s>user\nAnd?</s><s>assistant\n")
    assert chat.further(torch.tensor([5, BOS]), "And?").tolist() == rest
    assert chat.further(torch.tensor([], dtype=torch.int64), "And?").tolist() == rest
    assert chat.further(torch.tensor([5, rest[2]]), "And?").tolist() == rest  # a letter
    assert chat.further(torch.tensor([EOS]), "And?").tolist() == rest[1:]


@pytest.mark.parametrize("closing", ["\n</s>\n", " </s>"])
def test_an_end_of_turn_of_several_tokens(closing):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}" + closing.replace("\n", "{{ '\\n' }}")
        + "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )  # fmt: skip
    rest = tokens(f"{closing}[user]And?{closing}[assistant]")
    chat = ChatTokens(tokenizer)
    assert chat.further(torch.tensor([5]), "And?").tolist() == rest
    assert chat.further(torch.tensor([5, EOS]), "And?").tolist() == rest[rest.index(EOS) + 1 :]


def test_template_that_rewrites_the_last_answer():
    """Qwen3's adds an empty thought to the last answer only; what follows an answer is the same."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}"
        "{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
    )
    assert ChatTokens(tokenizer).further(torch.tensor([5, EOS]), "And?").tolist() == tokens("<s>And?</s><s>")


def test_template_without_earlier_answers_is_refused():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match="leaves out earlier responses"):
        ChatTokens(tokenizer).further(torch.tensor([5]), "And?")


@pytest.mark.parametrize("message", ["", " ", 7])
def test_next_message_must_be_a_text(message):
    with pytest.raises(ValueError, match="next message is"):
        make(max_turns=2, next_message=lambda *_: message).rollout(1, Echo())


def test_plain_text_is_continued():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    env = make(tokenizer=tokenizer, max_turns=2, next_message=lambda *_: " More:")
    batch = env.step(Echo()(env.reset()))
    for row in batch.unbind(0):
        assert row["next", "tokens", "prompt"].tolist() == row["tokens", "full"].tolist() + tokens(" More:")


def test_without_a_next_message_the_policy_goes_on():
    batch = make(max_turns=3).rollout(3, Echo(end=False))
    for row in batch.unbind(0):
        turns = [row[turn] for turn in range(3)]
        for before, after in pairwise(turns):
            assert after["tokens", "prompt"].tolist() == before["tokens", "full"].tolist()
        assert [bool(turn["next", "truncated"]) for turn in turns] == [False, False, True]
        assert not any(turn["next", "terminated"] for turn in turns)
        assert [bool(turn["next", "reward"]) for turn in turns] == [False, False, True]


def test_collector_with_conversations_of_different_length():
    """Rows end at different turns and take new prompts alone; every group is complete, in order, and paid once."""
    env = make(max_turns=4, next_message=ask_again)
    collector = LLMCollector(
        env, policy=Echo(), dialog_turns_per_batch=12, total_dialog_turns=120, yield_completed_trajectories=True
    )
    turns = [row for batch in collector for row in batch.unbind(0)]
    conversations, current = [], []
    for row in turns:
        current.append(row)
        if row["next", "done"]:
            conversations.append(current)
            current = []
    assert not current
    samples = {}
    for conversation in conversations:
        rows, groups = ({int(row[key]) for row in conversation} for key in ("row", "group"))
        assert len(rows) == len(groups) == 1 and len(conversation) == rows.copy().pop() % 3 + 1
        assert [int(row["turn"]) for row in conversation] == list(range(len(conversation)))
        group = groups.pop()
        assert rows.pop() == group % 5
        samples[group] = samples.get(group, 0) + 1
        for before, after in pairwise(conversation):
            full, prompt = before["tokens", "full"], after["tokens", "prompt"]
            assert torch.equal(prompt[: len(full)], full) and len(prompt) > len(full)
            assert before["next", "reward"].item() == 0
        assert conversation[-1]["next", "reward"].item() == paid(conversation[-1])[0]
    finished = [group for group, count in sorted(samples.items()) if count == 2]
    assert finished[: env.position] == list(range(env.position)) and env.position > 10
    assert set(samples.values()) <= {1, 2}


def test_advantages_of_conversations():
    env = make(max_turns=4, next_message=ask_again, reward=lambda response, row: float(len(response)))
    transform = MCAdvantage(grpo_size=2, prompt_key="group", trajectory_return="sum")
    buffer = ReplayBuffer(storage=LazyStackStorage(200), transform=transform, batch_size=4)
    collector = LLMCollector(
        env, policy=Echo(), dialog_turns_per_batch=12, total_dialog_turns=60, replay_buffer=buffer,
        yield_completed_trajectories=True,
    )  # fmt: skip
    list(collector)
    returns, advantages = {}, {}
    for row in buffer[:].unbind(0):
        group = int(row["group"])
        advantages.setdefault(group, set()).add(round(float(row["advantage"]), 3))
        if row["next", "done"]:
            returns.setdefault(group, []).append(float(row["next", "reward"]))
    assert len(returns) > 5
    for group, pair in returns.items():
        values = torch.tensor(pair)
        expected = (values - values.mean()) / values.std().clamp_min(1e-6)
        assert advantages[group] == {round(float(value), 3) for value in expected}


def test_position_waits_for_the_slowest_row():
    env = make(max_turns=4, next_message=ask_again)  # prompts 0, 1 and 2 take 1, 2 and 3 turns
    env.rollout(2, Echo(), break_when_any_done=False)
    assert env.position == 2
    assert make(start=2).reset()["row"].tolist() == [2, 2, 3, 3, 4, 4]


def test_reward_is_asked_once_per_conversation():
    asked = []
    env = make(max_turns=3, reward=lambda response, row: asked.append(length_reward(response, row)) or 1.0)
    batch = env.rollout(3, Echo(end=False))
    assert len(asked) == 6
    assert lists(batch, ("next", "reward")) == [[[0.0]], [[0.0]], [[1.0]]] * 6
