"""Both tracks of Shadow Mask Distillation in one loss."""

from __future__ import annotations

from tensordict import NestedKey, TensorClass, TensorDictBase
from torch import Tensor, nn

from smdlib.losses.base import TokenLoss
from smdlib.losses.distill import DenseToSparseKL
from smdlib.losses.grpo import GRPOLoss
from smdlib.losses.scoring import acceptance_rates, run_views, score_states
from smdlib.losses.tokens import TokenKeys
from smdlib.masks import View


class SMDLossOutput(TensorClass["nocast"]):  # noqa: D101 (the decorator replaces it: see below)
    loss_objective: Tensor
    loss_distill: Tensor
    kl_dense_to_sparse: Tensor
    clip_fraction: Tensor
    clip_fraction_low: Tensor
    clip_fraction_high: Tensor
    entropy: Tensor
    kl_approx: Tensor
    kl_approx_k3: Tensor
    ESS: Tensor
    max_ratio: Tensor
    max_mismatch: Tensor
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None
    rejected_fraction: Tensor | None = None
    retained_keys: Tensor | None = None
    prompts_per_row: Tensor | None = None
    acceptance_p5: Tensor | None = None


# TensorClass puts a signature in the place of a docstring.
SMDLossOutput.__doc__ = """What `SMDLoss` returns, scalars; add up the ``loss_*`` entries and call ``backward``.

The entries of `GRPOLossOutput` and `DenseToSparseKLOutput`, and

Attributes:
    acceptance_p5: 5th percentile over loss tokens of ``sum_v min(dense, masked)``; ``None`` unless asked for.
"""


