"""Group-relative policy optimisation on log-probs of the shadow-masked policy."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor, nn

from smdlib.losses.aggregate import Aggregation, SequenceMean
from smdlib.losses.base import TokenLoss, check_weight
from smdlib.losses.corrections import Correction
from smdlib.losses.linear import TokenScores
from smdlib.losses.metrics import effective_sample_size, mismatch_k1, mismatch_k3, token_mean
from smdlib.losses.ratio import Ratio, TokenRatio
from smdlib.losses.scoring import run_views, score_states
from smdlib.losses.surrogate import RATIO_BOUND, ClippedSurrogate, Surrogate
from smdlib.losses.tokens import TokenBatch, read_tokens
from smdlib.masks import View


class GRPOLossOutput(TensorClass["nocast"]):  # noqa: D101 (the decorator replaces it: see below)
    loss_objective: Tensor
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


# TensorClass puts a signature in the place of a docstring.
GRPOLossOutput.__doc__ = """What `GRPOLoss` returns, scalars; add up the ``loss_*`` entries and call ``backward``.

``sum(value for name, value in output.items() if name.startswith("loss_")).backward()``.

All means and shares are over loss tokens. The mismatch compares the policy with the sampler, whatever the correction.

Attributes:
    loss_objective: The negative surrogate.
    clip_fraction: Share that was clipped.
    clip_fraction_low: Share clipped because the ratio fell below the lower bound.
    clip_fraction_high: Share clipped because the ratio rose above the upper bound.
    entropy: Mean entropy of the policy's (tempered) distribution in nats.
    kl_approx: Mismatch, k1 estimate of KL(sampler || policy) in nats.
    kl_approx_k3: Mismatch, k3 estimate in nats.
    ESS: Effective share of tokens under the ratios policy / sampler.
    max_ratio: Largest ratio policy / sampler.
    max_mismatch: Largest ``|log policy - log sampler|``, in nats: on policy, the parity of replay.
    loss_kl_to_ref: Weighted KL to the reference policy; ``None`` without one.
    kl_to_ref: Mean k3 estimate of KL(policy || reference) in nats; ``None`` without one.
    rejected_fraction: Share that the correction rejected; ``None`` without one.
    retained_keys: Share of the keys that response queries could see; ``None`` for dense data.
    prompts_per_row: Prompts computed per row: ``1 / G`` where each group of G rows shared its prompt, 1 where every row
        was run whole.
