"""Train a language model whose rollouts run on a compressed KV cache: the script to start from.

    python examples/train_smd.py                       # SmolLM2-135M on the register task, SMD with SnapKV at 50 %
    python examples/train_smd.py --arm naive           # the same rollouts, a learner that ignores the evictions
    python examples/train_smd.py --task gsm8k --model Qwen/Qwen3-0.6B --max-new-tokens 256
    python examples/train_smd.py --resume              # go on where the last checkpoint ended, bit for bit

An update: the collector samples `prompts * group` rows, the task's function pays them, advantages are taken within each
group, and one optimizer step follows. Where it departs from the paper (arXiv 2605.06850): one step per batch, so no
ratio is ever clipped; advantages as in GRPO; the KL is exact over the vocabulary, not sampled.
"""

from __future__ import annotations

import json
import math
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tensordict
import torch
import tyro
from checkpoints import load_checkpoint, rng_state, save_checkpoint, set_rng_state
from plots import plot_run, write_table
from recipes import RECIPES
from rich.console import Console
from rich.live import Live
from rich.table import Table
from smollm2 import load_model
from tasks import register
from tensordict import TensorDictBase
from torch.optim.lr_scheduler import LambdaLR
from torchrl.collectors.llm import LLMCollector
from torchrl.record.loggers import get_logger

from smdlib import DenseToSparseKL, GRPOLoss, MaskedAttentionAdapter, SMDLoss, SparseActor, group_advantage
from smdlib.losses import SparseRLCorrection, TruncatedIS
from smdlib.rollout import DatasetEnv, RewardFunction, dataset_env

# TorchRL asks for a transform of recurrent policies, which no language model is.
warnings.filterwarnings("ignore", message="The env passed to LLMCollector is missing transforms")

COLUMNS = {  # of the live table; metrics.csv has everything
    "update": "update",
    "reward": "reward",
    "loss": "loss",
    "max_mismatch": "mismatch",
    "kl_dense_to_sparse": "KL",
    "grad_norm": "grad",
    "seconds": "s",
    "eval_dense": "dense",
    "eval_sparse": "sparse",
}


@dataclass(frozen=True)
class Config:
    """Options of a training run."""

    arm: Literal["dense", "naive", "tis", "sparse_rl", "smd"] = "smd"
    """dense evicts nothing; naive evicts and learns as if not; tis and sparse_rl reweigh that; smd replays the mask."""
    task: Literal["register", "gsm8k", "hotpotqa", "tldr", "govreport"] = "register"
    data: str | None = None
    """Local JSONL or Parquet file with the task's columns instead of the hub's."""
    model: str | None = None
    """Hub id or folder of a causal language model; SmolLM2-135M-Instruct by default."""
    policy: str = "snapkv"
    budget: float = 0.5
    """Share of the prompt's keys to keep."""
    evict_every: int | None = None
    """Evict after every so many sampled tokens too."""
    updates: int = 60
    prompts: int = 4
    """Prompts per update."""
    group: int = 8
    """Samples per prompt."""
    micro_rows: int = 8
    """Rows per backward pass, best a multiple of ``group``, whose prompt is computed once; gradients add up."""
    max_new_tokens: int = 16
    temperature: float = 1.0
    """Of sampling and of every log-prob."""
    learning_rate: float = 1e-5
    warmup: int = 4
    """Updates over which the learning rate rises; then it falls to a tenth along a cosine."""
    clip_norm: float = 1.0
    coeff: float = 0.1
    """Weight of the dense-to-sparse KL (arm smd)."""
    checkpoint_activations: bool = True
    """Compute activations again in the backward pass: less memory, about a quarter more time."""
    eval_every: int = 10
    eval_prompts: int = 32
    """Held-out prompts, decoded greedily with every key and with evicted ones."""
    save_every: int = 10
    seed: int = 0
    out: Path = Path("runs/train_smd")
    logger: Literal["csv", "tensorboard", "wandb"] = "csv"
    resume: bool = False
    """Go on from the newest checkpoint in ``out``."""


@dataclass(frozen=True)
class Task:
    """Prompts to train on, prompts to evaluate on, and what a response is worth."""

    rows: Any
    held_out: Any
    reward: RewardFunction
    system_prompt: str | None = None

    def env(self, rows: Any, tokenizer: Any, **options: Any) -> DatasetEnv:
        """Return the environment that asks the prompts of ``rows``."""
        return dataset_env(rows, tokenizer, self.reward, system_prompt=self.system_prompt, **options)


