"""Rollouts in processes of their own: Ray workers sample with evicted keys, the learner takes SMD updates here.

    python examples/distributed/ray_rollout.py                    # 2 workers on this machine's CPU, a tiny random Llama
    python examples/distributed/ray_rollout.py --model smollm2    # the register task; or any hub id or folder

Each worker is a TorchRL ``RayLLMCollector`` with a model and prompts of its own. A replay buffer in a third process
takes the rows and compares each with its group. After every update ``push_weights`` gives all workers the new weights,
and their next rows carry the new version. The buffer keeps the rows of ``--keep`` updates and each batch is drawn from
all of them, so some rows were sampled by older weights. What is printed is split by staleness: rows of the learner's
own weights agree with the sampler to rounding (the ratio is 1), older rows differ by as much as the weights have moved.

Workers also write a checksum of each shadow mask, which is compared here with the bytes that arrived.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import tyro
from tensordict import TensorDictBase
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torchrl.collectors.llm import RayLLMCollector
from torchrl.data import LazyStackStorage, RayReplayBuffer, SamplerWithoutReplacement
from torchrl.objectives.llm import MCAdvantage
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from smdlib import DenseToSparseKL, ShadowMask, SMDLoss, SparseActor
from smdlib.rollout import DatasetEnv, dataset_env, policy_versions, push_weights

EXAMPLES = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class Settings:
    """Options of the demonstration."""

    model: str | None = None
    """Hub id or folder of a causal language model, or smollm2; a tiny random Llama by default."""
    workers: int = 2
    updates: int = 8
    prompts: int = 2
    """Prompts per worker and update."""
    group: int = 8
    """Samples per prompt."""
    keep: int = 2
    """Updates whose rows the buffer keeps; 1 is on policy."""
    policy: str = "snapkv"
    budget: float = 0.5
    max_new_tokens: int = 16
    learning_rate: float | None = None
    """5e-3 for the tiny model, 1e-5 for others."""
    coeff: float = 0.1
    """Weight of the dense-to-sparse KL."""
    timeout: float = 600.0
    """Seconds after which a rollout counts as lost."""
    seed: int = 0


def even_words(response: str, row: Any) -> float:
    """Share of words with an even number: a reward that anyone can check."""
    words = response.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))


def build(cfg: Settings) -> tuple[Any, Any]:
    """Return the model and its tokenizer, the same in every process."""
    if cfg.model is not None:
        from smollm2 import load_model

        return load_model(None if cfg.model == "smollm2" else cfg.model)
    torch.manual_seed(cfg.seed)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(64)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes))
    with torch.no_grad():  # initial weights are so small that no key matters
        for weight in model.parameters():
            weight.mul_(4.0 if weight.ndim == 2 else 1.0)
    return model.eval(), PreTrainedTokenizerFast(tokenizer_object=words)


def checksum(shadow: ShadowMask) -> Tensor:
    """SHA-256 of a mask's bytes, uint8 ``[32]``."""
    return torch.tensor(list(hashlib.sha256(shadow.evicted_at.contiguous().numpy().tobytes()).digest())).byte()


class SigningActor(SparseActor):
    """Writes a checksum of each shadow mask next to it, so that the other end can tell what arrived."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows = super().forward(tensordict)
        for row in rows.unbind(0):
            row["checksum"] = checksum(row["shadow"])
        return rows


def make_actor(cfg: Settings, worker: int) -> SparseActor:
    """Build a policy: each worker calls this, and the learner as number -1."""
    model, tokenizer = build(cfg)
    options = {"max_new_tokens": cfg.max_new_tokens} | ({"eos_token_id": None} if cfg.model is None else {})
    actor = SigningActor(model, tokenizer, policy=cfg.policy, budget=cfg.budget, generate_kwargs=options)
    torch.manual_seed(cfg.seed + 1 + worker)  # after the model, whose weights must not depend on it
    return actor


def make_env(cfg: Settings, worker: int) -> DatasetEnv:
    """Build a worker's environment: of all prompts, those that no other worker gets."""
    _, tokenizer = build(cfg)
    options: dict[str, Any] = {"prompts": cfg.prompts, "group": cfg.group, "seed": cfg.seed}
    options["shard"] = (worker, cfg.workers)
    if cfg.model is not None:
        from tasks import register

        return dataset_env(register.make_rows(512, seed=cfg.seed), tokenizer, register.reward, **options)
    numbers = torch.randint(64, (512, 24), generator=torch.Generator().manual_seed(cfg.seed)).tolist()
    rows = [{"prompt": " ".join(f"w{number}" for number in line)} for line in numbers]
    return dataset_env(rows, tokenizer, even_words, **options)


