"""The cache against a slow one on Python lists, for anything that a caller may ask of it."""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from smdlib import (
    AdaptiveHeadAllocation,
    CacheView,
    CompressedCache,
    EvictionPolicy,
    MaskedAttentionAdapter,
    PyramidAllocation,
    ShadowMaskRecorder,
    UniformAllocation,
    make_policy,
)
from smdlib.policies import Allocation, query_window, tracks_attention
from tests.cache.simulator import Place, SlowCache

LAYERS, HEADS = 2, 2
INF = math.inf


@functools.cache
def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=13,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
    )
    model = LlamaForCausalLM(config).eval()
    MaskedAttentionAdapter(model)
    return model


@dataclass(frozen=True)
class ArbitraryPolicy:
    """A number for every (layer, row, head, position, time), many of them equal, some protected, some negative."""

    seed: int
    levels: int

    def number(self, layer, row, head, position, seen):
        mixed = position * 31 + seen * 17 + head * 101 + layer * 57 + row * 13 + self.seed
        return mixed * mixed % 1009 % self.levels

    def plain(self, place: Place, position: int, seen: int) -> float:
        row, layer, head = place
        number = self.number(layer, row, head, position, seen)
        return INF if number == self.levels - 1 else number - 2.5

    def score(self, view: CacheView) -> Tensor:
        rows = torch.arange(view.positions.shape[0])[:, None, None]
        heads = torch.arange(view.positions.shape[1])[None, :, None]
        number = self.number(view.layer_idx, rows, heads, view.positions, view.seen[:, None, None])
        scores = torch.where(number == self.levels - 1, INF, number - 2.5)
        return torch.where(view.present, scores, torch.nan)  # what an empty slot gets must not matter


