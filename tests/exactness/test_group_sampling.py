"""One cache for a group of samples, for selected rows, and for several turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from smdlib import CompressedCache, EvictionPolicy, MaskedAttentionAdapter, ShadowMaskRecorder, make_policy
from smdlib.masks import NEVER
from tests.families import VOCAB, make_model
from tests.sampling import feed, kept_positions, ragged_prompts, scored

POLICIES: dict[str, dict[str, Any]] = {
    "streaming": {},
    "random": {"recent": 2},
    "snapkv": {"window": 4, "kernel_size": 3},
    "h2o": {},
}
SAME = {"rtol": 0, "atol": 1e-4}
LENGTHS = [21, 13]
GROUP = 3
NEW = 8


def policy_of(name: str) -> EvictionPolicy:
    return make_policy(name, **POLICIES[name])


def count_forwards(model: PreTrainedModel) -> list[tuple[int, int]]:
    """``(rows, columns)`` of every forward pass from now on."""
    shapes: list[tuple[int, int]] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def generate(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: CompressedCache) -> tuple[Tensor, Tensor]:
    """Tokens with their prompts, and the sampler's log-probs of the new ones."""
    torch.manual_seed(0)
    out = model.generate(
        ids,
        attention_mask=mask,
        cache=cache,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=True,
        top_k=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    steps = torch.stack(out.logits, 1).log_softmax(-1)
    return out.sequences, steps.gather(-1, out.sequences[:, ids.shape[1] :, None]).squeeze(-1)


def check_replay(
    adapter: MaskedAttentionAdapter, tokens: Tensor, mask: Tensor, sampled: Tensor, recorder: ShadowMaskRecorder
) -> Tensor:
    """Replayed log-probs equal the sampled ones, dense ones do not; returns the record."""
    mask = torch.cat([mask, mask.new_ones(len(tokens), tokens.shape[1] - mask.shape[1])], 1)
    shadow = recorder.shadow_mask(mask.sum(1))
    with torch.no_grad():
        replayed = adapter.log_probs(tokens, mask, shadow)[:, -sampled.shape[1] :]
        dense = adapter.log_probs(tokens, mask)[:, -sampled.shape[1] :]
    torch.testing.assert_close(replayed, sampled, **SAME)
    assert (dense - sampled).abs().amax(1).min() > 0.1  # in every row
    return shadow.evicted_at


@pytest.mark.parametrize("evict_every", [None, 1, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_group_is_sampled_from_one_prefill(family, policy, evict_every):
    model = make_model(family)
    ids, mask = ragged_prompts(LENGTHS, VOCAB)
    lengths, width = mask.sum(1), ids.shape[1]
    recorder = ShadowMaskRecorder()
    forwards = count_forwards(model)
    with MaskedAttentionAdapter(model) as adapter:
        cache = CompressedCache(
            model.config,
            policy_of(policy),
            0.5,
            evict_every=evict_every,
            recorder=recorder,
            prompt_lengths=lengths,
            reserve=NEW,
        )
        feed(model, cache, ids, mask, [width - 1])
        cache.batch_repeat_interleave(GROUP)
        many_ids, many_mask = ids.repeat_interleave(GROUP, 0), mask.repeat_interleave(GROUP, 0)
        tokens, sampled = generate(model, many_ids, many_mask, cache)
        assert forwards == [(2, width - 1), *[(2 * GROUP, 1)] * NEW]  # the prompts were computed once
        assert cache.batch_size == 2 * GROUP
        assert torch.equal(tokens[:, :width], many_ids)
        assert len(tokens.unique(dim=0)) == 2 * GROUP  # six different samples
        record = check_replay(adapter, tokens, many_mask, sampled, recorder)
    for row in range(2 * GROUP):
        length = LENGTHS[row // GROUP]
        prompt = record[row, : length - 1]
        # What the shared prefill evicted, all but the last token of the prompt, is the same for the whole group.
        shared = prompt == length - 1
        first = row // GROUP * GROUP
        assert torch.equal(shared, record[first, : length - 1] == length - 1)
        assert shared.sum(0).unique().tolist() == [length - 1 - -(-length // 2)]
        # The last token of the prompt is prompt: after it the budget holds again.
        gone = (record[row, :length] <= length).sum(0)
        assert gone.unique().tolist() == [length - -(-length // 2)]
        assert (record[row, length + NEW :] == NEVER).all()
        # Each row's record is of its own keys.
        for layer in range(3):
            for head, kept in enumerate(kept_positions(cache, layer, row)):
                # The last eviction came after the last query, which is the last one that the record describes.
                alive = record[row, : length + NEW - 1, layer, head] > length + NEW - 1
                assert kept == alive.nonzero().flatten().tolist()
    if evict_every == 1 and policy == "snapkv":  # samples differ, so do the keys that their queries keep
        assert len(record[:GROUP].flatten(1).unique(dim=0)) == GROUP


def test_group_of_one_generation_equals_repeated_prompts():
    """Repeating the cache is repeating the prompts: same record, same log-probs, for the same tokens."""
    model = make_model("llama")
    ids, mask = ragged_prompts(LENGTHS, VOCAB)
    response = torch.randint(12, VOCAB, (2 * GROUP, NEW), generator=torch.Generator().manual_seed(7))
    many_ids = torch.cat([ids.repeat_interleave(GROUP, 0), response], 1)
    many_mask = torch.cat([mask.repeat_interleave(GROUP, 0), torch.ones_like(response)], 1)
    width, results = ids.shape[1], []
    with MaskedAttentionAdapter(model):
        for shared in (True, False):
            recorder = ShadowMaskRecorder()
            cache = CompressedCache(model.config, policy_of("h2o"), 0.5, evict_every=2, recorder=recorder)
            if shared:
                feed(model, cache, ids, mask, [width])
                cache.batch_repeat_interleave(GROUP)
            else:
                feed(model, cache, many_ids, many_mask, [width])
            logits = feed(model, cache, many_ids, many_mask, [1] * NEW)
            results.append((scored(logits, many_ids[:, width:]), recorder.shadow_mask().evicted_at))
    torch.testing.assert_close(results[0][0], results[1][0], **SAME)
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("policy", POLICIES)
def test_selected_rows_go_on_by_themselves(policy):
    model = make_model("llama")
    ids, mask = ragged_prompts([21, 13, 17], VOCAB)
    chosen = torch.tensor([2, 0])
    recorder = ShadowMaskRecorder()
    with MaskedAttentionAdapter(model) as adapter:
        cache = CompressedCache(
            model.config, policy_of(policy), 0.5, evict_every=1, recorder=recorder, prompt_lengths=mask.sum(1)
        )
        feed(model, cache, ids, mask, [10, 10])
        before = [kept_positions(cache, layer, row) for layer in range(3) for row in (2, 0)]
        cache.batch_select_indices(chosen)
        assert cache.batch_size == 2
        assert [kept_positions(cache, layer, row) for layer in range(3) for row in (0, 1)] == before
        tokens, sampled = generate(model, ids[chosen], mask[chosen], cache)
        record = check_replay(adapter, tokens, mask[chosen], sampled, recorder)
    # Chunks ended at columns 10 and 20 of 21: at tokens 6 and 16 of the row of 17, at 10 and 20 of the row of 21.
    assert record[0].unique()[0] == 16
    assert record[1].unique()[0] == 20


@pytest.mark.parametrize("evict_every", [None, 1, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gpt_oss"])
def test_second_turn(family, policy, evict_every):
    """A prefill after decoding: its tokens see what was kept, and it evicts again."""
    model = make_model(family)
    ids, mask = ragged_prompts([38, 25, 31], VOCAB)  # columns: prompt 20, decoded 6, second prompt 7, decoded 5
    recorder = ShadowMaskRecorder()
    with MaskedAttentionAdapter(model) as adapter:
        cache = CompressedCache(
            model.config, policy_of(policy), 6, evict_every=evict_every, recorder=recorder, reserve=6
        )
        logits = [feed(model, cache, ids, mask, [20] + [1] * 6)]
        logits.append(feed(model, cache, ids, mask, [7]))
        for layer in range(3):
            assert {len(head) for row in range(3) for head in kept_positions(cache, layer, row)} == {6}
        logits.append(feed(model, cache, ids, mask, [1] * 5))
        sampled = scored(torch.cat(logits, 1), ids)
        with torch.no_grad():
            replayed = adapter.log_probs(ids, mask, recorder.shadow_mask())[:, 1:]
            dense = adapter.log_probs(ids, mask)[:, 1:]
    known = replayed.isfinite()
    assert known.sum(1).tolist() == [37, 24, 30]
    torch.testing.assert_close(sampled[known], replayed[known], **SAME)
    for turn in (slice(20, 25), slice(26, 32), slice(33, 37)):
        assert (sampled - dense)[:, turn].abs().max() > 0.1
    # The row without padding: evictions after the first prompt (token 20) and after the second (33) ...
    times = set(recorder.shadow_mask().evicted_at[0].unique().tolist()) - {NEVER}
    # ... and while decoding, after every token or after the 4th of a turn.
    decoding = {None: set(), 1: {*range(21, 27), *range(34, 38)}, 4: {24, 37}}[evict_every]
    assert times == {20, 33} | decoding