"""


class GRPOLoss(TokenLoss):
    """GRPO (arXiv 2402.03300, eq. 3) whose policy attends to exactly the keys that the sampler saw.

    Takes a TensorDict of rows (ragged or padded on either side) with TorchRL's keys and the recorded ``"shadow"``, see
    `TokenKeys`; rename them with ``loss.set_keys(...)``. Presets: `grpo`, `dr_grpo`, `dapo`, `gspo`, `cispo`.

    Args:
        actor: The policy, a `smdlib.masks.MaskedAttentionAdapter`.
        ratio: Importance ratio per token or per sequence.
        surrogate: What is maximised.
        aggregation: How token values become one number.
        correction: Weighs the tokens of a sampler that the learner does not replay; needs ``dense=True``. The ratio is
            then the policy's to the dense policy at ``old_log_prob``, and the weight that of the latter to the sampler.
        kl_to_ref_coeff: Weight of the k3 estimate of KL(policy || reference), whose log-probs are read from
            ``ref_log_probs``; 0 reads none.
        temperature: The sampler's, above 0; log-probs are of the tempered distribution, on both sides.
        dense: No shadow mask is read and the pass is dense: for data that was sampled without eviction, or for the
            baselines.

    Raises:
        ValueError: for a correction without ``dense=True``, a negative weight, or a temperature out of range.

    Example:
        >>> from tensordict import TensorDict
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from smdlib import GRPOLoss, MaskedAttentionAdapter, ShadowMask
        >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> actor = MaskedAttentionAdapter(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)))
        >>> tokens, shadow = torch.arange(12).reshape(2, 6), ShadowMask.dense(2, 6, 2, 4)
        >>> sampled = actor.log_probs(tokens, shadow_mask=shadow).detach()
        >>> sampled[:, :3] = torch.nan  # the prompt
        >>> batch = TensorDict({("tokens", "full"): tokens, ("log_probs", "full"): sampled, "shadow": shadow}, [2])
        >>> batch["advantage"] = torch.tensor([1.0, -1.0])
        >>> output = GRPOLoss(actor)(batch)
        >>> output.loss_objective.backward()
        >>> f"{output.max_ratio:.3f} {output.retained_keys:.0%}"
        '1.000 100%'
    """

    output_type = GRPOLossOutput

    def __init__(
        self,
        actor: nn.Module,
        *,
        ratio: Ratio | None = None,
        surrogate: Surrogate | None = None,
        aggregation: Aggregation | None = None,
        correction: Correction | None = None,
        kl_to_ref_coeff: float = 0.0,
        temperature: float = 1.0,
        dense: bool = False,
    ) -> None:
        super().__init__(actor, temperature)
        if correction is not None and not dense:
            raise ValueError(
                "a correction reweighs what a dense learner gets from a sparse sampler, but this loss replays the "
                "mask, so there is nothing to correct; build it with dense=True."
            )
        parts = {"ratio": ratio, "surrogate": surrogate, "aggregation": aggregation, "correction": correction}
        for name, part in parts.items():
            if part is not None and (isinstance(part, type) or not callable(part)):
                raise TypeError(
                    f"{name} must be an object such as TokenRatio() or ClippedSurrogate(0.2), not {part!r}."
                )
        self.ratio = ratio or TokenRatio()
        self.surrogate = surrogate or ClippedSurrogate()
        self.aggregation = aggregation or SequenceMean()
        self.correction = correction
        self.kl_to_ref_coeff = kl_to_ref_coeff
        self.dense = dense

    def __setattr__(self, name: str, value: Any) -> None:
        checked: Any = check_weight(name, value) if name == "kl_to_ref_coeff" else value
        super().__setattr__(name, checked)

    @property
    def in_keys(self) -> list:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Entries that are read."""
        keys = self.tensor_keys
        wanted = [keys.action, keys.attention_mask, keys.loss_mask, keys.sample_log_prob, keys.advantage]
        wanted += [] if self.dense else [keys.shadow]
        wanted += [] if self.correction is None else [keys.old_log_prob]
        return wanted + ([keys.ref_log_probs] if self.kl_to_ref_coeff else [])

    def read(self, tensordict: TensorDictBase, *, shadow: bool) -> TokenBatch:
        """Read the entries that this loss needs, the shadow mask if ``shadow``."""
        return read_tokens(
            tensordict,
            self.tensor_keys,
            shadow=shadow,
            old=self.correction is not None,
            reference=self.kl_to_ref_coeff > 0,
        )

    def forward(self, tensordict: TensorDictBase, num_items: Tensor | int | None = None) -> GRPOLossOutput:
        """Compute loss and metrics.

        Args:
            tensordict: Batch ``[B]`` of rows.
            num_items: Items of the whole batch when this is a micro-batch of it, as ``loss.aggregation.count`` counts
                them from the loss tokens of each row, ``loss_mask.sum(1)``; then the losses of the micro-batches add up
                to that of the batch (but for a `SparseRLCorrection`, which normalises over what it is given). Default:
                this batch's own.

        Returns:
            Scalars; without loss tokens the loss is 0 and backward works.

        Raises:
            KeyError: if an entry is missing, the shadow mask among them.
            ValueError: if entries disagree, or a loss token has no finite sampled log-prob.
        """
        batch = self.read(tensordict, shadow=not self.dense)
        passes = run_views(self.actor_network, batch, View(batch.shadow))
        scores = score_states(self.actor_network, batch, passes.states[0], self.temperature)
        output = self.from_scores(scores, batch, num_items)
        output.prompts_per_row = scores.log_probs.new_tensor(passes.prompts_per_row)
        return output

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
        lengths, rejected = batch.lengths, None
        old = batch.sample_log_prob if self.correction is None else batch.old_log_prob
        assert old is not None
        log_ratio = self.ratio(scores.log_probs - old, lengths)
        value = self.surrogate(log_ratio, scores.log_probs, batch.advantage)
        objective = value.objective
        if self.correction is not None:
            corrected = self.correction(old - batch.sample_log_prob, lengths)
            # Selected rather than multiplied by 0: a rejected token may hold an infinite objective.
            objective = torch.where(corrected.kept, corrected.weights * objective, 0.0)
            rejected = token_mean((~corrected.kept).float())
        mismatch = scores.log_probs.detach() - batch.sample_log_prob
        output = GRPOLossOutput(
            loss_objective=-self.aggregation(objective, lengths, num_items),
            clip_fraction=token_mean((value.clipped_low | value.clipped_high).float()),
            clip_fraction_low=token_mean(value.clipped_low.float()),
            clip_fraction_high=token_mean(value.clipped_high.float()),
            entropy=token_mean(scores.entropy.detach()),
            rejected_fraction=rejected,
            retained_keys=batch.retained_keys(),
            kl_approx=mismatch_k1(mismatch),
            kl_approx_k3=mismatch_k3(mismatch),
            ESS=effective_sample_size(mismatch),
            max_ratio=mismatch.exp().max() if mismatch.numel() else mismatch.new_ones(()),
            max_mismatch=mismatch.abs().max() if mismatch.numel() else mismatch.new_zeros(()),
            batch_size=[],
        )
        if batch.ref_log_probs is not None:
            # Bounded as the ratios are, so that one far token cannot make the loss infinite.
            distance = (batch.ref_log_probs - scores.log_probs).clamp(-RATIO_BOUND, RATIO_BOUND)
            kl = distance.expm1() - distance
            output.loss_kl_to_ref = self.kl_to_ref_coeff * self.aggregation(kl, lengths, num_items)
            output.kl_to_ref = token_mean(kl.detach())
        return output
