"""Dense-to-sparse distillation: the same weights with every key teach the policy that lost some."""

from __future__ import annotations

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor, nn

from smdlib.losses.aggregate import Aggregation, TokenMean
from smdlib.losses.base import TokenLoss
from smdlib.losses.scoring import full_kl, response_logits
from smdlib.losses.tokens import TokenBatch, read_tokens


class DenseToSparseKLOutput(TensorClass["nocast"]):  # noqa: D101 (the decorator replaces it: see below)
    loss_distill: Tensor
    kl_dense_to_sparse: Tensor


# TensorClass puts a signature in the place of a docstring.
DenseToSparseKLOutput.__doc__ = """What `DenseToSparseKL` returns, scalars.

Attributes:
    loss_distill: ``coeff`` times the KL.
    kl_dense_to_sparse: Mean KL over loss tokens in nats.
"""


class DenseToSparseKL(TokenLoss):
    """``coeff * KL(sg[pi(.|x)] || pi(.|x, M))`` on response tokens, exact over the vocabulary.

    Track 2 of Shadow Mask Distillation (arXiv 2605.06850). The teacher is a dense pass of the same
    weights without gradient.

    Args:
        actor: The policy, a `smdlib.masks.MaskedAttentionAdapter`.
        coeff: Weight lambda; a buffer, scheduled by ``loss.coeff = 0.05``.
        aggregation: How token values become one number; the mean over tokens by default.
        temperature: Of both distributions, above 0.
        reverse: KL(masked || sg[dense]) instead.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from smdlib import DenseToSparseKL, MaskedAttentionAdapter, ShadowMask
        >>> model = LlamaForCausalLM(
        ...     LlamaConfig(
        ...         vocab_size=32,
        ...         hidden_size=16,
        ...         intermediate_size=16,
        ...         num_hidden_layers=2,
        ...         num_attention_heads=4,
        ...         num_key_value_heads=2,
        ...     )
        ... )
        >>> batch = TensorDict(
        ...     tokens=TensorDict(full=torch.arange(12).reshape(2, 6), batch_size=[2]),
        ...     masks=TensorDict(all_assistant_mask=torch.arange(6).expand(2, 6) > 2, batch_size=[2]),
        ...     shadow=ShadowMask.dense(2, 6, 2, 2),
        ...     batch_size=[2],
        ... )
        >>> DenseToSparseKL(MaskedAttentionAdapter(model))(batch).kl_dense_to_sparse.item() < 1e-6
        True
    """

    output_type = DenseToSparseKLOutput
    _schedulable_buffers = frozenset({"coeff"})
    coeff: Tensor

    def __init__(
        self,
        actor: nn.Module,
        coeff: float = 0.1,
        *,
        aggregation: Aggregation | None = None,
        temperature: float = 1.0,
        reverse: bool = False,
    ) -> None:
        super().__init__(actor, temperature)
        self.register_buffer("coeff", torch.tensor(float(coeff), device=next(actor.parameters()).device))
        self.aggregation = aggregation or TokenMean()
        self.reverse = reverse

    @property
    def in_keys(self) -> list:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Entries that are read."""
        keys = self.tensor_keys
        return [keys.action, keys.attention_mask, keys.loss_mask, keys.shadow]

    def forward(self, tensordict: TensorDictBase, num_items: Tensor | int | None = None) -> DenseToSparseKLOutput:
        """Compute the loss: one masked pass with gradient, one dense pass without.

        Args:
            tensordict: Batch ``[B]`` of rows.
            num_items: Items of the whole batch when this is a micro-batch of it.

        Returns:
            Scalars; without loss tokens the loss is 0 and backward works.

        Raises:
            KeyError: if an entry is missing, the shadow mask among them.
        """
        batch = read_tokens(tensordict, self.tensor_keys, needs_shadow=True, needs_policy=False)
        masked = response_logits(self.actor_network, batch, batch.shadow, self.temperature)
        return self.from_logits(masked, batch, num_items)

    def from_logits(
        self, masked: Tensor, batch: TokenBatch, num_items: Tensor | int | None = None
    ) -> DenseToSparseKLOutput:
        """Compute the loss from the logits ``[N, V]`` of a masked pass, running only the teacher.

        Args:
            masked: Tempered logits of the loss tokens.
            batch: The rows they belong to.
            num_items: As in `forward`.

        Returns:
            Scalars.
        """
        with torch.no_grad():
            dense = response_logits(self.actor_network, batch, None, self.temperature)
        kl = full_kl(masked, dense) if self.reverse else full_kl(dense, masked)
        loss = self.coeff * self.aggregation(kl, batch.lengths, num_items)
        mean = kl.detach().sum() / batch.lengths.sum().clamp(min=1)
        return DenseToSparseKLOutput(loss_distill=loss, kl_dense_to_sparse=mean, batch_size=[])
