"""Each way of getting a policy wrong is found, and named; the policies of the library pass."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, field

import pytest
import torch

from smdlib.policies import CacheView, PolicyError, available_policies, make_policy
from smdlib.testing import check_policy, tiny_model
from smdlib.testing.contract import CONTRACT
from smdlib.testing.watch import Watched, WatchingRecorder


def by_age(view):
    return view.positions.float()


class NotANumber:
    def score(self, view):
        return torch.where(view.positions == 3, torch.nan, by_age(view))


class NotANumberInBfloat16:
    def score(self, view):
        return by_age(view) * (torch.nan if view.keys.dtype == torch.bfloat16 else 1.0)


class OneScorePerPosition:
    """A mask that never shrinks, as mask-only code has it: it scores the keys that are gone as well."""

    def score(self, view):
        return torch.arange(int(view.seen.max()) + 1.0).expand(*view.positions.shape[:2], -1)


class DtypeOfTheKeys:
    def score(self, view):
        return -view.keys.norm(dim=-1)


class Doubles:
    def score(self, view):
        return view.positions.double()


class ProtectsTooMuch:
    def score(self, view):
        return view.protect(by_age(view), view.newest(60))


class NothingMayStay:
    def score(self, view):
        return torch.where(view.positions < 60, -torch.inf, by_age(view))


class GlobalRandom:
    def score(self, view):
        return torch.rand(view.positions.shape)


class SeedsTheSampler:
    def score(self, view):
        torch.manual_seed(0)
        return view.positions.float() * torch.rand(())


class PythonRandom:
    def score(self, view):
        return by_age(view) * (1 + random.random())


@dataclass
class Counts:
    """Weighs later calls more: state, where a view has all there is."""

    calls: int = 0

    def score(self, view):
        self.calls += 1
        return by_age(view) * self.calls


@dataclass
class RemembersTheLayerBefore:
    last: dict = field(default_factory=dict)

    def score(self, view):
        if self.last.get("layer") != view.layer_idx:
            self.last = {"layer": view.layer_idx, "bonus": self.last.get("layer", 0)}
        return by_age(view) + self.last["bonus"]


class RenumbersPositions:
    def score(self, view):
        view.positions.clamp_(min=0)
        return by_age(view)


class RenumbersPositionsUnseen:
    """`.data` goes unnoticed by PyTorch's own version counter."""

    def score(self, view):
        scores = by_age(view)
        view.positions.data[..., 0] = 0
        return scores


class ScalesKeys:
    def score(self, view):
        view.keys.data.mul_(0.5)
        return by_age(view)


class ReplacesAField:
    def score(self, view):
        object.__setattr__(view, "budget", view.budget + 1)
        return by_age(view)


class SlotIndex:
    def score(self, view):
        return torch.arange(view.positions.shape[-1]).float().expand(view.positions.shape)


class SoftmaxOverEmptySlots:
    def score(self, view):
        return view.keys.float().square().sum(-1).softmax(-1)


class CountsSlots:
    def score(self, view):
        return by_age(view) * view.positions.shape[-1]


class MeanOfTheBatch:
    def score(self, view):
        keys, here = view.keys.float(), view.present[..., None]
        mean = (keys * here).sum((0, 2), keepdim=True) / here.sum((0, 2), keepdim=True)
        return -(keys - mean).norm(dim=-1)


class NeedsGenerators:
    def score(self, view):
        return torch.stack([torch.rand(view.positions.shape[1:], generator=g) for g in view.generators])


def drawn(view, generators):
    """One number per position and row, from the generators given."""
    shape = view.num_kv_heads, int(view.seen.max())
    numbers = [torch.rand(shape, generator=generator) for generator in generators]
    return torch.stack(numbers).gather(2, view.positions.clamp(min=0))


class OneGeneratorForAll:
    def score(self, view):
        if view.generators is None:
            return by_age(view)
        return drawn(view, [view.generators[0]] * len(view.seen))


class DrawsForIdleRows:
    def score(self, view):
        return by_age(view) if view.generators is None else drawn(view, view.generators)


class NeedsQueriesUnasked:
    def score(self, view):
        return view.queries.sum() + by_age(view)


class Crashes:
    def score(self, view):
        return {}["x"]


class BadWindow:
    query_window = 2.5
    score = staticmethod(by_age)


class NoTensor:
    def score(self, view):
        return by_age(view).tolist()


FAULTS = {
    NotANumber: "keys score NaN",
    NotANumberInBfloat16: "keys score NaN",
    OneScorePerPosition: r"scores have shape .* expected \[B, H, K\]",
    NoTensor: "score returned list",
    DtypeOfTheKeys: r"scores are torch.bfloat16, expected torch.float32",
    Doubles: r"scores are torch.float64, expected torch.float32",
    ProtectsTooMuch: r"drops its own protected keys: it gives \+inf to 60 keys .* may keep 48, so 12 of them go",
    NothingMayStay: "score above -inf",
    GlobalRandom: "not deterministic: it draws from .* global random generator",
    SeedsTheSampler: r"\(or seeds\) torch's global random generator",
    PythonRandom: "not deterministic: the same view scored twice",
    Counts: "not deterministic: the same view scored twice .* keeps state",
    RemembersTheLayerBefore: "not deterministic: a view has other scores after another one .* keeps state",
    RenumbersPositions: r"score changed view.positions in place",
    RenumbersPositionsUnseen: "score wrote to view.positions.* evicted one returned",
    ScalesKeys: "score wrote to view.keys",
    ReplacesAField: "score wrote to view.budget",
    SlotIndex: "depends on the order of the slots",
    SoftmaxOverEmptySlots: "depends on what lies in empty slots",
    CountsSlots: "depends on the order of the slots or on the number of empty ones",
    MeanOfTheBatch: "not that of its row alone: it depends on other rows",
    NeedsGenerators: "TypeError.*view.generators is None: .* must do without",
    OneGeneratorForAll: r"a row must draw from its own generator",
    DrawsForIdleRows: "draws from the generator of row 2, which is within its budget",
    Crashes: r"score raised KeyError: 'x'$",
    NeedsQueriesUnasked: "AttributeError.*view.queries is None: set query_window",
    BadWindow: "query_window is 2.5",
}


