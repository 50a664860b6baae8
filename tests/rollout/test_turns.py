"""Conversations of two turns: each turn's tokens, log-probs and mask are its own, all the way into the loss."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.collectors.llm import LLMCollector
from transformers import LlamaConfig, LlamaForCausalLM

from smdlib import GRPOLoss, SMDLoss, SparseActor
from smdlib.rollout import dataset_env
from tests.rollout.actors import gaps
from tests.tokenizer import EOS, VOCABULARY, byte_tokenizer

ROWS = [{"prompt": "a register of five offices"}, {"prompt": "codes: 1 2 3 4 5 6 7 8"}]


def converse(evict_every: int | None) -> tuple[SparseActor, list[list[TensorDictBase]]]:
    """Conversations of two turns, two samples of two prompts, from the collector."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=EOS,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1.4 / weight.shape[-1] ** 0.5)
    actor = SparseActor(
        model.eval(), byte_tokenizer(), policy="snapkv", budget=0.3, evict_every=evict_every,
        generate_kwargs={"max_new_tokens": 6, "temperature": 0.8},
    )  # fmt: skip
    env = dataset_env(
        ROWS, byte_tokenizer(), lambda response, row: float(len(response)), prompts=2, group=2, max_turns=2,
        next_message=lambda response, row, turn: "go on", shuffle=False,
    )  # fmt: skip
    collector = LLMCollector(env, policy=actor, dialog_turns_per_batch=8, total_dialog_turns=8)
    (batch,) = list(collector)
    assert batch.shape == (4, 2)
    return actor, [list(conversation.unbind(0)) for conversation in batch.unbind(0)]


@pytest.mark.parametrize("evict_every", [None, 2])
def test_each_turn_has_its_own_mask(evict_every):
    actor, conversations = converse(evict_every)
    for first, second in conversations:
        for turn in (first, second):
            prompt, full = turn["tokens", "prompt"], turn["tokens", "full"]
            sampled = torch.arange(len(full)) >= len(prompt)
            assert torch.equal(turn["masks", "all_assistant_mask"], sampled)
            assert torch.equal(turn["log_probs", "full"].isfinite(), sampled)
            assert turn["shadow"].num_tokens == len(full)
            replayed, dense = gaps(actor, turn, 0.8)
            assert replayed < 1e-4 < dense
        # The second turn was prefilled anew: it goes on from the tokens of the first, under a record of its own.
        before, after = first["tokens", "full"], second["tokens", "prompt"]
        assert torch.equal(after[: len(before)], before) and len(after) > len(before)
        shared = min(first["shadow"].num_tokens, second["shadow"].num_tokens)
        assert not torch.equal(first["shadow"].evicted_at[:shared], second["shadow"].evicted_at[:shared])
        # A mask knows its tokens, so the turns' masks cannot be mixed up.
        with pytest.raises(ValueError, match="covers"):
            actor.log_probs(second["tokens", "full"][None], None, first["shadow"][None], 0.8)


def test_both_turns_are_learned_on_policy():
    actor, conversations = converse(None)
    loss = SMDLoss(actor, grpo=GRPOLoss(actor, temperature=0.8))
    for turn in (0, 1):
        rows = lazy_stack([conversation[turn] for conversation in conversations])
        rows["advantage"] = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None]
        output = loss(rows)
        assert float(output.max_mismatch) < 1e-4
        # First turns share the prompts of the data set; in second turns every conversation has gone its own way.
        assert float(output.prompts_per_row) == (0.5 if turn == 0 else 1.0)
