"""The actor as TorchRL's policy: environments, collectors, replay buffers, files; the losses on what it collected."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ListStorage, ReplayBuffer
from torchrl.envs import StepCounter
from torchrl.envs.llm import ChatEnv
from torchrl.objectives.llm import MCAdvantage

from smdlib import GRPOLoss, ShadowMask, SMDLoss
from smdlib.rollout.environment import dataset_env
from tests.rollout.actors import POLICIES, byte_actor, gaps, make_actor, make_prompts, run
from tests.tokenizer import EOS, byte_tokenizer

QUESTIONS = ["Why?", "Who is there?", "How much is the fish?"]


class Seen:
    """Passes on what the actor writes, and keeps a copy of it."""

    def __init__(self, actor):
        self.actor, self.rows = actor, []

    def __call__(self, tensordict):
        out = self.actor(tensordict)
        self.rows += [copy.deepcopy(row) for row in out.unbind(0)]
        return out


def assert_same_rows(rows, expected):
    """All that the actor wrote, bit for bit."""
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        for key in (("tokens", "prompt"), ("tokens", "response"), ("tokens", "full"), "kv_bytes"):
            assert torch.equal(row[key], other[key])
        for key in (("masks", "all_attention_mask"), ("masks", "all_assistant_mask")):
            assert torch.equal(row[key], other[key])
        for key in (("log_probs", "response"), ("log_probs", "full")):
            torch.testing.assert_close(row[key], other[key], rtol=0, atol=0, equal_nan=True)
        assert isinstance(row["shadow"], ShadowMask)
        for field in ("evicted_at", "token_ids"):
            arrived, written = row["shadow"].get(field), other["shadow"].get(field)
            assert arrived.dtype == written.dtype and arrived.shape == written.shape
            assert arrived.numpy().tobytes() == written.numpy().tobytes()
        assert row["text", "response"] == other["text", "response"]


def flat(batch):
    return list(batch.reshape(-1).unbind(0))


def stock_env():
    def collate(batch):
        return torch.stack([TensorDict.from_dict(one) for one in batch])

    loader = DataLoader([{"query": question} for question in QUESTIONS], batch_size=1, collate_fn=collate)
    return ChatEnv.from_dataloader(
        loader, repeats=1, batch_size=(1,), input_mode="tokens", tokenizer=byte_tokenizer(), group_repeats=True
    )


def expected_prompt(question):
    text = f"<s>user\n{question}</s><s>assistant\n"
    return byte_tokenizer()(text, add_special_tokens=False)["input_ids"]


def own_env(group=4):
    rows = [{"prompt": question} for question in QUESTIONS]
    reward = lambda response, row: float(len(response) % 7)  # noqa: E731
    return dataset_env(rows, byte_tokenizer(), reward, prompts=2, group=group, shuffle=False)


def test_rollout_in_the_stock_environment():
    policy = Seen(byte_actor(max_new_tokens=5))
    torch.manual_seed(0)
    batch = stock_env().rollout(1, policy)
    assert_same_rows(flat(batch), policy.rows)
    assert "Why?" in byte_tokenizer().decode(policy.rows[0]["tokens", "prompt"])
    assert batch[0, 0]["next", "tokens", "prompt"].tolist() == policy.rows[0]["tokens", "full"].tolist()
    plain = ChatEnv(batch_size=(3,), input_mode="tokens", tokenizer=byte_tokenizer())
    questions = ["Why?", "Who?", "How?"]  # of one length: the stock environment stacks their tokens
    start = plain.reset(TensorDict({"query": questions}, batch_size=[3]))
    policy.rows.clear()
    batch = plain.rollout(2, policy, auto_reset=False, tensordict=start)  # two turns: the second goes on from the first
    assert batch.shape == (3, 2)
    turns = [row for step in range(2) for row in batch[:, step].unbind(0)]
    assert_same_rows(turns, policy.rows)
    for row, question in zip(turns[:3], questions, strict=True):
        assert question in byte_tokenizer().decode(row["tokens", "prompt"])
    for first, second in zip(turns[:3], turns[3:], strict=True):
        assert torch.equal(second["tokens", "prompt"], first["tokens", "full"])
        assert second["log_probs", "full"].isnan().sum() == len(first["tokens", "full"])
        assert gaps(policy.actor, second)[0] < 1e-4


def test_rollout_takes_the_actor_itself():
    actor = byte_actor(max_new_tokens=5)
    (row,) = flat(stock_env().rollout(1, actor))
    assert row["tokens", "full"].tolist()[:-5] == row["tokens", "prompt"].tolist() and gaps(actor, row)[0] < 1e-4
    torch.manual_seed(0)
    rows = flat(own_env().rollout(1, actor))
    prompts = [torch.tensor(expected_prompt(question)) for question in QUESTIONS[:2] for _ in range(4)]
    assert_same_rows(rows, run(actor, prompts))
    assert all(gaps(actor, row)[0] < 1e-4 for row in rows)
    for row in rows:
        row["advantage"] = torch.ones(1, 1)
    out = SMDLoss(actor)(lazy_stack(rows))
    assert out.max_mismatch <= 1e-4 and abs(out.max_ratio - 1) <= 1e-4  # the first ratio of every token is 1


@pytest.mark.parametrize("own", [False, True])
def test_collector(own):
    policy = Seen(byte_actor(max_new_tokens=5, eos_token_id=list(range(0, 250, 6)), evict_every=2))
    env = own_env() if own else stock_env().append_transform(StepCounter(max_steps=1))
    turns = 8 if own else 3
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=turns, total_dialog_turns=2 * turns)
    rows = [row for batch in collector for row in flat(batch)]
    assert len({len(row["tokens", "response"]) for row in rows}) > 1
    assert_same_rows(rows, policy.rows[-len(rows) :])
    assert all(gaps(policy.actor, row)[0] < 1e-4 for row in rows)


@pytest.mark.parametrize("policy", [None, "h2o"])
def test_collector_takes_the_actor_itself(policy):
    actor = byte_actor(policy, max_new_tokens=5)
    collector = LLMCollector(own_env(), policy=actor, dialog_turns_per_batch=8, total_dialog_turns=16)
    rows = [row for batch in collector for row in flat(batch)]
    assert len(rows) == 16
    assert all(gaps(actor, row)[0] < 1e-4 for row in rows)


@pytest.mark.parametrize("storage", [LazyStackStorage, ListStorage])
def test_replay_buffers(storage):
    actor = byte_actor(max_new_tokens=8, eos_token_id=list(range(0, 250, 6)))
    rows = run(actor, make_prompts(9, 5, 14, 5, vocab=250))
    for index, row in enumerate(rows):
        row.set("index", torch.tensor(index))
    buffer = ReplayBuffer(storage=storage(10), batch_size=6)
    buffer.extend(lazy_stack(rows))
    sampled = [row for _ in range(4) for row in list(buffer.sample())]
    assert {int(row["index"]) for row in sampled} == {0, 1, 2, 3}
    assert_same_rows(sampled, [rows[int(row["index"])] for row in sampled])


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [through_pickle, through_file, copy.deepcopy])
def test_batches_and_actors_survive_copies(copied):
    actor = byte_actor(evict_every=2, stop_strings=["xyz"], temperature=0.7)
    prompts = make_prompts(9, 5, 9, vocab=250)
    rows = run(actor, prompts)
    assert_same_rows(list(copied(lazy_stack(rows)).unbind(0)), rows)
    other = copied(actor)
    assert other.model is not actor.model and other.adapter.installed and actor.adapter.installed
    assert other.options == actor.options and other.eviction == actor.eviction
    assert_same_rows(run(other, prompts), rows)
    with torch.no_grad():
        other.model.lm_head.weight.mul_(0.5)  # is a copy in all
    assert_same_rows(run(actor, prompts), rows)
    changed = run(other, prompts)
    assert all(gaps(other, row, 0.7)[0] < 1e-4 for row in changed)
    assert gaps(actor, changed[0], 0.7)[0] > 0.1


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("policy", ["snapkv", "h2o", "streaming"])
def test_losses_on_what_was_collected(policy, temperature):
    """First ratio 1: the learner's log-probs are the sampler's. Padding of the batch included."""
    actor = byte_actor(policy, max_new_tokens=8, eos_token_id=[EOS, *range(0, 250, 9)], temperature=temperature)
    transform = MCAdvantage(grpo_size=4, prompt_key="group")
    buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=transform, batch_size=8)
    collector = LLMCollector(own_env(), policy=actor, dialog_turns_per_batch=8, total_dialog_turns=8)
    torch.manual_seed(0)
    for batch in collector:
        buffer.extend(batch.reshape(-1))
    batch = buffer[:]
    assert len({len(row["tokens", "full"]) for row in batch.unbind(0)}) > 1
    loss = SMDLoss(actor, grpo=GRPOLoss(actor, temperature=temperature))
    out = loss(batch)
    assert out.max_mismatch <= 1e-4
    out.loss_objective.backward()
    weight = actor.model.lm_head.weight
    assert weight.grad is not None and weight.grad.abs().max() > 0
    assert abs(out.max_ratio - 1) <= 1e-4 and out.clip_fraction == 0 and abs(out.kl_approx) < 1e-5


def test_losses_score_at_the_temperature_of_sampling():
    actor = byte_actor("snapkv", max_new_tokens=4, temperature=0.5)
    assert SMDLoss(actor).temperature == 0.5
    with pytest.raises(ValueError, match=r"samples at temperature 0.5.*pass temperature=0.5"):
        GRPOLoss(actor)
    greedy = byte_actor("snapkv", max_new_tokens=4, do_sample=False)
    assert GRPOLoss(greedy, temperature=0.7).temperature == 0.7


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_state_of_the_module(policy):
    """Parameters, state_dict and dtype are the model's; the adapter and the actor add none."""
    actor = make_actor(policy=policy)
    model = actor.model
    assert {id(one) for one in actor.parameters()} == {id(one) for one in model.parameters()}
    assert list(actor.state_dict()) == [f"adapter.model.{name}" for name in model.state_dict()]
    other = make_actor(policy=policy)
    with torch.no_grad():
        other.model.lm_head.weight.zero_()
    other.load_state_dict(actor.state_dict())
    prompts = make_prompts(12, 7)
    assert_same_rows(run(other, prompts), run(actor, prompts))
    assert actor.to(torch.bfloat16) is actor and model.dtype == torch.bfloat16
    for row in run(actor, prompts):
        near, dense = gaps(actor, row)
        assert row["log_probs", "full"].dtype == torch.float32
        assert near < 0.15 and (policy is None or dense > 0.3)  # the band of tests/exactness/test_parity.py
