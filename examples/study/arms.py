"""The arms: who samples with which keys, and what the learner makes of it. A new arm is a function and a decorator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase

from smdlib import DenseToSparseKL, GRPOLoss, MaskedAttentionAdapter, SMDLoss
from smdlib.losses import SparseRLCorrection, TruncatedIS, Unweighted

from .random_mask import add_random_masks
from .setting import Eviction

Build = Callable[[MaskedAttentionAdapter, float], Any]
Prepare = Callable[[TensorDictBase, Eviction, torch.Generator], None]


@dataclass(frozen=True)
class Arm:
    """One way to learn.

    Attributes:
        name: In the tables.
        build: The loss module, of the adapter and lambda.
        sparse: Whether keys are evicted while sampling.
        exact: Whether the learner replays the record, so that it has to agree with the sampler.
        old: Whether the loss reads the dense policy's log-probs from before the update.
        prepare: Changes a sampled batch before it is learned from.
        about: One line for the report.
    """

    name: str
    build: Build
    sparse: bool = True
    exact: bool = False
    old: bool = False
    prepare: Prepare | None = None
    about: str = ""

    @property
    def agrees(self) -> bool:
        """Whether learner and sampler have the same keys, so that only rounding may tell them apart."""
        return self.exact or not self.sparse


ARMS: dict[str, Arm] = {}

START = "start"
"""Stands for an arm that does nothing: the checkpoint itself."""


def samples_dense(name: str) -> bool:
    """Whether one run of the arm serves all evictions, since it samples with every key or not at all."""
    return name == START or not ARMS[name].sparse


def arm(name: str, **fields: Any) -> Callable[[Build], Build]:
    """Register the decorated function as the loss of a new arm; ``fields`` are those of `Arm`."""

    def register(build: Build) -> Build:
        if name in ARMS:
            raise ValueError(f"there is an arm {name!r} already.")
        ARMS[name] = Arm(name, build, about=(build.__doc__ or "").strip(), **fields)
        return build

    return register


@arm("dense", sparse=False)
def dense(actor: MaskedAttentionAdapter, coeff: float) -> GRPOLoss:
    """Every key while sampling and learning."""
    return GRPOLoss(actor, dense=True)


@arm("dense_kl", sparse=False, prepare=add_random_masks)
def dense_kl(actor: MaskedAttentionAdapter, coeff: float) -> SMDLoss:
    """As dense, with the KL of a pass that lost random keys of the prompt: the regulariser without sparse rollouts."""
    return SMDLoss(actor, grpo=GRPOLoss(actor, dense=True), distill=DenseToSparseKL(actor, coeff))


@arm("naive", old=True)
def naive(actor: MaskedAttentionAdapter, coeff: float) -> GRPOLoss:
    """Sparse rollouts, dense learner; the ratio's denominator is the dense policy before the update."""
    return GRPOLoss(actor, dense=True, correction=Unweighted())


@arm("naive_sampler")
def naive_sampler(actor: MaskedAttentionAdapter, coeff: float) -> GRPOLoss:
    """As naive, but the denominator is the sampler's own probability; PPO's clip leaves large ratios of bad samples."""
    return GRPOLoss(actor, dense=True)


@arm("tis", old=True)
def tis(actor: MaskedAttentionAdapter, coeff: float) -> GRPOLoss:
    """Naive, with the importance weight of each token truncated at 2."""
    return GRPOLoss(actor, dense=True, correction=TruncatedIS(2.0))


@arm("sparse_rl", old=True)
def sparse_rl(actor: MaskedAttentionAdapter, coeff: float) -> GRPOLoss:
    """Naive, with Sparse-RL's released rule: truncate, mask tokens, drop sequences, normalise."""
    return GRPOLoss(actor, dense=True, correction=SparseRLCorrection())


@arm("smd_track1", exact=True)
def smd_track1(actor: MaskedAttentionAdapter, coeff: float) -> GRPOLoss:
    """The record is replayed, and nothing else: SMD with lambda 0."""
    return GRPOLoss(actor)


@arm("track2", old=True)
def track2(actor: MaskedAttentionAdapter, coeff: float) -> SMDLoss:
    """Naive, with the KL of the replayed pass: SMD's second track alone."""
    policy = GRPOLoss(actor, dense=True, correction=Unweighted())
    return SMDLoss(actor, grpo=policy, distill=DenseToSparseKL(actor, coeff))


@arm("smd", exact=True)
def smd(actor: MaskedAttentionAdapter, coeff: float) -> SMDLoss:
    """Both tracks: the record is replayed, and the dense pass teaches the replayed one."""
    return SMDLoss(actor, distill=DenseToSparseKL(actor, coeff))
