"""One run: a setting in, a record of plain numbers out. The same setting gives the same numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from smdlib import MaskedAttentionAdapter

from .arms import ARMS, START
from .ledger import Ledger
from .model import Shape, make_model, make_tokenizer
from .pointer_chase import PointerChase
from .pretrain import Pretraining, checkpoint
from .rollout import add_dense_log_probs, greedy_accuracy, policy_gap, sample
from .setting import Eviction, Scale, Setting
from .tasks import Task

TASKS: dict[str, Task] = {"chase": PointerChase(), "ledger": Ledger()}
HELD_OUT_SEED = 2**40
# Of a mean over ten updates: the mean or the largest.
CURVE = {
    "reward": "mean",
    "grad_norm": "mean",
    "kl_approx": "mean",
    "kl_approx_k3": "mean",
    "ESS": "mean",
    "max_ratio": "max",
    "max_mismatch": "max",
    "rejected_fraction": "mean",
    "clip_fraction": "mean",
    "kl_dense_to_sparse": "mean",
    "acceptance_p5": "mean",
    "kl": "mean",
}


def run(
    setting: Setting,
    scale: Scale,
    shape: Shape,
    pretraining: Pretraining,
    folder: Path,
    also: Sequence[Eviction] = (),
) -> dict[str, Any]:
    """Train one arm and evaluate it.

    Args:
        setting: The run.
        scale: Its size.
        shape: Of the model.
        pretraining: How the checkpoints were made that it starts from.
        folder: Where they lie.
        also: Further evictions to evaluate under.

    Returns:
        Setting, accuracies, a curve, extremes and costs; see `study.results`.

    Raises:
        ValueError: for a task or an arm that there is not, a negative seed, or an arm that makes no loss.
    """
    _check(setting)
    task = TASKS[setting.task]
    path = checkpoint(folder, task, shape, setting.seed % scale.initialisations, pretraining)
    model = make_model(task, shape, 0)
    model.load_state_dict(torch.load(path, weights_only=True))
    model.to(getattr(torch, setting.dtype))
    adapter, tokenizer = MaskedAttentionAdapter(model), make_tokenizer(task)
    history: list[dict[str, float]] = []
    if setting.arm != START:
        history = _train(setting, scale, adapter)
    held_out = task.problems(scale.eval_prompts, torch.Generator().manual_seed(HELD_OUT_SEED))
    evictions = {"dense": None, "sparse": setting.eviction} | {one.label: one for one in also}
    accuracy = {
        name: greedy_accuracy(adapter, tokenizer, task, held_out, eviction, scale.eval_batch)
        for name, eviction in evictions.items()
    }
    return {
        "key": setting.key,
        "setting": setting.as_dict(),
        "solved": {name: round(value["solved"], 4) for name, value in accuracy.items()},
        "reward": {name: round(value["reward"], 4) for name, value in accuracy.items()},
        **summary(history, scale.probe_every),
    }


def _check(setting: Setting) -> None:
    """Refuse before minutes of pre-training what could not be run."""
    if setting.task not in TASKS:
        raise ValueError(f"no task {setting.task!r}; there are {sorted(TASKS)}.")
    if setting.arm != START and setting.arm not in ARMS:
        raise ValueError(f"no arm {setting.arm!r}; there are {sorted(ARMS)}.")
    if setting.seed < 0:
        raise ValueError(f"the seed is {setting.seed}; expected 0 or more.")


def _train(setting: Setting, scale: Scale, adapter: MaskedAttentionAdapter) -> list[dict[str, float]]:
    """Take all updates; return the figures of each."""
    task, arm = TASKS[setting.task], ARMS[setting.arm]
    model, tokenizer, loss_module = adapter.model, make_tokenizer(task), arm.build(adapter, setting.coeff)
    if not callable(loss_module):
        raise ValueError(f"arm {setting.arm!r} made {loss_module!r}; its function has to return a loss.")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    # Prompts of their own generator: arms of one seed see the same ones, however much they draw.
    prompts = torch.Generator().manual_seed(10_000 + setting.seed)
    masks = torch.Generator().manual_seed(20_000 + setting.seed)
    torch.manual_seed(30_000 + setting.seed)
    history = []
    for update in range(scale.updates * setting.length):
        for group in optimizer.param_groups:
            group["lr"] = setting.rate * min(1.0, (update + 1) / scale.warmup)
        wall, cpu = time.perf_counter(), time.process_time()
        problems = task.problems(scale.rows // setting.group, prompts)
        eviction = setting.eviction if arm.sparse else None
        batch = sample(adapter, tokenizer, task, problems, setting.group, eviction, draw=1000 * setting.seed + update)
        sampled_after = time.process_time() - cpu
        if arm.prepare is not None:
            arm.prepare(batch, setting.eviction, masks)
        if arm.old:
            add_dense_log_probs(batch, adapter)
        figures = _step(batch, adapter, loss_module, optimizer, scale.clip_norm)
        figures["wall_seconds"], figures["seconds"] = time.perf_counter() - wall, time.process_time() - cpu
        figures["rollout_seconds"], figures["kv_bytes"] = sampled_after, float(batch["kv_bytes"].sum())
        if arm.agrees:
            # For differences this small k3 is half the mean of their squares.
            figures["rms_mismatch"] = math.sqrt(2 * max(0.0, figures["kl_approx_k3"]))
        if arm.sparse and update % scale.probe_every == 0:
            figures |= policy_gap(batch, adapter)
        history.append(figures)
    return history


def _step(batch: TensorDict, adapter: Any, loss_module: Any, optimizer: Any, clip_norm: float) -> dict[str, float]:
    """Take one optimizer step; return what the loss reports and the norm before clipping."""
    output = loss_module(batch)
    reported = {name: value for name, value in output.items() if value is not None}
    losses = [value for name, value in reported.items() if name.startswith("loss_")]
    if not losses:
        raise ValueError(f"the arm's loss returned {sorted(reported)}; expected at least one entry named 'loss_...'.")
    torch.stack(losses).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(adapter.parameters(), clip_norm, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    figures = {name: float(value) for name, value in reported.items() if not name.startswith("loss_")}
    return figures | {"reward": float(batch["reward"].mean()), "grad_norm": float(norm)}


def summary(history: Sequence[Mapping[str, float]], every: int) -> dict[str, Any]:
    """Shorten the figures of all updates to a curve, extremes over all of them, and costs.

    Args:
        history: Figures of each update.
        every: Updates per point of the curve.

    Returns:
        ``curve``, a list of points per figure; ``worst`` over every single update; ``cost`` per update.
    """
    if not history:
        return {}
    curve: dict[str, list[float]] = {}
    for name, how in CURVE.items():
        for start in range(0, len(history), every):
            values = [figures[name] for figures in history[start : start + every] if name in figures]
            if values:
                point = max(values) if how == "max" else sum(values) / len(values)
                curve.setdefault(name, []).append(_digits(point))
    extremes = [name for name in ("max_mismatch", "rms_mismatch", "grad_norm") if name in history[0]]
    worst = {name: _digits(max(figures[name] for figures in history)) for name in extremes}
    costs = ("seconds", "rollout_seconds", "wall_seconds", "kv_bytes")
    cost = {name: _digits(sum(figures[name] for figures in history) / len(history)) for name in costs}
    return {"curve": curve, "worst": worst, "cost": cost}


def _digits(value: float, digits: int = 4) -> float:
    """Round to so many significant digits: the results file stays small."""
    return float(f"{value:.{digits}g}")
