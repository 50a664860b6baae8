"""Scores of loss tokens from logits: log-prob, entropy, and the exact KL between two passes."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from smdlib.losses.tokens import TokenBatch
from smdlib.masks import ShadowMask


class Actor(Protocol):
    """What a loss needs of its policy; `smdlib.masks.MaskedAttentionAdapter` is one."""

    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor | None, shadow_mask: ShadowMask | None, **kwargs: Any
    ) -> Tensor:
        """Return logits ``[B, T, V]`` under the mask, dense where it is ``None``."""
        ...


class TokenScores(NamedTuple):
    """Values of the N loss tokens in nats, float32 ``[N]``."""

    log_probs: Tensor
    entropy: Tensor


def response_logits(actor: Actor, batch: TokenBatch, shadow: ShadowMask | None, temperature: float) -> Tensor:
    """Run the actor and keep what predicts loss tokens.

    Args:
        actor: The policy.
        batch: Rows of tokens.
        shadow: Mask of the pass, ``None`` for a dense one.
        temperature: The sampler's; logits are divided by it.

    Returns:
        float32 ``[N, V]``, the logits that predict the N loss tokens, row after row.
    """
    # Columns before the first loss token of any row predict nothing that counts.
    used = batch.loss_mask.any(0)
    first = int(used.int().argmax()) if bool(used.any()) else batch.input_ids.shape[1] - 1
    logits = actor(batch.input_ids, batch.attention_mask, shadow, logits_to_keep=batch.input_ids.shape[1] - first + 1)
    return logits[:, :-1][batch.loss_mask[:, first:]].float() / temperature


def token_scores(logits: Tensor, targets: Tensor) -> TokenScores:
    """Log-prob of each target and entropy of its distribution.

    Args:
        logits: float32 ``[N, V]``, tempered.
        targets: int64 ``[N]``.

    Returns:
        Log-probs and entropy ``[N]`` in nats.

    Example:
        >>> import torch
        >>> token_scores(torch.zeros(1, 4), torch.tensor([2]))
        TokenScores(log_probs=tensor([-1.3863]), entropy=tensor([1.3863]))
    """
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return TokenScores(log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy)


def full_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Exact KL(p || q) over the whole vocabulary.

    Args:
        p_logits: ``[N, V]``.
        q_logits: ``[N, V]``.

    Returns:
        ``[N]`` in nats.

    Example:
        >>> import torch
        >>> full_kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0]]))
        tensor([0.1201])
    """
    p, q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)