@pytest.mark.parametrize(("policy", "message"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_is_found_and_named(policy, message):
    with pytest.raises(PolicyError, match=f"(?s){policy.__name__}.*{message}"):
        check_policy(policy())


@pytest.mark.parametrize("name", available_policies())
def test_the_policies_of_the_library_pass(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # `recent` warns of missing sinks
        report = check_policy(make_policy(name))
    assert report.gap < 1e-4 < 0.01 < report.dense_gap
    assert set(report.findings) == {*CONTRACT, "eviction", "parity", "golden"}
    assert all(f"  {check}" in str(report) for check in report.findings)


@dataclass(frozen=True)
class OddTokens:
    """Prefers odd token ids, from the slots' own or, wrongly, from the slots' order."""

    honest: bool = True
    needs_tokens = True

    def score(self, view):
        ids = view.token_ids if self.honest else torch.arange(view.positions.shape[2]).expand_as(view.positions)
        return (ids % 2).float() + view.positions / 1e6


def test_policies_that_ask_for_tokens():
    check_policy("protected(policy='knorm', token_ids=(5, 6))")
    check_policy(OddTokens())
    with pytest.raises(PolicyError, match="OddTokens"):
        check_policy(OddTokens(honest=False))


@pytest.mark.parametrize("budget", [4, 9, 100])
def test_it_checks_at_any_budget(budget):
    assert check_policy("knorm", budget=budget).gap < 1e-4


def test_the_global_generator_stays_as_it_was():
    before = torch.get_rng_state()
    check_policy("random")
    assert torch.equal(torch.get_rng_state(), before)


# --- faults that show in a rollout only: these policies wait for the model's two layers (the views have three)


@dataclass
class KeepsViews:
    """While it scores one layer, it writes an evicted position into the view that it kept of another."""

    held: dict = field(default_factory=dict)

    def score(self, view):
        decoding = view.num_layers == 2 and bool((view.positions[0, 0].diff() < 0).any())
        if decoding and view.layer_idx == 1:
            self.held[0].data[:, :, 5] = 0
        if view.layer_idx == 0:
            self.held[0] = view.positions
        return by_age(view)


def test_a_key_that_returns_behind_the_back_of_a_view_is_found():
    with pytest.raises(PolicyError, match=r"KeepsViews lets a key return: position 0 of row 0, layer 0, KV head 0"):
        check_policy(KeepsViews())


def test_a_key_on_offer_again_is_named():
    recorder = WatchingRecorder()
    recorder.begin(1, None)
    view = CacheView.of_prompt(torch.randn(1, 1, 6, 4), budget=4)
    watched = Watched(make_policy("streaming", sinks=1), recorder)
    watched.score(view)
    recorder.record(0, view.positions, view.positions == 2, torch.tensor([6]))
    with pytest.raises(PolicyError, match="StreamingPolicy lets a key return: position 2 of row 0, layer 0, KV head 0"):
        watched.score(view)


class StatefulAcrossGenerations:
    """Deterministic on the views of the contract, but its second generation is another."""

    def __init__(self):
        self.calls = 0

    def score(self, view):
        if view.num_layers != 2:
            return by_age(view)
        self.calls += 1
        return by_age(view) if self.calls <= 2 else -by_age(view)


def test_state_between_generations_is_found():
    with pytest.raises(PolicyError, match=r"is not deterministic: the same rollout .* evicts other keys the second"):
        check_policy(StatefulAcrossGenerations())


def test_no_parity_is_named(monkeypatch):
    """With a recorder that forgets, the replay sees keys that the sampler had lost."""

    def forgetful(self, layer_idx, positions, evicted, seen):
        super(WatchingRecorder, self).record(layer_idx, positions, evicted & (positions > 10), seen)

    monkeypatch.setattr(WatchingRecorder, "record", forgetful)
    with pytest.raises(PolicyError, match="KnormPolicy: the replayed log-probs differ from the sampled ones by"):
        check_policy("knorm")


def test_a_rollout_that_would_prove_nothing_is_named():
    with pytest.raises(
        PolicyError, match=r"nothing that mattered was evicted \(evict_every=None\), so the replay proves"
    ):
        check_policy("streaming", tolerance=50.0)


# --- arguments and report


def test_golden_keeps_watch_over_choices():
    golden = check_policy("streaming").golden
    assert check_policy("streaming", golden=golden).golden == golden
    with pytest.raises(PolicyError, match=f"keeps other keys .* expected {golden!r}"):
        check_policy(make_policy("streaming", sinks=7), golden=golden)


def test_a_model_of_your_own():
    report = check_policy("h2o", model=tiny_model(num_hidden_layers=3, num_key_value_heads=1, vocab_size=50))
    assert report.gap < 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [({"budget": 3}, "budget is 3"), ({"budget": 0.5}, "budget is 0.5"), ({"new_tokens": 2}, "new_tokens is 2")],
)
def test_checks_that_would_show_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check_policy("streaming", **options)


def test_something_else_than_a_policy_is_refused():
    with pytest.raises(TypeError, match="expected a policy's name or an object"):
        check_policy(NotANumber)  # the class
    with pytest.raises(ValueError, match="unknown policy 'snapk'"):
        check_policy("snapk")
