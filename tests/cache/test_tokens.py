"""Token ids of keys, for policies that ask."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from smdlib import CacheView, CompressedCache, EvictionPolicy, MaskedAttentionAdapter, make_policy
from smdlib.policies import Protected
from tests.families import VOCAB, make_model
from tests.sampling import feed, kept_positions, parity, ragged_prompts, sample


@dataclass
class Spy:
    """Decides like another policy, and keeps what it was shown of tokens."""

    policy: EvictionPolicy
    needs_tokens: bool = True
    shown: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)

    def score(self, view: CacheView) -> Tensor:
        self.shown.append((view.positions.clone(), view.token_ids))
        return self.policy.score(view)


def check(shown, ids, lengths):
    for positions, tokens in shown:
        for row, length in enumerate(lengths):
            there = positions[row] >= 0
            assert torch.equal(tokens[row][there], ids[row, ids.shape[1] - length :][positions[row][there]])
            assert (tokens[row][~there] == -1).all()


@pytest.mark.parametrize("chunks", [[18], [8, 9, 1]], ids=["one-shot", "chunked"])
def test_a_view_shows_the_tokens_of_its_keys(chunks):
    model, spy = make_model("llama"), Spy(make_policy("random", recent=1))
    ids, mask = ragged_prompts([25, 14], VOCAB)  # columns: prompt 18, decoded 7
    with MaskedAttentionAdapter(model):
        cache = CompressedCache(model.config, spy, 6, evict_every=2, prompt_lengths=mask[:, :18].sum(1))
        feed(model, cache, ids, mask, chunks + [1] * 7)
        assert len(spy.shown) == 3 * (len(chunks) + 3)
        check(spy.shown, ids, [25, 14])
        cache.reset()
        spy.shown.clear()
        ids, mask = ragged_prompts([11, 20], VOCAB, seed=1)
        feed(model, cache, ids, mask, [20])
    assert len(spy.shown) == 3
    check(spy.shown, ids, [11, 20])


def test_tokens_follow_the_rows():
    model, spy = make_model("llama"), Spy(make_policy("random", recent=1))
    ids, mask = ragged_prompts([15, 11], VOCAB)
    with MaskedAttentionAdapter(model):
        cache = CompressedCache(model.config, spy, 6, evict_every=1)
        feed(model, cache, ids, mask, [12])
        spy.shown.clear()
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0, 1]))
        chosen = torch.tensor([1, 0, 0])
        feed(model, cache, ids[chosen], mask[chosen], [1, 1, 1])
    assert len(spy.shown) == 9
    check(spy.shown, ids[chosen], [11, 15, 15])


def test_nobody_else_pays_for_them():
    model, spy = make_model("llama"), Spy(make_policy("streaming"), needs_tokens=False)
    ids, mask = ragged_prompts([12], VOCAB)
    with MaskedAttentionAdapter(model):
        cache = CompressedCache(model.config, spy, 6)
        feed(model, cache, ids, mask, [12])
    assert cache.settings.tokens is None
    assert [tokens for _, tokens in spy.shown] == [None] * 3


def test_calls_without_tokens_are_refused():
    model = make_model("llama")
    ids, _ = ragged_prompts([12], VOCAB)
    policy = Protected("knorm", token_ids=[1])
    with MaskedAttentionAdapter(model), torch.no_grad():
        with pytest.raises(ValueError, match="Protected asks for token ids, but this call has none: pass input_ids"):
            model(inputs_embeds=model.get_input_embeddings()(ids), cache=CompressedCache(model.config, policy, 6))
        with pytest.raises(RuntimeError, match="asks for token ids, but only 0 of 12 columns are known"):
            model.model(input_ids=ids, cache=CompressedCache(model.config, policy, 6))


@pytest.mark.parametrize("evict_every", [None, 1, 4])
def test_protected_tokens_stay_and_replay_is_exact(evict_every):
    model = make_model("llama")
    ids, mask = ragged_prompts([26, 9, 17], VOCAB)
    marks = [int(ids[0, 3]), int(ids[1, -2]), int(ids[2, 12])]
    policy = Protected("combined(parts=[('keydiff', 1.0), ('h2o', 0.5)])", sinks=1, recent=1, token_ids=marks)
    with MaskedAttentionAdapter(model) as adapter:
        taken = sample(model, policy, 9, prompts=(ids, mask), new_tokens=8, evict_every=evict_every, chunk=None)
        shadow, dense = parity(model, adapter, taken)
    assert shadow <= 1e-4 < 0.01 < dense
    marked = torch.isin(ids, torch.tensor(marks)) & mask.bool()
    assert marked.any(1).all() and int(marked.sum(1).max()) < 7
    for row, length in enumerate([26, 9, 17]):
        places = marked[row, 26 - length :].nonzero().flatten().tolist()
        for layer in range(3):
            for kept in kept_positions(taken.cache, layer, row):
                assert {0, *places} <= set(kept)
