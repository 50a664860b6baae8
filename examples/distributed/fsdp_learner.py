"""The SMD learner on FSDP2: each rank holds a share of the weights and a share of the rows.

    python examples/distributed/fsdp_learner.py                     # 2 ranks on this machine's CPU, a tiny random Llama
    python examples/distributed/fsdp_learner.py --model HuggingFaceTB/SmolLM2-135M
    torchrun --nproc-per-node 4 examples/distributed/fsdp_learner.py

Rank 0 samples with evicted keys and takes the same updates alone, on the whole batch; each update prints how far the
gradients of the ranks are from those. ``SMDLoss`` is the same object in both. Three things make them equal:

1. ``fully_shard`` on every decoder layer, then on the whole model (not on a part of it, not on the adapter);
2. the item counts are those of all ranks' rows;
3. FSDP2 averages gradients over ranks, where a sum is meant: each rank's loss is multiplied by the number of ranks.

Every rank runs the model equally often, or the others wait: give each the same number of micro-batches.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import tyro
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from smdlib import (
    CompressedCache,
    DenseToSparseKL,
    GRPOLoss,
    MaskedAttentionAdapter,
    ShadowMaskRecorder,
    SMDLoss,
    group_advantage,
)


@dataclass(frozen=True)
class Settings:
    """Options of the demonstration."""

    model: str | None = None
    """Hub id or folder of a causal language model; a tiny random Llama by default."""
    ranks: int = 2
    """Processes to start; torchrun starts its own."""
    updates: int = 3
    group: int = 3
    """Samples per prompt; with two prompts, 3 rows for each of two ranks."""
    new_tokens: int = 16
    learning_rate: float = 1e-3
    coeff: float = 0.1
    """Weight of the dense-to-sparse KL."""
    seed: int = 0


def build(cfg: Settings) -> tuple[Any, Tensor, Tensor]:
    """Return the model, the same on every rank, and two padded prompts of unequal lengths."""
    torch.manual_seed(cfg.seed)
    if cfg.model is None:
        sizes: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        }
        config = LlamaConfig(vocab_size=256, num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=7, **sizes)
        model, ids, mask = LlamaForCausalLM(config), torch.randint(8, 256, (2, 24)), torch.ones(2, 24, dtype=torch.long)
        mask[1, :9] = 0
        with torch.no_grad():  # initial weights are so small that no key matters
            for weight in model.parameters():
                weight.mul_(4.0 if weight.ndim == 2 else 1.0)
        return model.eval(), ids, mask
    tokenizer = AutoTokenizer.from_pretrained(cfg.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = ["The keeper climbed the stairs every evening to light the lamp. " * times for times in (4, 2)]
    prompts = tokenizer(texts, return_tensors="pt", padding=True)
    model = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
    return model.eval(), prompts["input_ids"], prompts["attention_mask"]


@torch.no_grad()
def sample(model, ids: Tensor, mask: Tensor, cfg: Settings) -> TensorDict:
    """Sample ``group`` responses per prompt with SnapKV at half the keys: rows with TorchRL's keys and the record."""
    ids, mask = ids.repeat_interleave(cfg.group, 0), mask.repeat_interleave(cfg.group, 0)
    recorder, eos = ShadowMaskRecorder(), model.generation_config.eos_token_id
    cache = CompressedCache(model.config, "snapkv", 0.5, recorder=recorder, evict_every=4)
    options = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=cfg.new_tokens, **options)
    response = out.sequences[:, ids.shape[1] :]
    ends = torch.isin(response, torch.tensor([] if eos is None else eos)).int()
    alive = ends.cumsum(1) - ends == 0  # up to the end token, itself included
    log_probs = torch.stack(out.logits, 1).log_softmax(-1).gather(-1, response[..., None]).squeeze(-1)
    attention = torch.cat([mask.bool(), alive], 1)
    # A reward that anyone can check: the share of even tokens.
    rewards = ((response % 2 == 0) & alive).sum(1) / alive.sum(1)
    rows = {
        ("tokens", "full"): out.sequences,
        ("masks", "all_attention_mask"): attention,
        ("masks", "all_assistant_mask"): torch.cat([torch.zeros_like(mask).bool(), alive], 1),
        ("log_probs", "full"): torch.cat([torch.full(mask.shape, torch.nan), log_probs], 1),
        "shadow": recorder.shadow_mask(attention.sum(1)),
        "advantage": group_advantage(rewards, cfg.group),
    }
    return TensorDict(rows, batch_size=[len(ids)])


class Learner:
    """Takes SMD updates on its part of a batch; one process and every rank of many do the same."""

    def __init__(self, adapter: MaskedAttentionAdapter, cfg: Settings) -> None:
        self.model = adapter.model
        self.loss = SMDLoss(adapter, grpo=GRPOLoss(adapter), distill=DenseToSparseKL(adapter, coeff=cfg.coeff))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.learning_rate)
        self.model.train()
        self.model.activation_checkpointing_enable()

    def update(self, part: TensorDict, lengths: Tensor, ranks: int) -> tuple[Tensor, float, dict[str, Tensor]]:
        """Return this part's loss, the norm of all gradients, and the gradients; ``lengths [B]`` of the whole batch."""
        items = self.loss.grpo.aggregation.count(lengths), self.loss.distill.aggregation.count(lengths)
        output = self.loss(part, *items)
        loss = output.loss_objective + output.loss_distill
        (ranks * loss).backward()
        gradients = {name: whole(weight.grad).clone() for name, weight in self.model.named_parameters()}
        norm = whole(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), norm.item(), gradients


def whole(tensor) -> Tensor:
    """Gather a sharded tensor; every rank has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def learn(rank: int, cfg: Settings, folder: str | None) -> None:
    """Run one rank."""
    if folder is None:  # torchrun
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=cfg.ranks)
        torch.set_num_threads(max(1, torch.get_num_threads() // cfg.ranks))
    ranks = dist.get_world_size()
    model, ids, mask = build(cfg)
    adapter = MaskedAttentionAdapter(model)
    shared = [sample(model, ids, mask, cfg) if rank == 0 else None]
    dist.broadcast_object_list(shared)
    batch = shared[0]
    assert batch is not None
    lengths = batch["masks", "all_assistant_mask"].sum(1)
    if len(batch) < ranks:
        raise SystemExit(f"{len(batch)} rows for {ranks} ranks: each needs one at least; raise --group.")
    alone = Learner(copy.deepcopy(adapter), cfg) if rank == 0 else None

    for layer in model.base_model.layers:
        fully_shard(layer)
    fully_shard(model)
    learner = Learner(adapter, cfg)
    for update in range(cfg.updates):
        start = time.perf_counter()
        total, norm, gradients = learner.update(batch[rank::ranks], lengths, ranks)
        dist.all_reduce(total)
        seconds = time.perf_counter() - start
        if alone is not None:
            expected, _, truth = alone.update(batch, lengths, 1)
            gap = max((gradients[name] - truth[name]).abs().max().item() for name in truth)
            print(
                f"update {update + 1}: loss {total:+.5f} (one process {expected:+.5f}), gradient norm {norm:.3f}, "
                f"largest gradient difference {gap:.1e}, {seconds:.1f} s on {ranks} ranks"
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    options = tyro.cli(Settings)
    if "RANK" in os.environ:
        learn(int(os.environ["RANK"]), options, None)
    else:
        with tempfile.TemporaryDirectory() as place:
            spawn(learn, (options, place), nprocs=options.ranks)
