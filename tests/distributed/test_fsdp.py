"""The learner on FSDP2: two ranks give the loss, gradients and updates of one process (see `learner.py`)."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tests.distributed.learner import PARITY, REFUSED, WORLD, worker

pytestmark = [
    pytest.mark.slow,  # starting the ranks, once for all tests
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
]
BOUND = 1e-5


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    """Results of every case, by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    context = spawn(worker, (str(folder),), nprocs=WORLD, join=False)
    assert context is not None
    end = time.monotonic() + 150  # longer than a collective may take, so that its own error is seen
    while not context.join(timeout=1):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            pytest.fail("the ranks wait for each other")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def outcome(ranks: list[dict], name: str) -> list[Any]:
    found = [rank[name] for rank in ranks]
    failed = [text for text in found if isinstance(text, str) and text.startswith("Traceback")]
    assert not failed, failed[0]
    return found


@pytest.mark.parametrize("name", PARITY)
def test_loss_and_gradients_equal_one_process(ranks, name):
    for found in outcome(ranks, name):
        assert found["scale"] > 0.1 and found["size"] > 0.01, "nothing to compare"
        assert found["names"] == found["parameters"], "a parameter without gradient"
        assert found["loss"] <= BOUND
        assert found["gradient"] <= BOUND, found["where"]
        assert found["acceptance"] == (name == "acceptance")
        if name == "float64":
            assert found["gradient"] <= 1e-13


@pytest.mark.parametrize("model", ["untied", "tied", "soft-capped head"])
def test_checkpointing_ran_the_layers_again(ranks, model):
    # Prompts, masked and dense responses, twice for the check of the head, and two more in the backward pass.
    assert [found["calls"] for found in outcome(ranks, f"{model}, without checkpointing")] == [5, 5]
    assert [found["calls"] for found in outcome(ranks, f"{model}, with checkpointing")] == [7, 7]


def test_prompts_are_shared_where_all_ranks_can(ranks):
    assert [found["prompts"] for found in outcome(ranks, "three rows and one")] == [pytest.approx(2 / 3), 1.0]
    # A rank that ran other passes than the rest would wait for them forever.
    assert [found["prompts"] for found in outcome(ranks, "prompts shared on one")] == [1.0, 1.0]


def test_the_loss_has_to_be_multiplied_by_the_number_of_ranks(ranks):
    for found in outcome(ranks, "forgotten_world_size"):
        assert found["gradient"] == pytest.approx(found["scale"] / 2, rel=1e-3)


def test_log_probs_equal_one_process(ranks):
    for found in outcome(ranks, "log_probs"):
        assert len(found) == 6 and max(found.values()) <= BOUND, found


def test_accumulated_and_clipped_updates_equal_one_process(ranks):
    for found in outcome(ranks, "updates"):
        assert found["weights"] <= BOUND
        assert found["norms"][2:] == pytest.approx(found["norms"][:2], rel=1e-5) and min(found["norms"]) > 0.5


def test_mixed_precision_equals_a_model_in_that_precision(ranks):
    for found in outcome(ranks, "mixed_precision"):
        assert found["loss"] <= BOUND and found["gradient"] <= BOUND
        assert found["dtypes"] == {"torch.float32"}


def test_adapter_comes_and_goes_on_a_sharded_model(ranks):
    for found in outcome(ranks, "removed"):
        assert found["plain"] <= BOUND and found["again"] and found["attends"] == "sdpa"


MESSAGES = {
    "layers only": "Call fully_shard on the layers and then on the whole model",
    "base model only": "Call fully_shard on the layers and then on the whole model",
    "the adapter": r"fully_shard\(adapter.model\)",
    "tie broken": "shared",  # torch's own words
    "scores rounded": "output_dtype",
    "tensor parallel": "DTensor that FSDP2 does not gather",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_on_every_rank(ranks, name):
    for found in outcome(ranks, "refused: " + name):
        with pytest.raises(ValueError, match=MESSAGES[name]):
            kind, _, text = found.partition(": ")
            raise {"ValueError": ValueError}.get(kind, RuntimeError)(text)


def test_a_rank_that_fails_leaves_no_rank_waiting(ranks):
    other, failed = outcome(ranks, "one_rank_fails")
    assert failed["error"].startswith("KeyError") and "shadow mask" in failed["error"]
    assert "by peer" in other["error"] and other["seconds"] < 30


ALONE = """
import sys
import time
from transformers import LlamaConfig, LlamaForCausalLM
import smdlib, torch
before = "torch.distributed.fsdp" in sys.modules
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
actor = smdlib.MaskedAttentionAdapter(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)))
head, hidden = actor.head(), actor.hidden_states(torch.arange(5)[None])
assert head.owner is None and head.whole(lambda head: head.logits(hidden)).shape == (1, 5, 32)
assert ("torch.distributed.fsdp" in sys.modules) == before
"""


def test_one_process_needs_no_fsdp():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
