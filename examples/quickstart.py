"""Sample with evicted keys, replay them exactly, and take a few SMD updates, on a laptop's CPU.

Three parts, from top to bottom:

1. For every policy and budget: how far are the sampler's log-probs from those of a learner that attends with the
   recorded shadow mask, and from those of a learner that attends with every key? What does the cache weigh?
2. A picture of what each head kept.
3. A few updates: groups of samples under SnapKV at half the keys, a verifiable reward, SMDLoss.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from documents import build_prompts, load_documents, reward
from rich.console import Console
from rich.progress import track
from rich.table import Table
from smollm2 import load_model
from tensordict import TensorDict
from torch import Tensor

import smdlib
from smdlib import (
    CompressedCache,
    DenseToSparseKL,
    GRPOLoss,
    MaskedAttentionAdapter,
    ShadowMask,
    ShadowMaskRecorder,
    SMDLoss,
    group_advantage,
)

POLICIES = {"streaming": {}, "recent": {"sinks": 1}, "random": {}, "snapkv": {}, "h2o": {}}


@dataclass(frozen=True)
class Settings:
    """Options of the demonstration."""

    model: str | None = None
    """Hub id or folder of a causal language model; SmolLM2-135M-Instruct by default."""
    budgets: tuple[float, ...] = (0.5, 0.3)
    """Shares of the prompt's keys to keep in part 1."""
    new_tokens: int = 24
    """Longest response, in tokens."""
    temperature: float = 0.7
    """Of sampling and of every log-prob."""
    updates: int = 4
    """Updates of part 3."""
    group: int = 6
    """Samples per prompt."""
    learning_rate: float = 5e-6
    coeff: float = 0.1
    """Weight of the dense-to-sparse KL."""
    seed: int = 0
    out: Path = Path("examples/out")
    """Where the plot goes."""


@torch.no_grad()
def sample(model, tokenizer, rows: list[dict], policy, budget: float, group: int, cfg: Settings) -> TensorDict:
    """Prefill each prompt once, sample ``group`` responses of it, and return rows with TorchRL's keys."""
    prompts = build_prompts(rows, tokenizer)
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    recorder = ShadowMaskRecorder()
    cache = CompressedCache(
        model.config, policy, budget, recorder=recorder, reserve=cfg.new_tokens, prompt_lengths=mask.sum(1)
    )
    # All but the last prompt token once per prompt; generate() goes on from there for every sample.
    model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], position_ids=_positions(mask[:, :-1]), cache=cache)
    cache.batch_repeat_interleave(group)
    ids, mask = ids.repeat_interleave(group, 0), mask.repeat_interleave(group, 0)
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        cache=cache,
        max_new_tokens=cfg.new_tokens,
        do_sample=True,
        temperature=cfg.temperature,
        top_k=0,
        top_p=1.0,
        pad_token_id=tokenizer.pad_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    response = out.sequences[:, ids.shape[1] :]
    # A token counts until the end-of-turn token, itself included (it may equal the padding token).
    ended = (response == model.generation_config.eos_token_id).int().cumsum(1)
    alive = (ended - (response == model.generation_config.eos_token_id).int()) == 0
    steps = torch.stack(out.logits, 1).float() / cfg.temperature
    log_probs = (steps.gather(-1, response[..., None]).squeeze(-1) - steps.logsumexp(-1)).masked_fill(~alive, torch.nan)
    attention_mask = torch.cat([mask.bool(), alive], 1)
    return TensorDict(
        {
            ("tokens", "full"): out.sequences,
            ("masks", "all_attention_mask"): attention_mask,
            ("masks", "all_assistant_mask"): torch.cat([torch.zeros_like(mask, dtype=torch.bool), alive], 1),
            ("log_probs", "full"): torch.cat([torch.full(mask.shape, torch.nan), log_probs], 1),
            "shadow": recorder.shadow_mask(attention_mask.sum(1)),
            "prompt_length": mask.sum(1),
            "kv_bytes": torch.full((len(ids),), cache.kv_bytes() / len(ids)),
        },
        batch_size=[len(ids)],
    )


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def dense_kv_bytes(model, batch: TensorDict) -> float:
    """Bytes per row that a plain cache of the same tokens takes."""
    config = model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * head_size * next(model.parameters()).element_size()
    return per_token * batch["tokens", "full"].shape[1]


