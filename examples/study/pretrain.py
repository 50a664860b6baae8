"""Supervised training from a fresh initialisation on the clean lesson of a task, until greedy decoding has learned it.

Of the task itself, with its errors, such a model solves some problems and not most: room for the arms both ways.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from .model import Shape, make_model
from .tasks import Problems, Task


@dataclass(frozen=True)
class Pretraining:
    """When a checkpoint is done, and how it is reached.

    Attributes:
        target: Share of held-out problems of the lesson that greedy decoding has to solve.
        slow_at: From this share on the rate is ``slow_rate``.
        batch: Problems per step.
        check_every: Steps between two looks at the held-out problems.
        max_steps: Without the target by then, it is an error.
    """

    target: float = 0.95
    slow_at: float = 0.5
    rate: float = 1e-3
    slow_rate: float = 2e-4
    warmup: int = 50
    batch: int = 32
    check_every: int = 10
    held_out: int = 256
    max_steps: int = 3000


def pretrain(task: Task, shape: Shape, seed: int, options: Pretraining) -> LlamaForCausalLM:
    """Train a model from the initialisation ``seed``, the same one for the same arguments.

    Args:
        task: Its lesson is taught.
        shape: Of the model.
        seed: Of the initialisation and of the problems.
        options: See `Pretraining`.

    Returns:
        The model, in eval mode.

    Raises:
        RuntimeError: if the target was not reached.
    """
    model, lesson = make_model(task, shape, seed), task.lesson
    generator = torch.Generator().manual_seed(1000 + seed)
    held_out = lesson.problems(options.held_out, torch.Generator().manual_seed(999))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0, foreach=False)
    solved = 0.0
    for step in range(1, options.max_steps + 1):
        rate = options.slow_rate if solved >= options.slow_at else options.rate * min(1.0, step / options.warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate
        problems = lesson.problems(options.batch, generator)
        logits = _answers(model, problems).flatten(0, 1)
        loss = cross_entropy(logits, problems.answers.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        if step % options.check_every == 0:
            with torch.no_grad():
                # Greedy decoding is right everywhere exactly where it is right after each right beginning.
                right = (_answers(model, held_out).argmax(-1) == held_out.answers).all(-1)
            solved = float(right.float().mean())
            if solved >= options.target:
                return model
    raise RuntimeError(f"{task.name} from initialisation {seed} solves {solved:.2f} after {options.max_steps} steps.")


def _answers(model: LlamaForCausalLM, problems: Problems) -> torch.Tensor:
    """Logits ``[N, R, V]`` that predict the answers."""
    ids = torch.cat([problems.prompts, problems.answers[:, :-1]], 1)
    return model(input_ids=ids, logits_to_keep=problems.answers.shape[1]).logits


def checkpoint(folder: Path, task: Task, shape: Shape, seed: int, options: Pretraining) -> Path:
    """Return the file of the pre-trained weights; train them if it is not there.

    Its name has a hash of all that the weights depend on, so that other options never find it.
    """
    what = json.dumps([type(task).__name__, vars(task.lesson), asdict(shape), seed, asdict(options)], sort_keys=True)
    path = folder / f"{task.name}-{seed}-{blake2b(what.encode(), digest_size=6).hexdigest()}.pt"
    if not path.exists():
        model = pretrain(task, shape, seed, options)
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        torch.save(model.state_dict(), part)
        os.replace(part, path)
    return path
