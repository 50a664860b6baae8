"""Both tracks of Shadow Mask Distillation in one loss."""

from __future__ import annotations

from tensordict import TensorClass, TensorDictBase
from torch import Tensor, nn

from smdlib.losses.base import TokenLoss
from smdlib.losses.distill import DenseToSparseKL
from smdlib.losses.grpo import GRPOLoss
from smdlib.losses.scoring import response_logits, token_scores
from smdlib.losses.tokens import read_tokens


class SMDLossOutput(TensorClass["nocast"]):  # noqa: D101 (the decorator replaces it: see below)
    loss_objective: Tensor
    loss_distill: Tensor
    clip_fraction: Tensor
    kl_approx: Tensor
    entropy: Tensor
    max_ratio: Tensor
    kl_dense_to_sparse: Tensor


# TensorClass puts a signature in the place of a docstring.
SMDLossOutput.__doc__ = """What `SMDLoss` returns, scalars; add up the ``loss_*`` entries and call ``backward``.

Attributes:
    loss_objective: As in `GRPOLossOutput`.
    loss_distill: As in `DenseToSparseKLOutput`.
    clip_fraction: As in `GRPOLossOutput`.
    kl_approx: As in `GRPOLossOutput`.
    entropy: As in `GRPOLossOutput`.
    max_ratio: As in `GRPOLossOutput`.
    kl_dense_to_sparse: As in `DenseToSparseKLOutput`.
"""


class SMDLoss(TokenLoss):
    """``L_GRPO(pi(y|x, M)) + coeff * KL(sg[pi(y|x)] || pi(y|x, M))`` (arXiv 2605.06850).

    One masked pass serves both terms; the teacher is one dense pass of the same weights without gradient.

    Args:
        actor: The policy, a `smdlib.masks.MaskedAttentionAdapter`.
        grpo: The policy term; ``GRPOLoss(actor)`` by default.
        distill: The distillation term; ``DenseToSparseKL(actor, coeff=0.1)`` by default.

    Raises:
        ValueError: if the terms belong to another actor, differ in temperature, or the policy term is dense.

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
        self, actor: nn.Module, *, grpo: GRPOLoss | None = None, distill: DenseToSparseKL | None = None
    ) -> None:
        grpo = grpo or GRPOLoss(actor)
        distill = distill or DenseToSparseKL(actor, temperature=grpo.temperature)
        super().__init__(actor, grpo.temperature)
        for name, term in (("grpo", grpo), ("distill", distill)):
            if term.actor_network is not actor:
                raise ValueError(f"{name} was built for another actor; both terms score the same weights.")
        if grpo.temperature != distill.temperature:
            raise ValueError(f"temperatures differ: grpo {grpo.temperature}, distill {distill.temperature}.")
        if grpo.dense:
            raise ValueError("SMDLoss needs the shadow mask in its policy term; build GRPOLoss without dense=True.")
        self.grpo = grpo
        self.distill = distill

    @property
    def in_keys(self) -> list:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Entries that are read."""
        return self.grpo.in_keys

    def forward(
        self,
        tensordict: TensorDictBase,
        policy_items: Tensor | int | None = None,
        distill_items: Tensor | int | None = None,
    ) -> SMDLossOutput:
        """Compute loss and metrics.

        Args:
            tensordict: Batch ``[B]`` of rows.
            policy_items: Items of the whole batch for the policy term, when this is a micro-batch of it.
            distill_items: Items of the whole batch for the distillation term.

        Returns:
            Scalars; without loss tokens both losses are 0 and backward works.

        Raises:
            KeyError: if an entry is missing, the shadow mask among them.
            ValueError: if entries disagree, or a loss token has no finite sampled log-prob.
        """
        batch = read_tokens(tensordict, self.tensor_keys, needs_shadow=True)
        logits = response_logits(self.actor_network, batch, batch.shadow, self.temperature)
        policy = self.grpo.from_scores(token_scores(logits, batch.targets), batch, policy_items)
        distill = self.distill.from_logits(logits, batch, distill_items)
        return SMDLossOutput(
            loss_objective=policy.loss_objective,
            loss_distill=distill.loss_distill,
            clip_fraction=policy.clip_fraction,
            kl_approx=policy.kl_approx,
            entropy=policy.entropy,
            max_ratio=policy.max_ratio,
            kl_dense_to_sparse=distill.kl_dense_to_sparse,
            batch_size=[],
        )