def load_task(cfg: Config) -> Task:
    """Return the task; of a data set, the last rows are held out."""
    if cfg.task == "register":
        rows, held_out = register.make_rows(4096, seed=cfg.seed), register.make_rows(cfg.eval_prompts, seed=2**31)
        return Task(rows, held_out, register.reward)
    recipe = RECIPES[cfg.task]
    rows = recipe.load(cfg.data)
    if len(rows) <= cfg.eval_prompts:
        raise SystemExit(f"{cfg.task} has {len(rows)} rows; --eval-prompts {cfg.eval_prompts} leaves none to train on.")
    first = len(rows) - cfg.eval_prompts
    held_out = rows.select(range(first, len(rows)))
    return Task(rows.select(range(first)), held_out, recipe.reward, recipe.system_prompt)


def build_loss(actor: SparseActor, cfg: Config) -> GRPOLoss | SMDLoss:
    """Return the arm's loss; only ``smd`` reads the shadow masks."""
    if cfg.arm == "smd":
        grpo = GRPOLoss(actor, temperature=cfg.temperature)
        return SMDLoss(actor, grpo=grpo, distill=DenseToSparseKL(actor, cfg.coeff, temperature=cfg.temperature))
    correction = {"tis": TruncatedIS(), "sparse_rl": SparseRLCorrection()}.get(cfg.arm)
    return GRPOLoss(actor, temperature=cfg.temperature, dense=True, correction=correction)


def learning_rate_share(cfg: Config, update: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if update < cfg.warmup:
        return (update + 1) / cfg.warmup
    done = (update - cfg.warmup) / max(1, cfg.updates - cfg.warmup)
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, done))


def add_old_log_probs(batch: TensorDictBase, actor: SparseActor, cfg: Config) -> None:
    """Score the rows with every key, before the update: what corrections compare with the sampler."""
    for row in batch.unbind(0):
        with torch.no_grad():
            row["dense_log_probs"] = actor.log_probs(row["tokens", "full"][None], temperature=cfg.temperature)[0]


def learn(
    batch: TensorDictBase, actor: SparseActor, loss_module: GRPOLoss | SMDLoss, optimizer: Any, cfg: Config
) -> dict[str, float]:
    """Take one optimizer step on the rows of ``batch``; return what the loss reports."""
    lengths = torch.tensor([int(row["masks", "all_assistant_mask"].sum()) for row in batch.unbind(0)])
    terms = (loss_module.grpo, loss_module.distill) if isinstance(loss_module, SMDLoss) else (loss_module,)
    items = [term.aggregation.count(lengths) for term in terms]
    # Sparse-RL's weights are normalised over what the loss is given, so that arm's parts would not add up to the whole.
    rows = len(batch) if cfg.arm == "sparse_rl" else cfg.micro_rows
    figures: dict[str, list[float]] = {}
    actor.train()
    for start in range(0, len(batch), rows):
        output = loss_module(batch[start : start + rows], *items)
        losses = [value for name, value in output.items() if name.startswith("loss_") and value is not None]
        torch.stack(losses).sum().backward()
        reported = {name: value for name, value in output.items() if value is not None and not name.startswith("loss_")}
        for name, value in {"loss": torch.stack(losses).sum(), **reported}.items():
            figures.setdefault(name, []).append(value.item())
    actor.eval()
    norm = torch.nn.utils.clip_grad_norm_(actor.parameters(), cfg.clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    shares = torch.stack([part.sum() for part in lengths.split(rows)]) / lengths.sum()
    # Losses of micro-batches add up; extremes stay extremes; the rest are means over tokens.
    combine = {"loss": sum, "max_ratio": max, "max_mismatch": max}
    means = {name: float(sum(s * v for s, v in zip(shares, values, strict=True))) for name, values in figures.items()}
    return means | {name: how(figures[name]) for name, how in combine.items()} | {"grad_norm": float(norm)}


def evaluate(actors: dict[str, SparseActor], task: Task, tokenizer: Any, cfg: Config) -> dict[str, float]:
    """Mean reward of greedy responses to held-out prompts; draws no random number of the training's."""
    scores = {}
    with torch.random.fork_rng():
        for name, actor in actors.items():
            torch.manual_seed(cfg.seed)
            env = task.env(task.held_out, tokenizer, prompts=len(task.held_out), group=1, shuffle=False)
            scores[f"eval_{name}"] = float(env.rollout(1, actor)["next", "reward"].mean())
    return scores


@contextmanager
def stop_on_interrupt() -> Iterator[list[int]]:
    """Collect Ctrl-C, so that the update under way ends and is saved; a second one stops at once."""
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        caught.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)


def show(history: list[dict[str, float]], cfg: Config) -> Table:
    """Return the last updates as a table; dense and sparse are greedy rewards on held-out prompts."""
    table = Table(title=f"{cfg.arm}: {cfg.policy} at {cfg.budget:.0%}, {cfg.prompts} x {cfg.group} rows per update")
    for header in COLUMNS.values():
        table.add_column(header, justify="right")
    for figures in history[-15:]:
        table.add_row(*(f"{figures[name]:.3g}" if name in figures else "" for name in COLUMNS))
    return table


