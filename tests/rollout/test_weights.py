"""The learner's weights in collectors of this process: rows say which weights sampled them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.fsdp import fully_shard
from torchrl.collectors.llm import LLMCollector
from torchrl.envs.llm.transforms import PolicyVersion
from transformers import LlamaConfig, LlamaForCausalLM

from smdlib.rollout import dataset_env, policy_versions, push_weights
from smdlib.rollout.weights import policy_weights
from tests.rollout.actors import byte_actor, byte_model, gaps
from tests.tokenizer import VOCABULARY, byte_tokenizer

ROWS = [{"prompt": question} for question in ("Why?", "Who is there?", "How much is the fish?")]


def make_collector(policy="snapkv", make=None, **options):
    env = dataset_env(ROWS, byte_tokenizer(), lambda response, row: 0.0, prompts=1, group=2)
    options = {"track_policy_version": True, "dialog_turns_per_batch": 2, "flatten_data": True} | options
    make = make or (lambda: byte_actor(policy, max_new_tokens=5))
    return LLMCollector(env, policy_factory=make, **options)


def moved(actor, by=0.05):
    """Change the weights, as an update does."""
    with torch.no_grad():
        for weight in actor.parameters():
            weight.add_(by * torch.randn_like(weight))
    return actor


@pytest.mark.parametrize("policy", [None, "h2o"])
def test_each_row_is_of_the_weights_that_its_version_names(policy):
    collectors, learner = [make_collector(policy), make_collector(policy)], byte_actor(policy)
    snapshots = [byte_actor(policy)]
    for version in range(3):
        for collector in collectors:
            rows = collector.next()
            assert policy_versions(rows).tolist() == [version, version]
            for row in rows.unbind(0):
                assert [gaps(actor, row)[0] < 1e-4 for actor in snapshots] == [False] * version + [True]
                assert all(gaps(actor, row)[0] > 1e-3 for actor in snapshots[:version])
        assert push_weights(moved(learner), collectors) == version + 1
        snapshots.append(byte_actor(policy, model=type(learner.model)(learner.model.config)))
        snapshots[-1].load_state_dict(learner.state_dict())


def test_the_version_is_not_that_of_the_reset_before():
    collector = make_collector()
    collector.next()
    push_weights(moved(byte_actor()), [collector])
    rows = collector.next()
    assert rows["policy_version"].tolist() == [0, 0]  # drawn before the push, sampled after it
    assert policy_versions(rows).tolist() == [1, 1]


def test_turns_of_a_conversation_may_be_of_several_versions():
    env = dataset_env(ROWS, byte_tokenizer(), lambda response, row: 0.0, prompts=1, group=2, max_turns=2)
    collector = LLMCollector(
        env, policy_factory=byte_actor, dialog_turns_per_batch=2, track_policy_version=True, flatten_data=True
    )
    learner = byte_actor()
    first = collector.next()
    push_weights(moved(learner), [collector])
    second = collector.next()
    assert policy_versions(first).tolist() == [0, 0] and policy_versions(second).tolist() == [1, 1]
    assert second["turn"].tolist() == [1, 1]
    assert all(gaps(learner, row)[0] < 1e-4 and gaps(byte_actor(), row)[0] > 1e-3 for row in second.unbind(0))


def test_samplers_keep_what_they_got():
    collector, learner = make_collector(), byte_actor()
    push_weights(moved(learner), [collector])
    pushed = {name: weight.clone() for name, weight in learner.state_dict().items()}
    moved(learner)  # the next update, not pushed
    got = collector.policy.state_dict()
    assert all(torch.equal(got[name], weight) for name, weight in pushed.items())
    assert all(weight.requires_grad for weight in collector.policy.parameters())


def test_tied_weights_stay_tied():
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_attention_heads=4, tie_word_embeddings=True
    )
    config.num_hidden_layers, config.num_key_value_heads = 2, 2
    collector = make_collector(make=lambda: byte_actor(model=LlamaForCausalLM(config).eval()))
    learner = byte_actor(model=LlamaForCausalLM(config).eval())
    push_weights(learner, [collector])
    model = collector.policy.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(gaps(learner, row)[0] < 1e-4 for row in collector.next().unbind(0))


def test_weights_are_put_once():
    collectors, seen = [make_collector(), make_collector()], []
    assert push_weights(moved(byte_actor()), collectors, put=lambda weights: seen.append(weights) or weights) == 1
    (weights,) = seen
    assert not any(weight.requires_grad for weight in weights.values(True, True))


def test_what_would_make_versions_lie_is_refused():
    learner, collector = byte_actor(), make_collector()
    with pytest.raises(ValueError, match=r"collectors \[1\] count no versions"):
        push_weights(learner, [collector, make_collector(track_policy_version=False)])
    assert collector.policy_version == 0  # nothing was sent
    with pytest.raises(ValueError, match="no collectors"):
        push_weights(learner, [])
    push_weights(learner, [collector])
    with pytest.raises(RuntimeError, match=r"at versions \[2, 1\]"):
        push_weights(learner, [collector, make_collector()])
    with pytest.raises(ValueError, match="version_type=int"):
        push_weights(learner, [make_collector(track_policy_version=PolicyVersion(version_type="uuid"))])
    with pytest.raises(KeyError, match="track_policy_version"):
        policy_versions(make_collector(track_policy_version=False).next())


def test_weights_of_other_sizes_are_refused():
    other, collector = byte_model().config, make_collector()
    other.hidden_size = 64
    with pytest.raises(RuntimeError, match="size"):
        push_weights(byte_actor(model=LlamaForCausalLM(other)), [collector])
    assert collector.policy_version == 0


def test_weights_of_other_names_are_ignored_by_torchrl():
    """No promise of ours: should TorchRL begin to refuse them, the note in `push_weights` can go."""
    other, collector = byte_model().config, make_collector()
    other.num_hidden_layers = 3
    assert push_weights(byte_actor(model=LlamaForCausalLM(other)), [collector]) == 1


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_sharded_weights_are_gathered(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        learner, collector = byte_actor(), make_collector()
        fully_shard(moved(learner).model)
        weights = policy_weights(learner)
        assert all(type(weight) is torch.Tensor for weight in weights.values(True, True))
        push_weights(learner, [collector])
        got = TensorDict.from_module(collector.policy).data
        assert (got == weights).all()
    finally:
        dist.destroy_process_group()


def test_no_need_of_ray():
    script = """
import sys
sys.modules["ray"] = None  # as if it were not installed
from smdlib.rollout import SparseActor, policy_versions, push_weights
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
