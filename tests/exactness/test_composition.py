"""Wrapped and combined policies, and layers with shares of their own, replay exactly too."""

from __future__ import annotations

import pytest

from smdlib import MaskedAttentionAdapter, make_policy
from smdlib.policies import LayerAllocation
from tests.families import VOCAB, make_model
from tests.sampling import kept_positions, parity, ragged_prompts, sample

SUNK = "protected(policy='knorm', sinks=2, recent=1)"
POLICIES = [
    SUNK,
    "protected(policy='tova', spans=[(1, 3)])",
    f"combined(parts=[('snapkv(window=3)', 1.0), ('h2o', 0.5), ({SUNK!r}, 1)])",
]


@pytest.mark.parametrize(("evict_every", "chunk"), [(None, None), (1, 8), (4, None)])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_replayed_log_probs_equal_the_samplers(family, policy, evict_every, chunk):
    model, allocation = make_model(family), LayerAllocation([3, 1, 2])
    with MaskedAttentionAdapter(model) as adapter:
        taken = sample(
            model,
            make_policy(policy),
            12,
            prompts=ragged_prompts([26, 9, 17], VOCAB),
            allocation=allocation,
            evict_every=evict_every,
            chunk=chunk,
        )
        shadow, dense = parity(model, adapter, taken)
    assert shadow <= 1e-4
    assert dense > 0.01 and dense >= 100 * shadow
    if evict_every == 1:
        for row in range(3):
            for layer, budget in enumerate([18, 6, 12]):
                kept = kept_positions(taken.cache, layer, row)
                assert [len(head) for head in kept] == [budget] * len(kept)
                protected = {1, 2} if "spans" in policy else {0, 1}
                assert all(protected <= set(head) for head in kept)
