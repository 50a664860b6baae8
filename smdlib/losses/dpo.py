"""Online DPO on log-probs of the shadow-masked policy."""

from __future__ import annotations

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor, nn

from smdlib.losses.aggregate import divide_by_items
from smdlib.losses.base import TokenLoss
from smdlib.losses.scoring import run_views, score_states
from smdlib.losses.segments import segment_sum
from smdlib.losses.tokens import read_tokens
from smdlib.masks import View


class OnlineDPOLossOutput(TensorClass["nocast"]):  # noqa: D101 (the decorator replaces it: see below)
    loss_dpo: Tensor
    accuracy: Tensor
    margin: Tensor


# TensorClass puts a signature in the place of a docstring.
OnlineDPOLossOutput.__doc__ = """What `OnlineDPOLoss` returns, scalars.

Attributes:
    loss_dpo: Mean over pairs of ``-log sigmoid(beta * margin)``.
    accuracy: Share of pairs with a positive margin.
    margin: Mean over pairs of how much more the policy favours the better response than the reference does, in nats.
"""


class OnlineDPOLoss(TokenLoss):
    """``-log sigmoid(beta * [log pi/ref (better) - log pi/ref (worse)])`` (DPO, arXiv 2305.18290, eq. 7).

    Online: rows are pairs of responses that the policy itself has just sampled (arXiv 2402.04792), row ``2i`` and row
    ``2i + 1`` to the same prompt; of each pair the one with the larger ``advantage`` (a reward will do) is the better.
    The policy attends to the recorded keys; the reference's log-probs are read from ``ref_log_probs``.

    Args:
        actor: The policy, a `smdlib.masks.MaskedAttentionAdapter`.
        beta: Strength of the reference, above 0.
        temperature: The sampler's.
        dense: The data was sampled without eviction.

    Raises:
        ValueError: for ``beta`` or a temperature out of range.
    """

    output_type = OnlineDPOLossOutput

    def __init__(self, actor: nn.Module, *, beta: float = 0.1, temperature: float = 1.0, dense: bool = False) -> None:
        super().__init__(actor, temperature)
        if not beta > 0:
            raise ValueError(f"beta must be above 0, not {beta}.")
        self.beta = beta
        self.dense = dense

    @property
    def in_keys(self) -> list:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Entries that are read."""
        keys = self.tensor_keys
        wanted = [keys.action, keys.attention_mask, keys.loss_mask, keys.sample_log_prob, keys.ref_log_probs]
        return [*wanted, keys.advantage] + ([] if self.dense else [keys.shadow])

    def forward(self, tensordict: TensorDictBase, num_items: Tensor | int | None = None) -> OnlineDPOLossOutput:
        """Compute loss and metrics.

        Args:
            tensordict: Batch ``[2 * pairs]`` of rows.
            num_items: Decided pairs (of unequal advantage) of the whole batch when this is a micro-batch of it.

        Returns:
            Scalars. Pairs of equal advantage prefer neither and do not count.

        Raises:
            KeyError: if an entry is missing, the shadow mask among them.
            ValueError: for an odd number of rows, a row without loss tokens, or advantages that differ within a row.
        """
        batch = read_tokens(tensordict, self.tensor_keys, shadow=not self.dense, reference=True)
        lengths = batch.lengths
        if lengths.shape[0] % 2 or bool((lengths == 0).any()):
            raise ValueError(
                f"rows come in pairs, each with at least one response token; got {lengths.shape[0]} rows of "
                f"{lengths.tolist()} loss tokens."
            )
        assert batch.ref_log_probs is not None and batch.advantage is not None
        (states,) = run_views(self.actor_network, batch, View(batch.shadow)).states
        log_probs = score_states(self.actor_network, batch, states, self.temperature).log_probs
        favour = segment_sum(log_probs - batch.ref_log_probs, lengths).reshape(-1, 2)
        # A row's own value, not a mean of copies of it: rounding would prefer one of two equal rewards.
        ends = lengths.cumsum(0)
        score = batch.advantage[ends - 1]
        if bool((batch.advantage != score.repeat_interleave(lengths)).any()):
            raise ValueError("advantages differ within a row; a pair is compared by one value (reward) per response.")
        score = score.reshape(-1, 2)
        sign = (score[:, 0] - score[:, 1]).sign()
        margin = sign * (favour[:, 0] - favour[:, 1])
        decided = sign != 0
        total = torch.where(decided, -nn.functional.logsigmoid(self.beta * margin), 0.0).sum()
        loss = divide_by_items(total, num_items, decided.sum())
        count = decided.sum().clamp(min=1)
        return OnlineDPOLossOutput(
            loss_dpo=loss,
            accuracy=(margin.detach() > 0).sum() / count,
            margin=margin.detach().sum() / count,
            batch_size=[],
        )
