"""Sampling a batch, scoring it with every key, and greedy accuracy: what all arms share."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from smdlib import MaskedAttentionAdapter, ShadowMask, SparseActor, group_advantage
from smdlib.losses import acceptance, linear_log_probs
from smdlib.masks import View

from .setting import Eviction
from .tasks import Problems, Task


def sample(
    adapter: MaskedAttentionAdapter,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    problems: Problems,
    group: int,
    eviction: Eviction | None,
    draw: int,
    greedy: bool = False,
) -> TensorDict:
    """Answer each problem ``group`` times.

    Args:
        adapter: On the model.
        tokenizer: Of the task's words.
        task: What judges the answers.
        problems: N of them.
        group: Answers to each.
        eviction: ``None`` keeps every key.
        draw: Seeds a random choice of keys.
        greedy: Take the most likely token.

    Returns:
        Rows ``[N * group]``, all of one length: entries of `smdlib.SparseActor`, ``reward`` (share of right tokens)
        and ``solved`` (1 where all are).
    """
    options: dict[str, Any] = {"policy": None} if eviction is None else eviction.options(draw)
    generate = {"max_new_tokens": problems.answers.shape[1], "eos_token_id": None, "do_sample": not greedy}
    actor = SparseActor(adapter, tokenizer, generate_kwargs=generate, **options)
    asked = problems.rows(torch.arange(len(problems.prompts)).repeat_interleave(group))
    rows = actor(TensorDict({("tokens", "prompt"): asked.prompts}, [len(asked.prompts)])).unbind(0)
    names = [("tokens", "full"), ("tokens", "response"), ("log_probs", "full"), ("masks", "all_assistant_mask")]
    batch = TensorDict({name: torch.stack([row[name] for row in rows]) for name in names}, [len(rows)])
    batch["shadow"] = ShadowMask.stack([row["shadow"] for row in rows])
    batch["kv_bytes"] = torch.stack([row["kv_bytes"] for row in rows])
    batch["group_size"] = torch.full((len(rows),), group)
    right = task.right(batch["tokens", "response"], asked)
    batch["reward"], batch["solved"] = right.float().mean(1), right.all(1).float()
    if group > 1:
        batch["advantage"] = group_advantage(batch["reward"], group)
    return batch


def greedy_accuracy(
    adapter: MaskedAttentionAdapter,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    problems: Problems,
    eviction: Eviction | None,
    batch: int,
) -> dict[str, float]:
    """Share of the problems that greedy decoding solves, and the mean reward; draws no random number of the run's."""
    solved, reward = [], []
    for draw, start in enumerate(range(0, len(problems.prompts), batch)):
        part = problems.rows(slice(start, start + batch))
        rows = sample(adapter, tokenizer, task, part, 1, eviction, draw, greedy=True)
        solved.append(rows["solved"])
        reward.append(rows["reward"])
    return {"solved": float(torch.cat(solved).mean()), "reward": float(torch.cat(reward).mean())}


@torch.no_grad()
def add_dense_log_probs(batch: TensorDictBase, adapter: MaskedAttentionAdapter) -> None:
    """Score the sampled tokens with every key, before the update: ``("log_probs", "old")``, NaN on the prompt."""
    states, ids, mask = _response_states(batch, adapter, View(None, gradient=False))
    old = torch.full(ids.shape, torch.nan)
    old[mask] = linear_log_probs(states[0], adapter.head().weight, ids[mask])
    batch["log_probs", "old"] = old


@torch.no_grad()
def policy_gap(batch: TensorDictBase, adapter: MaskedAttentionAdapter) -> dict[str, float]:
    """How far the policy without the evicted keys is from the one with all of them, whatever the arm learns from.

    Returns:
        The 5th percentile over tokens of ``sum_v min(dense, sparse)``, and the mean of KL(dense || sparse) in nats.
    """
    views = View(batch["shadow"], gradient=False), View(None, gradient=False)
    (sparse, dense), _, _ = _response_states(batch, adapter, *views)
    p, q = adapter.head().logits(dense).float(), adapter.head().logits(sparse).float()
    kl = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
    return {"acceptance_p5": float(acceptance(p, q).quantile(0.05)), "kl": float(kl.mean())}


def _response_states(
    batch: TensorDictBase, adapter: MaskedAttentionAdapter, *views: View
) -> tuple[list[Tensor], Tensor, Tensor]:
    """States ``[N, D]`` of each view, ids and loss mask ``[B, T]``; each prompt is computed once for its group."""
    ids, mask = batch["tokens", "full"], batch["masks", "all_assistant_mask"]
    states, _ = adapter.response_states(ids, torch.ones_like(mask), mask, views)
    return states, ids, mask
