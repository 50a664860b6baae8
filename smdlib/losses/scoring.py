"""From a batch to scores of its loss tokens: the passes of the actor and the fused head."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from smdlib.losses.fused_head import HeadTransform
from smdlib.losses.linear import TokenScores, linear_scores
from smdlib.losses.metrics import acceptance
from smdlib.losses.tokens import TokenBatch
from smdlib.masks import LanguageHead, ShadowMask, View
from smdlib.masks.passes import run_whole


@runtime_checkable
class Actor(Protocol):
    """What a loss needs of its policy; `smdlib.masks.MaskedAttentionAdapter` is one.

    An actor that also has ``response_states``, as the adapter has, is asked for all passes of a loss at once.
    """

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor | None, shadow_mask: ShadowMask | None) -> Tensor:
        """Return the last hidden states ``[B, T, D]`` under the mask, dense where it is ``None``."""
        ...

    def head(self) -> LanguageHead:
        """Return what turns them into logits."""
        ...


class Passes(NamedTuple):
    """States ``[N, D]`` that predict the loss tokens, one tensor a view, and prompts computed per row."""

    states: list[Tensor]
    prompts_per_row: float


def run_views(actor: Actor, batch: TokenBatch, *views: View) -> Passes:
    """Run the actor in several views and keep the states that predict loss tokens.

    Args:
        actor: The policy; one with ``response_states``, as the adapter has, computes each prompt once.
        batch: Rows of tokens.
        *views: Masked or dense, with gradient or without.

    Returns:
        The states, row after row.
    """
    rows = batch.input_ids, batch.attention_mask, batch.loss_mask
    shared = getattr(actor, "response_states", None)
    if shared is not None:
        return Passes(*shared(*rows, views))
    return Passes(run_whole(actor.hidden_states, *rows, views), 1.0)


def score_states(
    actor: Actor,
    batch: TokenBatch,
    hidden: Tensor,
    temperature: float,
    teacher: Tensor | None = None,
    reverse_kl: bool = False,
) -> TokenScores:
    """Score the loss tokens from the states that predict them.

    Args:
        actor: The policy, for its head.
        batch: Rows of tokens.
        hidden: ``[N, D]``.
        temperature: Of all distributions.
        teacher: ``[N, D]``, for the KL.
        reverse_kl: KL(student || teacher) instead of KL(teacher || student).

    Returns:
        Scores ``[N]`` in nats.
    """
    head = actor.head()
    transform = HeadTransform(temperature, head.scale, head.softcap)
    return head.whole(
        lambda head: linear_scores(
            hidden, head.weight, batch.targets, teacher, bias=head.bias, transform=transform, reverse_kl=reverse_kl
        )
    )


@torch.no_grad()
def acceptance_rates(actor: Actor, p_hidden: Tensor, q_hidden: Tensor, temperature: float, block: int = 64) -> Tensor:
    """``sum_v min(p_v, q_v)`` of the distributions that two passes predict (see `smdlib.losses.metrics.acceptance`).

    Args:
        actor: The policy, for its head.
        p_hidden: ``[N, D]``.
        q_hidden: ``[N, D]``.
        temperature: Of both distributions.
        block: Tokens per block.

    Returns:
        ``[N]``.
    """

    def rates(head: LanguageHead) -> Tensor:
        parts = zip(p_hidden.split(block), q_hidden.split(block), strict=True)
        return torch.cat(
            [acceptance(head.logits(p).float() / temperature, head.logits(q).float() / temperature) for p, q in parts]
        )

    return actor.head().whole(rates)