class SMDLoss(TokenLoss):
    """``L_GRPO(pi(y|x, M)) + coeff * KL(sg[pi(y|x)] || pi(y|x, M))`` (arXiv 2605.06850).

    One masked pass serves both terms; the teacher is one dense pass of the same weights without gradient. With a policy
    term that is dense (``grpo=GRPOLoss(actor, dense=True)``) the loss is Track 2 alone: the dense pass carries the
    policy gradient and is the teacher of the masked pass. On tokens of a sparse sampler that policy term is off policy;
    a ``correction`` of `GRPOLoss` reweighs it.

    Args:
        actor: The policy, a `smdlib.masks.MaskedAttentionAdapter`.
        grpo: The policy term; ``GRPOLoss(actor)`` by default, at the temperature of the other term, or of an actor that
            samples.
        distill: The distillation term; ``DenseToSparseKL(actor, coeff=0.1)`` by default, likewise. Settings are changed
            on the terms, ``loss.grpo`` and ``loss.distill``.
        acceptance: Also report ``acceptance_p5``, which takes one more walk over the vocabulary.

    Raises:
        ValueError: if the terms belong to another actor or differ in temperature or keys.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from smdlib import MaskedAttentionAdapter, ShadowMask, SMDLoss
        >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> actor = MaskedAttentionAdapter(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)))
        >>> tokens, shadow = torch.arange(12).reshape(2, 6), ShadowMask.dense(2, 6, 2, 4)
        >>> sampled = actor.log_probs(tokens, shadow_mask=shadow).detach()
        >>> sampled[:, :3] = torch.nan  # the prompt
        >>> batch = TensorDict({("tokens", "full"): tokens, ("log_probs", "full"): sampled, "shadow": shadow}, [2])
        >>> batch["advantage"] = torch.tensor([1.0, -1.0])
        >>> output = SMDLoss(actor)(batch)
        >>> (output.loss_objective + output.loss_distill).backward()
    """

    output_type = SMDLossOutput

    def __init__(
        self,
        actor: nn.Module,
        *,
        grpo: GRPOLoss | None = None,
        distill: DenseToSparseKL | None = None,
        acceptance: bool = False,
    ) -> None:
        sampled = getattr(actor, "temperature", None) or 1.0
        grpo = grpo or GRPOLoss(actor, temperature=sampled if distill is None else distill.temperature)
        distill_keys = None if distill is None else distill.tensor_keys
        distill = distill or DenseToSparseKL(actor, temperature=grpo.temperature)
        super().__init__(actor, grpo.temperature)
        for name, term in (("grpo", grpo), ("distill", distill)):
            if term.actor_network is not actor:
                raise ValueError(f"{name} was built for another actor; both terms score the same weights.")
        if grpo.temperature != distill.temperature:
            raise ValueError(f"temperatures differ: grpo {grpo.temperature}, distill {distill.temperature}.")
        if distill_keys is not None and distill_keys != grpo.tensor_keys:
            raise ValueError(f"keys differ: grpo reads {grpo.tensor_keys}, distill {distill_keys}; set both alike.")
        self.grpo = grpo
        self.distill = distill
        self.acceptance = acceptance

    @property
    def tensor_keys(self) -> TokenKeys:
        """The keys in use, those of the policy term."""
        return self.grpo.tensor_keys

    @property
    def kl_to_ref_coeff(self) -> float:
        """Weight of the KL to a reference; set it on ``loss.grpo``."""
        return self.grpo.kl_to_ref_coeff

    @property
    def coeff(self) -> Tensor:
        """Weight of the distillation term, scheduled by ``loss.coeff = 0.05``."""
        return self.distill.coeff

    @coeff.setter
    def coeff(self, value: float) -> None:
        self.distill.coeff = value  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def in_keys(self) -> list:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Entries that are read."""
        return list(dict.fromkeys([*self.grpo.in_keys, *self.distill.in_keys]))

    def set_keys(self, **kwargs: NestedKey) -> None:
        """Rename entries, in both terms alike."""
        self.grpo.set_keys(**kwargs)
        self.distill.set_keys(**kwargs)

    def forward(
        self,
        tensordict: TensorDictBase,
        policy_items: Tensor | int | None = None,
        distill_items: Tensor | int | None = None,
    ) -> SMDLossOutput:
        """Compute loss and metrics.

        Args:
            tensordict: Batch ``[B]`` of rows.
            policy_items: Items of the whole batch for the policy term, ``loss.grpo.aggregation.count(lengths)`` with
                the loss tokens of each row, when this is a micro-batch of it or one rank's part. FSDP2 averages
                gradients over ranks: multiply the loss by their number (``examples/distributed/fsdp_learner.py``).
            distill_items: Likewise for the distillation term, ``loss.distill.aggregation.count(lengths)``; both or
                neither.

        Returns:
            Scalars; without loss tokens both losses are 0 and backward works.

        Raises:
            KeyError: if an entry is missing, the shadow mask among them.
            ValueError: if entries disagree, or a loss token has no finite sampled log-prob.
        """
        if (policy_items is None) != (distill_items is None):
            raise ValueError(
                "pass policy_items and distill_items both, or neither: they belong to the same whole batch."
            )
        actor, reverse = self.actor_network, self.distill.reverse
        batch = self.grpo.read(tensordict, shadow=True)
        (masked, dense), prompts_per_row = run_views(
            actor, batch, View(batch.shadow), View(None, gradient=self.grpo.dense)
        )
        policy_scores = score_states(actor, batch, dense, self.temperature) if self.grpo.dense else None
        scores = score_states(actor, batch, masked, self.temperature, dense.detach(), reverse)
        policy = self.grpo.from_scores(policy_scores or scores, batch, policy_items)
        distill = self.distill.from_scores(scores, batch, distill_items)
        merged = dict(policy.items()) | dict(distill.items())
        output = SMDLossOutput(**merged, batch_size=[])  # pyright: ignore[reportArgumentType]
        output.prompts_per_row = masked.new_tensor(prompts_per_row)
        if self.acceptance and dense.shape[0]:
            rates = acceptance_rates(actor, dense.detach(), masked.detach(), self.temperature)
            output.acceptance_p5 = rates.quantile(0.05)
        return output
