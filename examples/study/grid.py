"""Which runs the study consists of, the ones that carry a claim first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .arms import START, samples_dense
from .model import Shape
from .pretrain import Pretraining
from .setting import Eviction, Scale, Setting

MAIN = Eviction("snapkv", 0.5)
SEVENTY, TWENTY, RANDOM = Eviction("snapkv", 0.3), Eviction("snapkv", 0.8), Eviction("random", 0.5)
H2O, RECENT, STEPS = Eviction("h2o", 0.5), Eviction("recent", 0.5), Eviction("snapkv", 0.5, every=1)
# What the dense arm learned most at in a pilot of one seed; the high one shows who stands a rate chosen badly.
RATES = {"chase": 1e-4, "ledger": 5e-5}
RATE, HIGH_RATE = RATES["chase"], 3e-4
LONG = 2  # times the updates: does the order stay?
LAMBDAS = (0.03, 0.3, 0.8)  # 0 is smd_track1, 0.1 is smd

EVERY = ("dense", "smd", "naive", "sparse_rl", "tis", "smd_track1", "track2", "dense_kl", "naive_sampler")
PAIR = ("smd", "naive")
NAIVE = (*PAIR, "naive_sampler")
FEW = (*NAIVE, "sparse_rl")
TRACKS = (*FEW, "smd_track1", "track2")
# A difference of .03 is claimed of these, for which five seeds are too few.
CLOSE = ("dense", *PAIR, "sparse_rl", "smd_track1", "track2", "dense_kl")
# Arms that sample dense have no eviction of their own: their first five seeds are evaluated under all of a task's.
ELSEWHERE = {
    "chase": (SEVENTY, TWENTY, RANDOM, H2O, RECENT, STEPS),
    "ledger": (SEVENTY,),
}


@dataclass(frozen=True)
class Job:
    """A run, and what else its result is evaluated under."""

    setting: Setting
    also: tuple[Eviction, ...] = ()


@dataclass(frozen=True)
class Grid:
    """All jobs, in order, and the size of each."""

    jobs: tuple[Job, ...]
    scale: Scale = field(default_factory=Scale)
    shape: Shape = field(default_factory=Shape)
    pretraining: Pretraining = field(default_factory=Pretraining)

    @property
    def size(self) -> dict[str, Any]:
        """All that runs depend on beside their setting, as plain values."""
        return {name: asdict(getattr(self, name)) for name in ("scale", "shape", "pretraining")}

    @property
    def checkpoints(self) -> list[tuple[str, int]]:
        """Tasks and initialisations that are needed, in order."""
        pairs = ((job.setting.task, job.setting.seed % self.scale.initialisations) for job in self.jobs)
        return list(dict.fromkeys(pairs))


def _jobs(arms: Iterable[str], seeds: Iterable[int], task: str, eviction: Eviction, **fields) -> list[Job]:
    """At the task's rate where ``fields`` have none; seed by seed, so that a grid that is stopped has whole pairs."""
    fields.setdefault("rate", RATES[task])
    return [Job(Setting(arm, task, eviction, seed=seed, **fields)) for seed in seeds for arm in arms]


def _elsewhere(jobs: Sequence[Job]) -> list[Job]:
    """Evaluate the jobs whose arm samples dense under the task's other evictions, too, and the checkpoints."""
    further = [ELSEWHERE[job.setting.task] if samples_dense(job.setting.arm) else () for job in jobs]
    return [Job(job.setting, also) for job, also in zip(jobs, further, strict=True)]


def full_grid() -> Grid:
    """Return the grid of the report: 16 seeds where .03 is to be told apart, 5 elsewhere."""
    five, more = range(5), range(5, 16)
    blocks = [
        _elsewhere(_jobs([START], range(3), "chase", MAIN, rate=0.0)),
        _elsewhere(_jobs([START], range(3), "ledger", MAIN, rate=0.0)),
        _elsewhere(_jobs(EVERY, five, "chase", MAIN)),
        _jobs((*TRACKS, "tis"), five, "chase", SEVENTY),
        _jobs(CLOSE, more, "chase", MAIN),
        _jobs(("dense", *PAIR), five, "chase", MAIN, length=LONG),
        _elsewhere(_jobs(EVERY, five, "ledger", MAIN)),
        _jobs((*TRACKS, "tis"), five, "chase", RANDOM),
        *(_jobs(["smd"], five, "chase", MAIN, coeff=coeff) for coeff in LAMBDAS),
        _jobs(EVERY, five, "chase", MAIN, rate=HIGH_RATE),
        _jobs(FEW, five, "ledger", SEVENTY),
        _jobs(NAIVE, five, "chase", TWENTY),
        *(_jobs(PAIR, five, "chase", eviction) for eviction in (H2O, RECENT, STEPS)),
        _jobs(("dense", "smd"), five, "chase", MAIN, group=16),
        # What is left of the replay's gap when rounding is as good as gone.
        _jobs(("smd", "smd_track1"), range(1), "chase", MAIN, dtype="float64"),
    ]
    return Grid(tuple(job for block in blocks for job in block))


def quick_grid() -> Grid:
    """Return the same path in a few minutes: every arm twice, a small model that has hardly learned. Shows nothing."""
    jobs = [
        *_jobs([START], range(1), "chase", MAIN, rate=0.0),
        *_jobs(EVERY, range(2), "chase", MAIN),
        *_jobs(("dense", "smd"), range(2), "ledger", MAIN),
    ]
    return Grid(
        tuple(Job(job.setting) for job in jobs),
        Scale(updates=2, rows=16, probe_every=1, eval_prompts=16, eval_batch=16, initialisations=1),
        Shape(hidden=32, feed_forward=48, layers=2),
        # Enough that some answers are right and others are not, so that there is something to learn from.
        Pretraining(target=0.0, check_every=200, max_steps=200, held_out=16, batch=8),
    )


def check_unique(jobs: Sequence[Job]) -> None:
    """Refuse a grid that would do a run twice."""
    keys = [job.setting.key for job in jobs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"runs named twice: {sorted({key for key in keys if keys.count(key) > 1})}")
