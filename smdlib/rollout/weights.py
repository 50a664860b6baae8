"""The learner's weights on their way to the samplers, and the version of the weights that sampled a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

VERSION = ("next", "policy_version")


class Sampler(Protocol):
    """What is needed of a collector: TorchRL's ``LLMCollector`` and ``RayLLMCollector`` have it."""

    @property
    def policy_version(self) -> str | int | None:
        """How many updates the policy has had, or ``None`` if that is not tracked."""
        ...

    def update_policy_weights_(self, policy_or_weights: Any) -> Any:
        """Copy the weights into the policy, and count the version up."""
        ...


def policy_weights(actor: nn.Module) -> TensorDict:
    """Return an actor's parameters and buffers the way TorchRL's collectors take them.

    Under FSDP2 the shards are gathered, so every rank has to call this.

    Args:
        actor: The learner's actor, of the same class and model as the samplers'.

    Returns:
        The weights by module, on the CPU, without gradient. On the CPU they may share memory with the actor's.

    Example:
        >>> policy_weights(nn.Linear(2, 1, bias=False))["weight"].shape
        torch.Size([1, 2])
    """
    weights: Any = TensorDict.from_module(actor)
    return weights.data.apply(_whole)


def push_weights(
    actor: nn.Module, collectors: Sequence[Sampler], *, put: Callable[[TensorDict], Any] | None = None
) -> int:
    """Give the learner's weights to all samplers, and return the version that their next rows will carry.

    A collector that runs one call at a time (not ``start()``, nor Ray's ``max_concurrency`` above 1) takes weights and
    version between two rollouts, so that a row's version says exactly which weights sampled it. Do not call
    ``increment_version()`` as well: ``update_policy_weights_`` has counted already.

    Args:
        actor: The learner's actor, of the same class and model as the samplers'. TorchRL compares shapes only: it
            ignores weights that samplers do not have, and rounds to their dtype. The losses' ``max_mismatch`` shows it.
        collectors: ``LLMCollector`` or ``RayLLMCollector``, with ``track_policy_version=True`` and no weight updater.
        put: Called once with the weights; the collectors get its result. With Ray, ``ray.put`` stores them once for
            all workers instead of sending them to each.

    Returns:
        The version of these weights, the same in every collector: 0 are those that the samplers started with.

    Raises:
        ValueError: if a collector does not track versions.
        RuntimeError: if the collectors disagree on the version, because one was restarted or missed an update.

    Example:
        >>> from torchrl.collectors.llm import LLMCollector
        >>> from smdlib.rollout import SparseActor, dataset_env
        >>> from smdlib.testing import byte_tokenizer, tiny_model
        >>> options = {"max_new_tokens": 6, "eos_token_id": None}
        >>> def make_actor():
        ...     return SparseActor(tiny_model(), byte_tokenizer(), policy="h2o", budget=0.5, generate_kwargs=options)
        >>> env = dataset_env([{"prompt": "Why?"}], byte_tokenizer(), lambda response, row: 0.0, prompts=1, group=2)
        >>> collector = LLMCollector(
        ...     env, policy_factory=make_actor, dialog_turns_per_batch=2, track_policy_version=True, flatten_data=True
        ... )
        >>> before = policy_versions(collector.next())
        >>> version = push_weights(make_actor(), [collector])
        >>> before, version, policy_versions(collector.next())
        (tensor([0, 0]), 1, tensor([1, 1]))
    """
    if not collectors:
        raise ValueError("there are no collectors to give the weights to.")
    untracked = [index for index, collector in enumerate(collectors) if collector.policy_version is None]
    if untracked:
        raise ValueError(f"collectors {untracked} count no versions; make them with track_policy_version=True.")
    weights = policy_weights(actor)
    sent = weights if put is None else put(weights)
    for collector in collectors:
        collector.update_policy_weights_(sent)
    versions = [collector.policy_version for collector in collectors]
    if len(set(versions)) > 1:
        raise RuntimeError(
            f"the collectors are at versions {versions}: one was restarted or missed an update, so its rows' versions "
            "do not say which weights sampled them. Make the collectors anew."
        )
    version = versions[0]
    if not isinstance(version, int):
        raise ValueError(f"the version is {version!r}; count with whole numbers, PolicyVersion(version_type=int).")
    return version


def policy_versions(batch: TensorDictBase) -> Tensor:
    """Return which version of the weights sampled each row, int64 ``[*batch]``.

    That is the version of the step: ``"policy_version"`` without ``"next"`` is from the reset before, which may be
    older, since a collector draws the next prompts before it gets new weights.

    Args:
        batch: Rows of a collector with ``track_policy_version=True``.

    Raises:
        KeyError: if the rows have no version.

    Example:
        >>> import torch
        >>> row = {"policy_version": torch.tensor([0]), ("next", "policy_version"): torch.tensor([1])}
        >>> policy_versions(TensorDict(row, batch_size=[1]))
        tensor([1])
    """
    version = batch.get(VERSION, None)
    if version is None:
        raise KeyError(f"the rows have no {VERSION}; make the collector with track_policy_version=True.")
    return version


def _whole(weight: Tensor) -> Tensor:
    # Asked by name: one process needs no part of torch.distributed.
    gather = getattr(weight, "full_tensor", None)
    return (weight if gather is None else gather()).cpu()