def main(cfg: Config) -> None:
    """Train."""
    tensordict.set_list_to_stack(True).set()  # TorchRL's language-model stack asks for it
    torch.manual_seed(cfg.seed)
    console = Console()
    model, tokenizer = load_model(cfg.model)
    task = load_task(cfg)
    if cfg.checkpoint_activations:
        model.activation_checkpointing_enable()
    model.eval()

    adapter = MaskedAttentionAdapter(model)
    eviction = {"policy": None}
    if cfg.arm != "dense":
        eviction = {"policy": cfg.policy, "budget": cfg.budget, "evict_every": cfg.evict_every}
    sampling = {"max_new_tokens": cfg.max_new_tokens, "temperature": cfg.temperature}
    greedy = {"max_new_tokens": cfg.max_new_tokens, "do_sample": False}
    actor = SparseActor(adapter, tokenizer, **eviction, generate_kwargs=sampling)
    evaluators = {
        "dense": SparseActor(adapter, tokenizer, policy=None, generate_kwargs=greedy),
        "sparse": SparseActor(adapter, tokenizer, policy=cfg.policy, budget=cfg.budget, generate_kwargs=greedy),
    }
    loss_module = build_loss(actor, cfg)
    loss_module.set_keys(old_log_prob="dense_log_probs")
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, weight_decay=0.0, foreach=False)
    schedule = LambdaLR(optimizer, lambda update: learning_rate_share(cfg, update))

    cfg.out.mkdir(parents=True, exist_ok=True)
    folder, history, step = cfg.out / "checkpoints", [], 0
    logger: Any = get_logger(cfg.logger, str(cfg.out), "log")
    state = load_checkpoint(folder) if cfg.resume else None
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        history, step = state["history"], state["step"]
        console.print(f"going on after update {step}")
    else:
        (cfg.out / "config.json").write_text(json.dumps(asdict(cfg), indent=2, default=str))
    rows, remaining = cfg.prompts * cfg.group, cfg.updates - step
    if remaining < 1:
        raise SystemExit(f"{cfg.out} has {step} updates already; raise --updates to go on.")
    options = {"prompts": cfg.prompts, "group": cfg.group, "seed": cfg.seed, "start": step * cfg.prompts}
    collector = LLMCollector(
        task.env(task.rows, tokenizer, **options),
        policy=actor,
        dialog_turns_per_batch=rows,
        total_dialog_turns=remaining * rows,
        flatten_data=True,
    )

    def evaluated() -> dict[str, float]:
        return evaluate(evaluators, task, tokenizer, cfg)

    def save() -> None:
        contents = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng_state()}
        save_checkpoint(folder, step, contents | {"schedule": schedule.state_dict(), "history": history, "step": step})

    if state is None:
        history.append({"update": 0.0, **evaluated()})
    else:
        set_rng_state(state["rng"])  # last, so that nothing built above moves it
    with stop_on_interrupt() as interrupted, Live(console=console, auto_refresh=False) as live:
        live.update(show(history, cfg), refresh=True)
        start = time.perf_counter()
        for batch in collector:
            sampled_after = time.perf_counter() - start
            rewards = batch["next", "reward"].reshape(-1)
            batch["advantage"] = group_advantage(rewards, cfg.group)[:, None]
            if cfg.arm in ("tis", "sparse_rl"):
                add_old_log_probs(batch, actor, cfg)
            figures = {
                "update": step + 1.0,
                "reward": float(rewards.mean()),
                "kv_bytes": float(batch["kv_bytes"].sum()),
            }
            figures["mixed_groups"] = float((rewards.view(-1, cfg.group).std(1) > 0).float().mean())
            figures["learning_rate"] = schedule.get_last_lr()[0]
            figures |= learn(batch, actor, loss_module, optimizer, cfg)
            schedule.step()
            step += 1
            figures |= {"rollout_seconds": sampled_after, "seconds": time.perf_counter() - start}
            last = bool(interrupted) or step == cfg.updates
            if step % cfg.eval_every == 0 or step == cfg.updates:
                figures |= evaluated()
            history.append(figures)
            write_table(cfg.out / "metrics.csv", history)
            for name, value in figures.items():
                logger.log_scalar(name, value, step=step)
            live.update(show(history, cfg), refresh=True)
            if last or step % cfg.save_every == 0:
                save()
            if last:
                break
            start = time.perf_counter()
    collector.shutdown()
    plot_run(cfg.out / "metrics.csv", cfg.out / "run.png", title=f"{cfg.arm}, {cfg.policy} at {cfg.budget:.0%}")
    final = history[-1]
    console.print(
        "\n"
        f"{cfg.arm} after {step} updates: reward {final['reward']:.3f}, largest mismatch "
        f"{final['max_mismatch']:.1e} nats, KV {final['kv_bytes'] / 1e6:.1f} MB per rollout"
    )


if __name__ == "__main__":
    main(tyro.cli(Config))
