"""What a policy is shown during a rollout is what the model computed: attention mass, queries, keys, positions.

A replay is exact whatever was evicted, so parity cannot see a policy that decides on wrong numbers. This can.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from smdlib import CacheView, CompressedCache, EvictionPolicy, MaskedAttentionAdapter, ShadowMaskRecorder, make_policy
from tests.exactness.plain_llama import PlainLlama
from tests.families import VOCAB, make_model
from tests.sampling import feed, ragged_prompts

WINDOW = 4
SAME = {"rtol": 1e-4, "atol": 1e-5}


@dataclass
class Spy:
    """Decides like another policy, and keeps copies of what it was shown."""

    policy: EvictionPolicy
    views: list[CacheView] = field(default_factory=list)
    query_window: int = WINDOW
    tracks_attention: bool = True

    def score(self, view: CacheView) -> Tensor:
        copies = {name: value.clone() for name, value in vars(view).items() if isinstance(value, Tensor)}
        self.views.append(CacheView(**(vars(view) | copies)))
        return self.policy.score(view)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("evict_every", [1, 3])
@pytest.mark.parametrize("chunks", [[18], [8, 9, 1]], ids=["one-shot", "chunked"])
@pytest.mark.parametrize("name", ["h2o", "snapkv", "random"])
def test_views_show_what_the_model_computed(name, chunks, evict_every, backend):
    model = make_model("llama")
    options = {"snapkv": {"window": WINDOW, "kernel_size": 3}, "random": {"recent": 1}}.get(name, {})
    spy, recorder = Spy(make_policy(name, **options)), ShadowMaskRecorder()
    ids, mask = ragged_prompts([25, 14], VOCAB)  # columns: prompt 18, decoded 7
    with MaskedAttentionAdapter(model, backend=backend):
        cache = CompressedCache(
            model.config, spy, 6, evict_every=evict_every, recorder=recorder, prompt_lengths=mask[:, :18].sum(1)
        )
        feed(model, cache, ids, mask, chunks + [1] * 7)
    prefills, decodes = len(chunks), 7 // evict_every
    assert [view.layer_idx for view in spy.views] == [0, 1, 2] * (prefills + decodes)

    shadow = recorder.shadow_mask()
    for row, length in enumerate([25, 14]):
        plain = PlainLlama(model)
        with torch.no_grad():
            record = shadow[row].crop(length)
            plain.log_probs(ids[row, -length:], [record.visible(layer) for layer in range(3)])
        for view in spy.views:
            layer, seen = view.layer_idx, int(view.seen[row])
            received = plain.seen_by[layer][:, :seen].sum(1)  # [H, T]
            for head in range(2):
                there = view.positions[row, head] >= 0
                positions = view.positions[row, head, there]
                # Exactly the keys that the newest query could see, each once.
                assert torch.equal(positions.sort().values, record.visible(layer, [seen - 1])[head, 0].nonzero()[:, 0])
                torch.testing.assert_close(view.attention[row, head, there], received[head, positions], **SAME)
                keys, values = plain.keys[layer][:, head], plain.values[layer][:, head]
                torch.testing.assert_close(view.keys[row, head, there], keys[positions], **SAME)
                torch.testing.assert_close(view.values[row, head, there], values[positions], **SAME)
            window = min(WINDOW, seen)
            asked = plain.queries[layer][seen - window : seen].transpose(0, 1)  # [Hq, W, D]
            torch.testing.assert_close(view.queries[row, :, WINDOW - window :], asked, **SAME)
            assert view.scaling == pytest.approx(12**-0.5)
            assert view.budget[row].tolist() == [6, 6]
