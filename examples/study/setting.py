"""One run's setting: what is varied, and its name in the results file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

POLICIES = {
    # Its window of 32 covers a whole printing of the map and a whole page of the ledger: every record has a vote.
    "snapkv": "snapkv",
    "h2o": "h2o",
    "recent": "recent(sinks=1)",
    # All prompts have one length, so that one seed would always keep the same columns.
    "random": "random(recent=4, seed={draw})",
}


@dataclass(frozen=True)
class Eviction:
    """What is kept while sampling.

    Attributes:
        policy: One of `POLICIES`.
        keep: Share of the prompt's keys; compression is what is missing to 1.
        every: Evict after every so many sampled tokens too; the share then caps prompt and response together.
    """

    policy: str = "snapkv"
    keep: float = 0.5
    every: int | None = None

    @property
    def label(self) -> str:
        """Such as ``snapkv-50``: the policy and the percentage of keys that is evicted."""
        return f"{self.policy}-{round(100 * (1 - self.keep))}" + (f"-every{self.every}" if self.every else "")

    def options(self, draw: int) -> dict[str, Any]:
        """Arguments of `smdlib.SparseActor`; ``draw`` seeds a random choice."""
        policy = POLICIES[self.policy].format(draw=draw)
        return {"policy": policy, "budget": self.keep, "evict_every": self.every}


@dataclass(frozen=True)
class Setting:
    """A run.

    Attributes:
        arm: Name of an arm (`study.arms`).
        task: Name of a task.
        eviction: Of the rollouts, and of the evaluation with evicted keys.
        rate: Learning rate.
        coeff: Weight lambda of the KL, for arms that have one.
        group: Samples per prompt.
        seed: Of the run; the initialisation is ``seed`` modulo the number of initialisations.
        dtype: Of the weights and of all that is computed from them.
        length: Of the run, in multiples of `Scale.updates`.
    """

    arm: str
    task: str = "chase"
    eviction: Eviction = Eviction()
    rate: float = 1e-4
    coeff: float = 0.1
    group: int = 8
    seed: int = 0
    dtype: str = "float32"
    length: int = 1

    @property
    def place(self) -> str:
        """Task and eviction."""
        return f"{self.task} {self.eviction.label}"

    @property
    def cell(self) -> str:
        """All but the seed, as one readable line."""
        return (
            f"{self.place} {self.arm} rate={self.rate:g} lambda={self.coeff:g} group={self.group}"
            + (f" {self.dtype}" if self.dtype != "float32" else "")
            + (f" length={self.length}" if self.length != 1 else "")
        )

    @property
    def key(self) -> str:
        """Name of the run: a job with this key is done once."""
        return f"{self.cell} seed={self.seed}"

    def but(self, **changes: Any) -> Setting:
        """The setting with some fields changed."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for the results file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Setting:
        """Read what `as_dict` wrote."""
        fields: dict[str, Any] = values | {"eviction": Eviction(**values["eviction"])}
        return cls(**fields)


@dataclass(frozen=True)
class Scale:
    """How large every run of a grid is.

    Attributes:
        updates: Optimizer steps of a run of length 1.
        rows: Sampled rows per update, ``rows / group`` prompts.
        warmup: Updates over which the learning rate rises.
        clip_norm: Far above the usual norms: at 1.0 it binds always, and hides that a norm grows.
        probe_every: Updates between two looks at the gap of dense and sparse policy.
        eval_prompts: Held-out prompts, the same ones for all runs.
        eval_batch: Of them at a time.
        initialisations: Pre-trained checkpoints per task.
    """

    updates: int = 60
    rows: int = 128
    warmup: int = 5
    clip_norm: float = 10.0
    probe_every: int = 10
    eval_prompts: int = 1024
    eval_batch: int = 128
    initialisations: int = 3