class Logged:
    """Hands a policy's scores through, and keeps them by position."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.query_window, self.tracks_attention = query_window(policy), tracks_attention(policy)
        self.scores: dict[tuple[int, int, int, int], float] = {}

    def score(self, view: CacheView) -> Tensor:
        scores = self.policy.score(view)
        for row, per_head in enumerate(view.positions.tolist()):
            for head, positions in enumerate(per_head):
                for slot, position in enumerate(positions):
                    if position >= 0:
                        key = (row, view.layer_idx, head, position)
                        assert key not in self.scores, "a position is there twice"
                        self.scores[key] = float(scores[row, head, slot])
        return scores

    def plain(self, place: Place, position: int, seen: int) -> float:
        score = self.scores[(*place, position)]
        if isinstance(self.policy, ArbitraryPolicy):
            assert score == self.policy.plain(place, position, seen), "the view's positions or times are wrong"
        return score


@dataclass(frozen=True)
class Case:
    policy: EvictionPolicy
    budget: float | int
    allocation: Allocation
    evict_every: int | None
    reserve: int | None
    prompts: tuple[int, ...]
    know_lengths: bool
    calls: tuple[int, ...]  # tokens of each call; those of the prompt come first
    prompt_calls: int
    parents: tuple[int, ...] | None  # rows of the batch after the prompt
    ends: tuple[int, ...]  # tokens that each row never got to, of those it could have
    seed: int


POLICIES = (
    ("streaming", {"sinks": 2}),
    ("recent", {"sinks": 0}),
    ("random", {"recent": 2}),
    ("snapkv", {"window": 3, "kernel_size": 3}),
    ("snapkv", {"window": 5, "kernel_size": 1, "pooling": "avg"}),
    ("h2o", {}),
    ("h2o", {"recent": 1}),
)


ALLOCATIONS = (
    UniformAllocation(),
    PyramidAllocation(),
    PyramidAllocation(beta=3),
    AdaptiveHeadAllocation(),
    AdaptiveHeadAllocation(floor=0.0),
    AdaptiveHeadAllocation(floor=0.7),
)


@st.composite
def chunks(draw, total):
    sizes = []
    while sum(sizes) < total:
        sizes.append(min(draw(st.sampled_from([1, 2, 3, 5, total])), total - sum(sizes)))
    return sizes


@st.composite
def cases(draw):
    if draw(st.booleans()):
        policy = ArbitraryPolicy(draw(st.integers(0, 999)), draw(st.sampled_from([2, 4, 50])))
    else:
        name, options = draw(st.sampled_from(POLICIES))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            policy = make_policy(name, **options)
    prompts = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    evict_every = draw(st.sampled_from([None, 1, 2, 5]))
    prompt = draw(chunks(max(prompts)))
    decoded = draw(st.integers(0, 12))
    later = [draw(st.integers(2, 4)), *[1] * draw(st.integers(0, 3))] if draw(st.integers(0, 4)) == 0 else []
    rows = len(prompts)
    parents = draw(
        st.one_of(
            st.none(),
            st.just(tuple(row for row in range(rows) for _ in range(2))),
            st.lists(st.integers(0, rows - 1), min_size=1, max_size=3).map(tuple),
        )
    )
    return Case(
        policy=policy,
        budget=draw(st.one_of(st.integers(1, 9), st.sampled_from([0.1, 0.3, 0.5, 0.75, 1.0]))),
        allocation=draw(st.sampled_from(ALLOCATIONS)),
        evict_every=evict_every,
        reserve=draw(st.one_of(st.none(), st.integers(evict_every or 1, 7))),
        prompts=prompts,
        know_lengths=draw(st.booleans()),
        calls=(*prompt, *[1] * decoded, *later),
        prompt_calls=len(prompt),
        parents=parents,
        ends=tuple(draw(st.lists(st.integers(0, 6), min_size=6, max_size=6))),
        seed=draw(st.integers(0, 99)),
    )


class Run:
    """One case: the cache, the slow cache, and all keys that ever were, side by side."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, tiny_model()
        padding = [max(case.prompts) - length for length in case.prompts]
        known = case.prompts if case.know_lengths else None
        self.policy, self.recorder = Logged(case.policy), ShadowMaskRecorder()
        self.cache = CompressedCache(
            self.model.config,
            self.policy,
            case.budget,
            allocation=case.allocation,
            evict_every=case.evict_every,
            reserve=case.reserve,
            recorder=self.recorder,
            prompt_lengths=known,
        )
        self.slow = SlowCache(LAYERS, HEADS, padding, case.budget, case.allocation, case.evict_every, known)
        generator = torch.Generator().manual_seed(case.seed)
        self.tokens = torch.randint(13, (len(case.prompts), sum(case.calls)), generator=generator)
        self.originals: list[Tensor | None] = [
            None
        ] * LAYERS  # [2, B, H, columns, D], keys and values as the model made them
        self.held: dict[Place, set[int]] = {place: set() for place in self.slow.kept}
        for layer in range(LAYERS):
            self.capture(layer)

    def capture(self, layer: int) -> None:
        update = self.cache.layers[layer].update

        def capturing(keys, values, *args, **kwargs):
            new, old = torch.stack([keys, values]), self.originals[layer]
            self.originals[layer] = new if old is None else torch.cat([old, new], dim=3)
            return update(keys, values, *args, **kwargs)

        self.cache.layers[layer].update = capturing

    def call(self, tokens: int) -> None:
        """Feed both, and compare what they hold."""
        first = self.slow.columns
        columns, padding = torch.arange(first + tokens), torch.tensor(self.slow.padding)[:, None]
        seen_before = [self.slow.seen(row) for row in range(len(padding))]
        self.policy.scores.clear()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="CompressedCache grew")
            self.model(
                self.tokens[:, first : first + tokens],
                attention_mask=(columns >= padding).long(),
                position_ids=(columns[first:] - padding).clamp(min=0),
                cache=self.cache,
            )
        evicting = self.slow.feed(tokens, self.policy.plain)
        assert evicting or not self.policy.scores, "scored although it was not time to evict"
        for layer in range(LAYERS):
            self.check_contents(layer)
        for place in self.held:
            new = set(range(seen_before[place[0]], self.slow.seen(place[0])))
            self.check_invariants(place, self.held[place] | new, evicting)

    def check_contents(self, layer: int) -> None:
        """Every slot holds the key and the value that the model made for its position."""
        slots, originals = self.cache.layers[layer].slots, self.originals[layer]
        assert (slots.positions[:, :, slots.used :] == -1).all()
        positions = slots.positions[:, :, : slots.used]
        column = positions + torch.tensor(self.slow.padding)[:, None, None]
        column = column.clamp(0, self.slow.columns - 1)  # empty slots look anywhere
        column = column[..., None].expand(*column.shape, originals.shape[-1])
        stored = positions >= 0
        for store, made in zip(slots.shown(), originals, strict=True):
            assert torch.equal(store[stored], made.gather(2, column)[stored])

    def check_invariants(self, place: Place, present: set[int], evicting: bool) -> None:
        """What is promised whatever the policy, without the slow cache's help; and what the slow cache holds."""
        row, layer, head = place
        positions = self.cache.layers[layer].slots.positions[row, head].tolist()
        kept = {position for position in positions if position >= 0}
        assert len(kept) == sum(position >= 0 for position in positions), "a key is there twice"
        assert kept <= present, "a key that was gone is back, or padding is a key"
        assert kept or not present, "nothing is left"
        budget = self.slow.budgets[place]
        assert len(kept) == (min(budget, len(present)) if evicting else len(present))
        if kept != present:
            protected = {position for position in present if self.policy.scores[(*place, position)] == INF}
            assert protected <= kept or kept <= protected, "a protected key has left although it would fit"
        assert sorted(kept) == sorted(self.slow.kept[place])
        self.held[place] = kept

    def map_rows(self, parents: tuple[int, ...]) -> None:
        rows = len(self.slow.padding)
        if parents == tuple(row for row in range(rows) for _ in range(2)):
            self.cache.batch_repeat_interleave(2)
        else:
            self.cache.batch_select_indices(torch.tensor(parents))
        self.slow.map_rows(parents)
        self.held = {place: set(keys) for place, keys in self.slow.kept.items()}
        self.tokens = self.tokens[list(parents)]
        self.originals = [made[:, list(parents)] for made in self.originals]

    def check_record(self, ends: tuple[int, ...]) -> None:
        seen = [self.slow.seen(row) for row in range(len(self.slow.padding))]
        assert torch.equal(self.recorder.shadow_mask().evicted_at, self.slow.record(seen))
        # The last sampled token is never fed, and some rows have ended before.
        lengths = [max(1, tokens + 1 - end) for tokens, end in zip(seen, ends, strict=False)]
        assert torch.equal(self.recorder.shadow_mask(lengths).evicted_at, self.slow.record(lengths))


PADDED_ROW_IN_CALLS_OF_ONE_TOKEN = Case(
    policy=ArbitraryPolicy(0, 4),
    budget=1,
    allocation=UniformAllocation(),
    evict_every=None,
    reserve=None,
    prompts=(1, 3),
    know_lengths=False,
    calls=(1, 1, 1, 1),
    prompt_calls=3,
    parents=None,
    ends=(0, 0),
    seed=0,
)


@given(cases())
@example(PADDED_ROW_IN_CALLS_OF_ONE_TOKEN)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_cache_equals_a_cache_on_lists(case):
    run = Run(case)
    for index, tokens in enumerate(case.calls):
        if index == case.prompt_calls and case.parents is not None:
            run.map_rows(case.parents)
        run.call(tokens)
    run.check_record(case.ends)
    event("evicted" if any(run.slow.evicted_at.values()) else "nothing evicted")
    event(type(case.allocation).__name__)
    event(f"grew {min(run.cache.growths, 1)}")
