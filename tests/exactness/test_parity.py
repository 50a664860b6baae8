"""The promise: the learner's log-probs of the sampled tokens equal the sampler's.

Every policy, schedule, way to prefill and model family, on ragged left-padded prompts of which two rows end early. The
dense log-probs must be far off, or else nothing was evicted that mattered and the test would mean nothing.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smdlib import EvictionPolicy, MaskedAttentionAdapter, make_policy
from smdlib.masks import NEVER
from tests.families import FAMILIES, VOCAB, make_model
from tests.sampling import POLICIES, Sample, parity, ragged_prompts, sample

LENGTHS = [26, 9, 17]
NEW_TOKENS = 12
EOS = [3, 4, 5]
ENDS = {1: 5, 2: 8}  # rows 1 and 2 end early, by different tokens of EOS

# (evict_every, prefill_chunk_size, budget): every schedule and every way to prefill with a share and with a number of
# keys. 10 keys are more than the shortest prompt has, so that row starts below its budget.
SCHEDULES: list[tuple[int | None, int | None, float | int]] = [
    (None, None, 0.4),
    (None, 8, 7),
    (1, None, 10),
    (1, 8, 0.4),
    (4, None, 0.4),
    (4, 8, 10),
]
TAKES_EAGER_ANYWAY = ("gemma2", "gpt_oss")  # soft-capping, sinks
# A replay does not know who chose the keys: the first five policies go through everything, the others through every
# schedule in the families that differ most (absolute positions; a sliding window; soft-capping, run by eager
# attention) and through one schedule in the others.
EVERYWHERE = list(POLICIES)[:5]
EVERY_SCHEDULE = ("llama", "gpt2", "mistral", "gemma2")
MATRIX = [
    (family, policy, schedule)
    for family in FAMILIES
    for policy in POLICIES
    for schedule in SCHEDULES
    if policy in EVERYWHERE or family in EVERY_SCHEDULE or schedule == (4, 8, 10)
]


def matrix_id(value: object) -> str:
    return "every{}-chunk{}-keep{}".format(*value) if isinstance(value, tuple) else str(value)


@lru_cache(maxsize=2)
def model_of(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return make_model(family).to(dtype)


def policy_of(name: str) -> EvictionPolicy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `recent` warns of missing sinks
        return make_policy(name, **POLICIES[name])


def sample_and_score(
    model: PreTrainedModel,
    policy: str,
    schedule: tuple[int | None, int | None, float | int],
    backend: str = "auto",
    **cache_options: Any,
) -> tuple[Sample, float, float]:
    """Sample, and return the sample with the gaps of the shadow and the dense log-probs."""
    evict_every, chunk, budget = schedule
    with MaskedAttentionAdapter(model, backend=backend) as adapter:
        taken = sample(
            model,
            policy_of(policy),
            budget,
            prompts=ragged_prompts(LENGTHS, VOCAB),
            new_tokens=NEW_TOKENS,
            evict_every=evict_every,
            chunk=chunk,
            eos=EOS,
            ends=ENDS,
            **cache_options,
        )
        shadow, dense = parity(model, adapter, taken)
    return taken, shadow, dense


def check_rows_ended_early(taken: Sample) -> None:
    assert taken.response_mask.sum(1).tolist() == [NEW_TOKENS, ENDS[1], ENDS[2]]
    assert taken.lengths.tolist() == [26 + NEW_TOKENS, 9 + ENDS[1], 17 + ENDS[2]]


def check_exact(taken: Sample, shadow: float, dense: float) -> None:
    check_rows_ended_early(taken)
    assert shadow <= 1e-4
    assert dense > 0.01
    assert dense >= 100 * shadow
    # The record stands alone: nothing of the padding, nothing of what was fed to a row after its end.
    evicted_at = taken.shadow.evicted_at
    assert evicted_at.shape[:2] == (len(LENGTHS), max(taken.lengths))
    for row, length in enumerate(taken.lengths.tolist()):
        assert (evicted_at[row, :length] < NEVER).any()
        assert (evicted_at[row, length:] == NEVER).all()


@pytest.mark.parametrize(("family", "policy", "schedule"), MATRIX, ids=matrix_id)
def test_replayed_log_probs_equal_the_samplers(family, policy, schedule):
    check_exact(*sample_and_score(model_of(family), policy, schedule))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=matrix_id)
@pytest.mark.parametrize("policy", EVERYWHERE)
def test_replay_is_exact_with_eager_attention(policy, schedule):
    check_exact(*sample_and_score(model_of("llama"), policy, schedule, backend="eager"))


@pytest.mark.parametrize("policy", ["random", "h2o"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama", *TAKES_EAGER_ANYWAY)])
def test_replay_is_exact_with_eager_attention_in_every_family(family, policy):
    check_exact(*sample_and_score(model_of(family), policy, (1, 8, 0.4), backend="eager"))


@pytest.mark.parametrize("policy", POLICIES)
def test_sample_of_one_backend_is_replayed_by_the_other(policy):
    model = model_of("qwen2")
    taken, _, dense = sample_and_score(model, policy, (1, 8, 0.4), backend="sdpa")
    with MaskedAttentionAdapter(model, backend="eager") as adapter:
        other_shadow, other_dense = parity(model, adapter, taken)
    check_exact(taken, other_shadow, other_dense)
    assert other_dense == pytest.approx(dense, abs=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_eviction_without_a_bite_equals_dense(policy):
    """The 100x of the other tests comes from eviction alone: with every key kept there is no gap."""
    taken, shadow, dense = sample_and_score(model_of("llama"), policy, (4, 8, 64))
    check_rows_ended_early(taken)
    assert (taken.shadow.evicted_at == NEVER).all()
    assert shadow <= 1e-4
    assert dense <= 1e-4


BF16_BAND = 0.15  # nats


@pytest.mark.parametrize("policy", EVERYWHERE)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "phi3", "gpt2", "gpt_oss"])
def test_bf16_stays_in_its_band(family, policy):
    """In bf16 prefill, decoding and replay round differently, so parity is a band, not an identity.

    Measured over the 30 combinations of policy and schedule above (torch 2.13, CPU), largest gap in nats: llama 0.074,
    qwen2 0.056, qwen3 0.044, mistral 0.062, gemma2 0.031, gemma3 0.049, phi3 0.079, olmo2 0.065, gpt2 0.038, gpt_neox
    0.027, gpt_oss below 1e-6, against 0.8 nats or more to the dense log-probs. Steps between bf16 logits are 0.031 from
    4 to 8. transformers alone, sampling with a `DynamicCache` and scoring densely, shows as much: up to 0.055. In
    qwen3_moe a router may flip (0.37; transformers alone 0.80), so it has no useful band.
    """
    worst, least_dense = 0.0, float("inf")
    for schedule in SCHEDULES[::2]:
        taken, shadow, dense = sample_and_score(model_of(family, torch.bfloat16), policy, schedule)
        check_rows_ended_early(taken)
        worst, least_dense = max(worst, shadow), min(least_dense, dense)
    assert worst <= BF16_BAND
    assert least_dense >= 5 * BF16_BAND