def compare_policies(model, tokenizer, adapter: MaskedAttentionAdapter, rows: list[dict], cfg: Settings) -> tuple:
    """Part 1: sampled against replayed and against dense log-probs, for every policy and budget."""
    table = Table(title=f"{len(rows)} prompts, {cfg.new_tokens} tokens each, float32; differences in nats")
    table.add_column("policy")
    for name in (
        "budget",
        "max |sparse - shadow|",
        "mean",
        "max |sparse - dense|",
        "mean",
        "KV / dense",
        "keys seen by response",
    ):
        table.add_column(name, justify="right")
    kept, worst = None, 0.0
    cases = [(name, budget) for budget in cfg.budgets for name in POLICIES]
    for name, budget in track(cases, description="policies", transient=True):
        policy = smdlib.make_policy(name, **POLICIES[name])
        torch.manual_seed(cfg.seed)
        batch = sample(model, tokenizer, rows, policy, budget, 1, cfg)
        tokens, attention = batch["tokens", "full"], batch["masks", "all_attention_mask"]
        with torch.no_grad():
            shadow = adapter.log_probs(tokens, attention, batch["shadow"], cfg.temperature)
            dense = adapter.log_probs(tokens, attention, None, cfg.temperature)
        chosen = batch["masks", "all_assistant_mask"]
        gaps = [(scored - batch["log_probs", "full"])[chosen].abs() for scored in (shadow, dense)]
        numbers = [f"{gap:.1e}" for gap in (gaps[0].max(), gaps[0].mean())]
        numbers += [f"{gap:.2f}" for gap in (gaps[1].max(), gaps[1].mean())]
        share = float(batch["kv_bytes"][0]) / dense_kv_bytes(model, batch)
        record: ShadowMask = batch.get("shadow")
        seen = record.retention(attention.sum(1), first=batch["prompt_length"]).mean()
        table.add_row(name, f"{budget:.0%}", *numbers, f"{share:.0%}", f"{float(seen):.0%}")
        worst = max(worst, float(gaps[0].max()))
        if name == "snapkv" and kept is None:
            kept = batch
    return table, kept, worst


def train(model, tokenizer, adapter: MaskedAttentionAdapter, data, cfg: Settings, console: Console) -> None:
    """Part 3: SMD updates, one prompt's group each, gradients accumulated over micro-batches of one row."""
    loss_module = SMDLoss(
        adapter,
        grpo=GRPOLoss(adapter, temperature=cfg.temperature),
        distill=DenseToSparseKL(adapter, coeff=cfg.coeff, temperature=cfg.temperature),
    )
    # In train mode activations are computed again in the backward pass, under the mask of their own forward pass.
    model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, weight_decay=0.0, foreach=False)
    table = Table(title=f"SMD updates: SnapKV at 50 %, groups of {cfg.group}, coeff {cfg.coeff}")
    for name in ("update", "reward", "loss", "KL dense to sparse", "mismatch (max |log ratio|)", "seconds"):
        table.add_column(name, justify="right")
    for update in track(range(cfg.updates), description="updates", transient=True):
        start, row = time.perf_counter(), data[update % len(data)]
        batch = sample(model, tokenizer, [row], "snapkv", 0.5, cfg.group, cfg)
        replies = [
            tokenizer.decode(ids[keep], skip_special_tokens=True)
            for ids, keep in zip(batch["tokens", "full"], batch["masks", "all_assistant_mask"], strict=True)
        ]
        rewards = torch.tensor([reward(reply, row["answer"]) for reply in replies])
        batch["advantage"] = group_advantage(rewards, cfg.group)
        lengths = batch["masks", "all_assistant_mask"].sum(1)
        items = loss_module.grpo.aggregation.count(lengths), loss_module.distill.aggregation.count(lengths)
        total, kl, mismatch = 0.0, 0.0, 0.0
        model.train()
        for part in batch.split(1):
            output = loss_module(part, *items)
            loss = output.loss_objective + output.loss_distill
            loss.backward()
            total, kl = total + loss.item(), kl + output.loss_distill.item() / cfg.coeff
            mismatch = max(mismatch, output.max_mismatch.item())
        model.eval()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        table.add_row(
            f"{update + 1}", f"{rewards.mean():.2f}", f"{total:+.4f}", f"{kl:.4f}", f"{mismatch:.1e}", f"{seconds:.0f}"
        )
    console.print(table)


def main(cfg: Settings) -> None:
    """Run the three parts."""
    console, start = Console(), time.perf_counter()
    torch.manual_seed(cfg.seed)
    model, tokenizer = load_model(cfg.model)
    model.eval()  # dropout, where a model has it, cannot be replayed
    adapter = MaskedAttentionAdapter(model)
    data = load_documents()
    name = cfg.model or "SmolLM2-135M-Instruct"
    console.print(f"{name}: {model.num_parameters() / 1e6:.0f}M parameters, {torch.get_num_threads()} threads")

    table, kept, worst = compare_policies(model, tokenizer, adapter, [data[0], data[1]], cfg)
    console.print(table)
    verdict = "the learner sees what the sampler saw" if worst <= 1e-4 else "[red]PARITY BROKEN[/red]"
    console.print(f"largest |log pi_sparse - log pi_shadow|: {worst:.1e} nats (promised: 1e-4): {verdict}")

    cfg.out.mkdir(parents=True, exist_ok=True)
    picture = cfg.out / "kept_keys.png"
    length, prompt = int(kept["masks", "all_attention_mask"][0].sum()), int(kept["prompt_length"][0])
    record: ShadowMask = kept.get("shadow")
    record.plot(
        0, picture, length=length, prompt_length=prompt, title=f"SnapKV at {cfg.budgets[0]:.0%}: what each head kept"
    )
    console.print(f"plot: {picture}")

    train(model, tokenizer, adapter, data, cfg, console)
    console.print(f"total: {time.perf_counter() - start:.0f} s")
    if worst > 1e-4:
        raise SystemExit(1)


if __name__ == "__main__":
    main(tyro.cli(Settings))