@contextmanager
def ray_on_this_machine(cfg: Settings) -> Iterator[None]:
    """Start Ray for this script alone; whatever happens, none of its processes stays behind."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing leaves this machine
    # Workers do not inherit the learner's sys.path.
    sys.path.insert(0, EXAMPLES)
    os.environ["PYTHONPATH"] = os.pathsep.join([EXAMPLES, os.environ.get("PYTHONPATH", "")])
    # CPUs are what Ray counts, not what the machine has: a worker that found none left would wait without a word.
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "_node_ip_address": "127.0.0.1"}
    ray.init(address="local", num_cpus=cfg.workers + 1, **options)
    try:
        yield
    finally:
        ray.shutdown()


def learn(batch: TensorDictBase, version: int, loss_module: SMDLoss, optimizer: Any) -> tuple[float, dict[int, float]]:
    """Take one step; return the loss, and the largest mismatch in nats of the rows of each staleness."""
    lengths = torch.tensor([int(row["masks", "all_assistant_mask"].sum()) for row in batch.unbind(0)])
    items = loss_module.grpo.aggregation.count(lengths), loss_module.distill.aggregation.count(lengths)
    stale = version - policy_versions(batch)
    total, mismatch = 0.0, {}
    for age in stale.unique().tolist():
        output = loss_module(batch[stale == age], *items)
        loss = output.loss_objective + output.loss_distill
        loss.backward()  # gradients of the parts add up to those of the batch
        total, mismatch[age] = total + loss.item(), output.max_mismatch.item()
    optimizer.step()
    optimizer.zero_grad()
    return total, mismatch


def main(cfg: Settings) -> None:
    """Train."""
    rows = cfg.workers * cfg.prompts * cfg.group
    with ray_on_this_machine(cfg):
        buffer = RayReplayBuffer(
            storage=partial(LazyStackStorage, cfg.keep * rows),
            sampler=SamplerWithoutReplacement,
            transform_factory=partial(MCAdvantage, grpo_size=cfg.group, prompt_key="group"),
            batch_size=rows,
            remote_config={"num_cpus": 1},
        )
        workers = [
            RayLLMCollector(
                partial(make_env, cfg, worker),
                policy_factory=partial(make_actor, cfg, worker),
                dialog_turns_per_batch=cfg.prompts * cfg.group,
                # Not endless: on an error Ray asks for the collector's length, and one without takes the process down.
                total_dialog_turns=cfg.updates * cfg.prompts * cfg.group,
                replay_buffer=buffer.client(),  # the buffer itself cannot be sent
                track_policy_version=True,
                remote_config={"num_cpus": 1},
            )
            for worker in range(cfg.workers)
        ]
        actor = make_actor(cfg, -1)
        loss_module = SMDLoss(actor, distill=DenseToSparseKL(actor, coeff=cfg.coeff))
        optimizer = torch.optim.AdamW(actor.parameters(), lr=cfg.learning_rate or (1e-5 if cfg.model else 5e-3))
        pool = ThreadPoolExecutor(cfg.workers)  # a collector's next() waits for its rollout
        version = 0
        for update in range(cfg.updates):
            start = time.perf_counter()
            list(pool.map(RayLLMCollector.next, workers, timeout=cfg.timeout))
            sampled = time.perf_counter() - start
            batch = buffer.sample()
            broken = sum(not torch.equal(checksum(row["shadow"]), row["checksum"]) for row in batch.unbind(0))
            loss, mismatch = learn(batch, version, loss_module, optimizer)
            pushed = time.perf_counter()
            version = push_weights(actor, workers, put=ray.put)
            versions = Counter(policy_versions(batch).tolist())
            gaps = ", ".join(f"{age}: {value:.1e}" for age, value in mismatch.items())
            print(
                f"update {update + 1}: reward {batch['next', 'reward'].mean():.3f}, loss {loss:+.4f}, rows by version "
                f"{dict(sorted(versions.items()))}, largest mismatch by staleness {{{gaps}}} nats, "
                f"{len(batch) - broken} of {len(batch)} masks intact, {sampled:.1f} s sampling, "
                f"{time.perf_counter() - pushed:.2f} s for the weights",
                flush=True,
            )
            if broken or mismatch.get(0, 0.0) > 1e-4:
                raise SystemExit("the rows are not what was sampled, or not by these weights")


if __name__ == "__main__":
    main(tyro.cli(Settings))
