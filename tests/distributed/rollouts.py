"""What `test_ray.py` looks at: rows that Ray workers sampled, and the learner as it was when they did.

    python -m tests.distributed.rollouts FILE

A script of its own: one process of pytest runs it for all, and Ray's processes end with it, also when it hangs.
"""

from __future__ import annotations

import copy
import hashlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smdlib import ShadowMask, SparseActor, make_policy
from smdlib.rollout import DatasetEnv, dataset_env, push_weights
from tests.rollout.actors import POLICIES, byte_model
from tests.tokenizer import EOS, byte_tokenizer

GROUP, PROMPTS, WORKERS, ROUNDS, TEMPERATURE = 4, 2, 2, 3, 1.3
ROWS = WORKERS * PROMPTS * GROUP
QUESTIONS = ["Why?", "Who is there?", "How much is the fish?", "Is it?", "Where does the river end?", "When?", "Whose?"]


def checksum(shadow: ShadowMask) -> Tensor:
    """SHA-256 of all that a mask holds, its types and shapes included: uint8 ``[32]``."""
    digest = hashlib.sha256()
    for tensor in (shadow.evicted_at, shadow.token_ids):
        assert tensor is not None
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + tensor.contiguous().numpy().tobytes())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


class SigningActor(SparseActor):
    """Writes the checksum of each mask, and which worker made it, where it was made."""

    worker = -1

    def forward(self, tensordict: Any) -> Any:
        rows = super().forward(tensordict)
        for row in rows.unbind(0):
            row["checksum"], row["worker"] = checksum(row["shadow"]), torch.tensor(self.worker)
        return rows


def make_signing_actor(policy: str | None, worker: int) -> SigningActor:
    """An actor whose rows end at different lengths; the weights are the same in every process."""
    eviction = {} if policy is None else {"budget": 0.5, "evict_every": 3}
    actor = SigningActor(
        byte_model(),
        byte_tokenizer(),
        policy=None if policy is None else make_policy(policy, **POLICIES[policy]),
        **eviction,
        generate_kwargs={
            "max_new_tokens": 10,
            "eos_token_id": [EOS, *range(0, 250, 9)],
            "temperature": TEMPERATURE,
        },
    )
    actor.worker = worker
    torch.manual_seed(worker)
    return actor


def lengths(response: str, row: Any) -> float:
    """A reward that differs within a group."""
    return float(len(response) % 7)


def only_why(response: str, row: Any) -> float:
    """A reward function that fails at the second prompt."""
    if row["prompt"] != "Why?":
        raise KeyError("answer")
    return 1.0


def make_env(worker: int) -> DatasetEnv:
    """A worker's share of the prompts."""
    rows = [{"prompt": question} for question in QUESTIONS]
    return dataset_env(
        rows, byte_tokenizer(), lengths, prompts=PROMPTS, group=GROUP, shuffle=False, shard=(worker, WORKERS)
    )


def make_failing_env() -> DatasetEnv:
    """One prompt after the other; the second one's reward raises."""
    rows = [{"prompt": question} for question in QUESTIONS]
    return dataset_env(rows, byte_tokenizer(), only_why, prompts=1, group=GROUP, shuffle=False)


def trained() -> dict[str, Any]:
    """Two workers and a buffer, three rounds with an update after each; the learner's weights move at random."""
    import ray
    from torchrl.collectors.llm import RayLLMCollector
    from torchrl.data import LazyStackStorage, RayReplayBuffer, SamplerWithoutReplacement
    from torchrl.objectives.llm import MCAdvantage

    buffer = RayReplayBuffer(
        storage=partial(LazyStackStorage, ROWS),
        sampler=SamplerWithoutReplacement,
        transform_factory=partial(MCAdvantage, grpo_size=GROUP, prompt_key="group"),
        batch_size=ROWS,
        remote_config={"num_cpus": 1},
    )
    workers = [
        RayLLMCollector(
            partial(make_env, worker),
            policy_factory=partial(make_signing_actor, "snapkv", worker),
            dialog_turns_per_batch=PROMPTS * GROUP,
            total_dialog_turns=ROUNDS * PROMPTS * GROUP,
            replay_buffer=buffer.client(),
            track_policy_version=True,
            remote_config={"num_cpus": 1},
        )
        for worker in range(WORKERS)
    ]
    learner, generator = make_signing_actor("snapkv", -1), torch.Generator().manual_seed(5)
    found: dict[str, Any] = {"rounds": [], "learners": [], "pushed": [], "puts": 0}

    def put(weights: Any) -> Any:
        found["puts"] += 1
        return ray.put(weights)

    with ThreadPoolExecutor(WORKERS) as pool:
        for _ in range(ROUNDS):
            list(pool.map(RayLLMCollector.next, workers))
            found["rounds"].append(buffer.sample())
            found["learners"].append(copy.deepcopy(learner))
            with torch.no_grad():
                for weight in learner.parameters():
                    weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
            found["pushed"].append(push_weights(learner, workers, put=put))
    return found | {"written": buffer.write_count}


def dense_and_failing() -> dict[str, Any]:
    """A dense worker without a buffer, whose rows come as they are; its second prompt's reward raises."""
    from torchrl.collectors.llm import RayLLMCollector

    worker = RayLLMCollector(
        make_failing_env,
        policy_factory=partial(make_signing_actor, None, 0),
        dialog_turns_per_batch=GROUP,
        total_dialog_turns=9 * GROUP,  # endless collectors have no length, for which Ray asks: the process would die
        track_policy_version=True,
        flatten_data=True,
        remote_config={"num_cpus": 1},
    )
    found: dict[str, Any] = {"dense": worker.next(), "error": "none", "bases": []}
    try:
        worker.next()
    except Exception as error:
        found |= {"error": str(error), "bases": [base.__name__ for base in type(error).__mro__]}
    return found


def main(file: str) -> None:
    """Write what both found."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing leaves this machine
    os.environ["PYTHONPATH"] = os.getcwd()  # workers do not inherit sys.path
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "_node_ip_address": "127.0.0.1"}
    # Small: a container may have little shared memory.
    ray.init(address="local", num_cpus=WORKERS + 2, object_store_memory=80 * 2**20, **options)
    torch.save(trained() | dense_and_failing(), file)
    ray.shutdown()


if __name__ == "__main__":
    # By its full name: what `__main__` defines would be sent to workers, and to the file, as `__main__`'s.
    from tests.distributed import rollouts

    rollouts.main(sys.argv[1])
