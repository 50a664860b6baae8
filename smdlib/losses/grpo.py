"""Group-relative policy optimisation on log-probs of the shadow-masked policy."""

from __future__ import annotations

from tensordict import TensorClass, TensorDictBase
from torch import Tensor, nn

from smdlib.losses.aggregate import Aggregation, SequenceMean
from smdlib.losses.base import TokenLoss
from smdlib.losses.ratio import Ratio, TokenRatio
from smdlib.losses.scoring import TokenScores, response_logits, token_scores
from smdlib.losses.surrogate import ClippedSurrogate, Surrogate
from smdlib.losses.tokens import TokenBatch, read_tokens


class GRPOLossOutput(TensorClass["nocast"]):  # noqa: D101 (the decorator replaces it: see below)
    loss_objective: Tensor
    clip_fraction: Tensor
    kl_approx: Tensor
    entropy: Tensor
    max_ratio: Tensor


# TensorClass puts a signature in the place of a docstring.
GRPOLossOutput.__doc__ = """What `GRPOLoss` returns, scalars; add up the ``loss_*`` entries and call ``backward``.

Attributes:
    loss_objective: The negative surrogate.
    clip_fraction: Share of loss tokens that were clipped.
    kl_approx: Mean k3 estimate of KL(sampler || policy) in nats: the mismatch.
    entropy: Mean entropy of the policy's (tempered) distribution in nats.
    max_ratio: Largest ratio policy / sampler of a token.
"""


class GRPOLoss(TokenLoss):
    """GRPO (arXiv 2402.03300, eq. 3) whose policy attends to exactly the keys that the sampler saw.

    Takes a TensorDict of rows (ragged or padded on either side) with TorchRL's keys and the recorded ``"shadow"``, see
    `TokenKeys`; rename them with ``loss.set_keys(...)``.

    Args:
        actor: The policy, a `smdlib.masks.MaskedAttentionAdapter`.
        ratio: Importance ratio per token or per sequence.
        surrogate: What is maximised.
        aggregation: How token values become one number.
        temperature: The sampler's, above 0; log-probs are of the tempered distribution, on both sides.
        dense: The data was sampled without eviction: no shadow mask is read and the pass is dense.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from smdlib import GRPOLoss, MaskedAttentionAdapter, ShadowMask
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
        >>> actor = MaskedAttentionAdapter(model)
        >>> tokens, shadow = torch.arange(12).reshape(2, 6), ShadowMask.dense(2, 6, 2, 2)
        >>> sampled = actor.log_probs(tokens, shadow_mask=shadow).detach()
        >>> sampled[:, :3] = torch.nan  # the prompt
        >>> batch = TensorDict(
        ...     tokens=TensorDict(full=tokens, batch_size=[2]),
        ...     shadow=shadow,
        ...     log_probs=TensorDict(full=sampled, batch_size=[2]),
        ...     advantage=torch.tensor([1.0, -1.0]),
        ...     batch_size=[2],
        ... )
        >>> output = GRPOLoss(actor)(batch)
        >>> output.loss_objective.backward()
        >>> output.max_ratio
        tensor(1.)
    """

    output_type = GRPOLossOutput

    def __init__(
        self,
        actor: nn.Module,
        *,
        ratio: Ratio | None = None,
        surrogate: Surrogate | None = None,
        aggregation: Aggregation | None = None,
        temperature: float = 1.0,
        dense: bool = False,
    ) -> None:
        super().__init__(actor, temperature)
        self.ratio = ratio or TokenRatio()
        self.surrogate = surrogate or ClippedSurrogate()
        self.aggregation = aggregation or SequenceMean()
        self.dense = dense

    @property
    def in_keys(self) -> list:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Entries that are read."""
        keys = self.tensor_keys
        shadow = [] if self.dense else [keys.shadow]
        return [keys.action, keys.attention_mask, keys.loss_mask, keys.sample_log_prob, keys.advantage, *shadow]

    def forward(self, tensordict: TensorDictBase, num_items: Tensor | int | None = None) -> GRPOLossOutput:
        """Compute loss and metrics.

        Args:
            tensordict: Batch ``[B]`` of rows.
            num_items: Items of the whole batch when this is a micro-batch of it, as ``loss.aggregation.count`` counts
                them; then the losses of the micro-batches add up to that of the batch. Default: this batch's own.

        Returns:
            Scalars; without loss tokens the loss is 0 and backward works.

        Raises:
            KeyError: if an entry is missing, the shadow mask among them.
            ValueError: if entries disagree, or a loss token has no finite sampled log-prob.
        """
        batch = read_tokens(tensordict, self.tensor_keys, needs_shadow=not self.dense)
        logits = response_logits(self.actor_network, batch, batch.shadow, self.temperature)
        return self.from_scores(token_scores(logits, batch.targets), batch, num_items)

    def from_scores(
        self, scores: TokenScores, batch: TokenBatch, num_items: Tensor | int | None = None
    ) -> GRPOLossOutput:
        """Compute loss and metrics from scores that were computed elsewhere.

        Args:
            scores: Log-probs and entropy ``[N]`` of the loss tokens.
            batch: The rows they belong to.
            num_items: As in `forward`.

        Returns:
            Scalars.
        """
        assert batch.sample_log_prob is not None and batch.advantage is not None
        log_ratio = scores.log_probs - batch.sample_log_prob
        lengths = batch.lengths
        value = self.surrogate(self.ratio(log_ratio, lengths), scores.log_probs, batch.advantage)
        loss = -self.aggregation(value.objective, lengths, num_items)
        log_ratio, count = log_ratio.detach(), lengths.sum().clamp(min=1)
        return GRPOLossOutput(
            loss_objective=loss,
            clip_fraction=(value.clipped_low | value.clipped_high).sum() / count,
            kl_approx=(log_ratio.expm1() - log_ratio).sum() / count,
            entropy=scores.entropy.detach().sum() / count,
            max_ratio=log_ratio.exp().max() if log_ratio.numel() else log_ratio.new_ones(()),
            batch_size=[],
        )
