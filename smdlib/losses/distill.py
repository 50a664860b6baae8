"""Dense-to-sparse distillation: the same weights with every key teach the policy that lost some."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor, nn

from smdlib.losses.aggregate import Aggregation, TokenMean
from smdlib.losses.base import TokenLoss, check_weight
from smdlib.losses.linear import TokenScores
from smdlib.losses.metrics import token_mean
from smdlib.losses.scoring import run_views, score_states
from smdlib.losses.tokens import TokenBatch, read_tokens
from smdlib.masks import View


class DenseToSparseKLOutput(TensorClass["nocast"]):  # noqa: D101 (the decorator replaces it: see below)
    loss_distill: Tensor
    kl_dense_to_sparse: Tensor


# TensorClass puts a signature in the place of a docstring.
DenseToSparseKLOutput.__doc__ = """What `DenseToSparseKL` returns, scalars.

Attributes:
    loss_distill: ``coeff`` times the aggregated KL.
    kl_dense_to_sparse: Mean KL over loss tokens in nats, in the direction of the loss.
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

    Raises:
        ValueError: for a negative weight, or a temperature out of range.

    Example:
        >>> from tensordict import TensorDict
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from smdlib import DenseToSparseKL, MaskedAttentionAdapter, ShadowMask
        >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> actor = MaskedAttentionAdapter(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)))
        >>> batch = TensorDict({("tokens", "full"): torch.arange(12).reshape(2, 6)}, [2])
        >>> batch["masks", "all_assistant_mask"] = torch.arange(6).expand(2, 6) > 2
        >>> batch["shadow"] = ShadowMask.dense(2, 6, 2, 4)
        >>> DenseToSparseKL(actor)(batch).kl_dense_to_sparse.item() < 1e-6
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
        weight = check_weight("coeff", coeff)
        self.register_buffer("coeff", torch.tensor(weight, device=next(actor.parameters()).device))
        self.aggregation = aggregation or TokenMean()
        self.reverse = reverse

    def __setattr__(self, name: str, value: Any) -> None:
        checked: Any = check_weight(name, value) if name == "coeff" else value
        super().__setattr__(name, checked)

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
        batch = read_tokens(tensordict, self.tensor_keys, shadow=True, policy=False)
        views = View(batch.shadow), View(None, gradient=False)
        states, teacher = run_views(self.actor_network, batch, *views).states
        scores = score_states(self.actor_network, batch, states, self.temperature, teacher, self.reverse)
        return self.from_scores(scores, batch, num_items)

    def from_scores(
        self, scores: TokenScores, batch: TokenBatch, num_items: Tensor | int | None = None
    ) -> DenseToSparseKLOutput:
        """Compute the loss from scores with a KL that were computed elsewhere.

        Args:
            scores: Scores ``[N]`` of the loss tokens.
            batch: The rows they belong to.
            num_items: As in `forward`.

        Returns:
            Scalars.
        """
        assert scores.kl is not None
        loss = self.coeff * self.aggregation(scores.kl, batch.lengths, num_items)
        return DenseToSparseKLOutput(
            loss_distill=loss, kl_dense_to_sparse=token_mean(scores.kl.detach()), batch_size=[]
        )
