"""The losses written out token by token, in float64 Python loops over rows: the truth for every fast path."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from smdlib import MaskedAttentionAdapter, ShadowMask
from tests.families import VOCAB, make_model
from tests.sampling import ragged_prompts, sample

TEMPERATURE = 0.8


def rollout(
    side: str = "left",
    family: str = "llama",
    seed: int = 0,
    drift: float = 0.0,
    temperature: float = TEMPERATURE,
    dtype: torch.dtype = torch.float32,
):
    """Sample a ragged batch under eviction; ``drift`` moves the weights afterwards, as an update would.

    Returns:
        ``(adapter, batch, rows)``: rows are ``(ids, shadow, sampled log-probs, prompt length, advantage)``, unpadded.
    """
    model = make_model(family, seed).to(dtype)
    adapter = MaskedAttentionAdapter(model)
    taken = sample(
        model, "streaming", 0.5, prompts=ragged_prompts([14, 6, 9, 11], VOCAB, seed), new_tokens=7, evict_every=1,
        eos=[3, 4, 5, 6], ends={1: 3, 2: 5}, seed=seed,
    )  # fmt: skip
    with torch.no_grad():  # at this temperature, as a sampler would report them
        log_probs = adapter.log_probs(taken.tokens, taken.attention_mask, taken.shadow, temperature)
    move(adapter, drift, seed)
    advantage = torch.tensor([1.3, -0.4, 0.7, -1.6])
    rows = []
    for row in range(4):
        real, response = taken.attention_mask[row].bool(), taken.response_mask[row]
        ids, length = taken.tokens[row][real], int(taken.lengths[row])
        shadow = ShadowMask(evicted_at=taken.shadow.evicted_at[row, :length], batch_size=[])
        rows.append((ids, shadow, log_probs[row][real], length - int(response.sum()), float(advantage[row])))
    return adapter, pad_rows(rows, side), rows


@torch.no_grad()
def move(adapter: MaskedAttentionAdapter, drift: float, seed: int = 0) -> None:
    """Move the weights as an update would."""
    generator = torch.Generator().manual_seed(seed)
    for weight in adapter.parameters():
        weight += drift * torch.randn(weight.shape, generator=generator) * weight.std()


@torch.no_grad()
def dense_log_probs(adapter: MaskedAttentionAdapter, rows: list, temperature: float = TEMPERATURE) -> list[Tensor]:
    """Log-probs ``[T]`` of each unpadded row with every key, float32 and NaN at its first token."""
    return [adapter.log_probs(row[0][None], temperature=temperature)[0].float() for row in rows]


def pad_rows(rows: list, side: str, extra: int = 0) -> TensorDict:
    """Pad rows on one side, with ``extra`` columns more than needed."""
    width = max(len(row[0]) for row in rows) + extra

    def place(values: Tensor, fill: float) -> Tensor:
        gap = (width - len(values), 0) if side == "left" else (0, width - len(values))
        return torch.nn.functional.pad(values, gap, value=fill)

    def stacked(make, fill: float) -> Tensor:
        return torch.stack([place(make(row), fill) for row in rows])

    return TensorDict(
        {
            ("tokens", "full"): stacked(lambda row: row[0], 0),
            ("masks", "all_attention_mask"): stacked(lambda row: torch.ones_like(row[0]), 0).bool(),
            ("masks", "all_assistant_mask"): stacked(lambda row: (torch.arange(len(row[0])) >= row[3]).int(), 0).bool(),
            ("log_probs", "full"): stacked(lambda row: row[2], torch.nan),
            "advantage": torch.tensor([row[4] for row in rows]),
            "shadow": ShadowMask.stack([row[1] for row in rows]),
        },
        batch_size=[len(rows)],
    )


def pad_values(values: list[Tensor], side: str) -> Tensor:
    """Pad what belongs to the tokens of rows with NaN, ``[B, T]``."""
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=torch.nan, padding_side=side)


def row_distributions(
    adapter: MaskedAttentionAdapter, row: tuple, *, dense: bool = False, temperature: float = TEMPERATURE
) -> Tensor:
    """Log-distributions ``[R, V]`` of one row's response tokens, from an unpadded pass of the row alone."""
    ids, shadow, _, prompt, _ = row
    logits = adapter(ids[None], None, None if dense else shadow[None])[0].double() / temperature
    return logits[prompt - 1 : -1].log_softmax(-1)


def gradients(adapter, loss):
    """Gradients of the parameters that the loss depends on, by name."""
    parameters = dict(adapter.named_parameters())
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=True)
    return {name: grad for name, grad in zip(parameters, grads, strict=True) if grad is not None}


def assert_same(adapter, actual, expected, rtol=1e-5):
    """Two losses are equal, and so are their gradients in every parameter."""
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=rtol / 10)
    mine, truth = gradients(adapter, actual), gradients(adapter, expected)
    assert mine.keys() == truth.keys()
    scale = max(float(grad.abs().max()) for grad in truth.values())
    assert scale > 1e-3
    for name, grad in truth.items():
        torch.testing.assert_close(
            mine[name], grad, rtol=100 * rtol, atol=2 * rtol * scale, msg=lambda text, n=name: n + text
        )
