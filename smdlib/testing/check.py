"""One call that checks an eviction policy: its scores, its rollouts, and the promise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smdlib.cache.support import text_config
from smdlib.policies import EvictionPolicy, PolicyError, make_policy
from smdlib.testing.contract import CONTRACT, keep_set, prompt_lengths
from smdlib.testing.models import tiny_model
from smdlib.testing.parity import Parity, check_parity
from smdlib.testing.watch import Watched, WatchingRecorder

# (evict_every, columns per prefill call as a share of the budget)
SCHEDULES: list[tuple[int | None, float | None]] = [(None, None), (1, None), (4, 0.7)]


@dataclass(frozen=True)
class PolicyReport:
    """What `check_policy` found out about a policy that passed; ``print`` it.

    Attributes:
        policy: The policy, in its own words.
        findings: What each check found, by its name.
        gap: Largest difference of a sampled and a replayed log-prob, in nats.
        dense_gap: The same for a learner that sees every key, in nats.
        golden: Stands for the keys kept on golden numbers: pin it, ``check_policy(policy, golden="...")``, to hear of
            every change of the policy's choices.
    """

    policy: str
    findings: dict[str, str]
    gap: float
    dense_gap: float
    golden: str

    def __str__(self) -> str:
        """A line per check."""
        width = max(map(len, self.findings))
        lines = [f"  {name:<{width}}  {finding}" for name, finding in self.findings.items()]
        return "\n".join([f"{self.policy} passes", *lines])


def check_policy(
    policy: EvictionPolicy | str,
    *,
    budget: int = 48,
    model: PreTrainedModel | None = None,
    new_tokens: int = 16,
    tolerance: float = 1e-4,
    golden: str | None = None,
) -> PolicyReport:
    """Check a policy of your own: the invariants, determinism, and parity on a small model with real eviction.

    First the policy scores views that must agree: left-padded rows against each row alone, slots in another order,
    empty slots with stale keys in them, bfloat16 keys, with a random generator per row and without. Then it evicts in
    rollouts after the prefill, at every token, and in chunks, under a watch that no evicted key returns; each rollout
    is replayed from its record, and run twice.

    Args:
        policy: The policy, or its registered name.
        budget: Keys to keep. The prompts have twice as many tokens, somewhat more than that many, and fewer. Give what
            the policy is made for: one that works in partitions of 128 shows little at 48.
        model: A causal language model; `tiny_model` by default.
        new_tokens: Tokens of each rollout.
        tolerance: Of parity, in nats.
        golden: The report's ``golden`` of an earlier version, which must not have changed.

    Returns:
        What was found; print it.

    Raises:
        PolicyError: names the first fault: NaN, wrong shape or dtype, dropped protected keys, scores that are not
            deterministic or depend on slots or on other rows, writes to the view, keys that return, no parity.
        ValueError: ``budget`` or ``new_tokens`` is too small to check anything.

    Example:
        >>> from smdlib.testing import check_policy
        >>> report = check_policy("snapkv")
        >>> print(report)  # doctest: +ELLIPSIS
        SnapKVPolicy(window=32, kernel_size=7, pooling='max') passes
          scores         float32 [B, H, K] without NaN on 5 views, bfloat16 keys and budgets of 1 among them
          deterministic  the same view always has the same scores
          slots          scores depend neither on the order of slots nor on empty ones
          rows           every row of a batch has the scores that it has alone
          protected      at most 32 of 48 keys protected
          eviction       no key returned in 3 rollouts, repeated exactly; ...% of keys evicted
          parity         sampled and replayed log-probs differ by ... nats at most (dense: ...)
          golden         ...
        >>> class Newest:  # at positions, of which a slot of a padded row has another than its index
        ...     def score(self, view):
        ...         return torch.arange(view.keys.shape[2]).expand(view.positions.shape).float()
        >>> check_policy(Newest())
        Traceback (most recent call last):
        ...
        smdlib.policies.errors.PolicyError: Newest: the score of a key depends on the order of the slots ...
    """
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 4:
        raise ValueError(
            f"budget is {budget!r}, expected a number of keys (an int >= 4): fewer leave nothing to choose"
        )
    if isinstance(new_tokens, bool) or not isinstance(new_tokens, int) or new_tokens < 4:
        raise ValueError(f"new_tokens is {new_tokens!r}, expected an int >= 4: fewer tokens than an eviction takes")
    checked = make_policy(policy)
    findings = {name: check(checked, budget) for name, check in CONTRACT.items()}
    name, found = type(checked).__name__, keep_set(checked, budget)
    if golden is not None and golden != found:
        raise PolicyError(
            f"{name} keeps other keys of the golden view than before: golden is {found!r}, expected {golden!r} (with "
            f"budget={budget}). Either its choices have changed, or they differ between processes."
        )
    model = tiny_model() if model is None else model
    runs = [_rollout(checked, budget, model, new_tokens, tolerance, schedule) for schedule in SCHEDULES]
    gap, dense = max(run.gap for run in runs), max(run.dense_gap for run in runs)
    evicted = sum(run.evicted for run in runs) / len(runs)
    findings["eviction"] = f"no key returned in {len(runs)} rollouts, repeated exactly; {evicted:.0%} of keys evicted"
    findings["parity"] = f"sampled and replayed log-probs differ by {gap:.1e} nats at most (dense: {dense:.2g})"
    findings["golden"] = found
    return PolicyReport(repr(checked), findings, gap, dense, found)


def _rollout(
    policy: EvictionPolicy,
    budget: int,
    model: PreTrainedModel,
    new_tokens: int,
    tolerance: float,
    schedule: tuple[int | None, float | None],
) -> Parity:
    """One schedule, sampled under watch, replayed, and once more."""
    name, (evict_every, share) = type(policy).__name__, schedule
    ids, mask = _prompts(prompt_lengths(budget), int(text_config(model.config).vocab_size))
    how = f"evict_every={evict_every}" + ("" if share is None else ", the prompt in chunks")

    def run() -> Parity:
        recorder = WatchingRecorder()
        return check_parity(
            model,
            Watched(policy, recorder),
            budget,
            ids.to(model.device),
            mask.to(model.device),
            new_tokens=new_tokens,
            evict_every=evict_every,
            chunk=None if share is None else max(1, int(share * budget)),
            recorder=recorder,
            tolerance=tolerance,
        )

    parity, again = run(), run()
    if not parity.holds:
        raise PolicyError(
            f"{name}: the replayed log-probs differ from the sampled ones by {parity.gap:.1e} nats (tolerance "
            f"{tolerance:.0e}; {how}): the record is not what attention saw. Does the policy change keys or values?"
        )
    if not parity.conclusive:
        raise PolicyError(
            f"{name}: nothing that mattered was evicted ({how}), so the replay proves nothing: a learner with every "
            f"key is off by {parity.dense_gap:.1e} nats only."
        )
    if not torch.equal(parity.shadow.evicted_at, again.shadow.evicted_at):
        raise PolicyError(
            f"{name} is not deterministic: the same rollout ({how}) evicts other keys the second time. It keeps state "
            "between generations, or draws random numbers of its own."
        )
    return parity


def _prompts(lengths: list[int], vocab: int) -> tuple[Tensor, Tensor]:
    """Left-padded ids and their mask, int64 ``[B, P]`` each."""
    generator, width = torch.Generator().manual_seed(0), max(lengths)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    ids = torch.randint(3, vocab, mask.shape, generator=generator)
    return torch.where(mask, ids, 0), mask.long()
