"""Every script runs at tiny size, and what is no matter of time is as it should be."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

from benchmarks import prefill
from benchmarks._measure import Result
from benchmarks.growth import CURVES
from benchmarks.models import SHAPES, make_model, plain_twin
from smdlib import MaskedAttentionAdapter

SCRIPTS = ("decode", "prefill", "generate", "chunked_prefill", "spikes", "learner", "fused_head", "growth")
TINY = SHAPES["tiny"]
TOKEN = 2 * TINY["num_key_value_heads"] * TINY["head_dim"] * 4  # bytes of a token in a layer


@pytest.fixture(scope="module")
def measured():
    """`measured(script)`: its rows, each script run once."""
    known: dict[str, list[Result]] = {}

    def rows(name: str) -> list[Result]:
        if name not in known:
            script = importlib.import_module(f"benchmarks.{name}")
            known[name] = script.measure(script.parser().parse_args(script.QUICK.split()))
        return known[name]

    return rows


def one(rows: list[Result], case: str, claim: str = "") -> Result:
    """The only row of a case whose claim begins so."""
    (row,) = [row for row in rows if row.case == case and row.claim.startswith(claim)]
    return row


@pytest.mark.parametrize("name", SCRIPTS)
def test_rows_are_whole(measured, name):
    rows = measured(name)
    assert len({(row.claim, row.case, row.of, row.at) for row in rows}) == len(rows) > 1
    for row in rows:
        assert row.claim and row.case
        assert row.ratio is not None and math.isfinite(row.ratio)
        assert row.seconds is None or row.seconds > 0
        assert (row.seconds is None) == (row.pairs == 0)
        if row.seconds is not None and row.case == row.of:
            assert row.ratio == 1


def test_decode_holds_equally_many_keys(measured):
    rows = measured("decode")
    for case, keys in (
        ("DynamicCache", 64 + 1),  # with the one of the last step
        ("DynamicCache, 2x keys", 128 + 1),
        ("h2o, sliced and concatenated", 64),
        ("snapkv every 32 steps", 64 + 32),
    ):
        row = next(row for row in rows if row.case == case)
        assert row.bytes == 2 * 2 * keys * TOKEN
    # One slot is free for the next key.
    assert {row.bytes for row in rows if row.case == "h2o" and row.bytes is not None} == {2 * 2 * (64 + 1) * TOKEN}


def test_prefill_reads_a_prompt_once_and_forms_no_square(measured):
    rows = measured("prefill")
    assert one(rows, "one prefill per distinct prompt", "prompts prefilled").met
    assert one(rows, "every row prefilled", "prompts prefilled").ratio == pytest.approx(4, rel=0.05)
    squares = [row for row in rows if row.of == "P x P of one head"]
    assert len(squares) == 2 and all(row.met for row in squares)


@torch.no_grad()
def test_a_prefill_that_forms_attention_weights_is_noticed():
    args = prefill.parser().parse_args([*prefill.QUICK.split(), "--policies", "h2o"])
    model = make_model("tiny", args)
    plain = plain_twin(model)
    with MaskedAttentionAdapter(model, backend="eager"):
        (square,) = [row for row in prefill.measure_batch(model, plain, 1, args) if row.of == "P x P of one head"]
    assert not square.met


def test_spikes_are_those_of_the_arithmetic(measured):
    rows = measured("spikes")
    at_once = one(rows, "all layers sliced, then freed", "eviction of 50%, 3 layers: spike")
    one_by_one = one(rows, "sliced layer by layer", "eviction of 50%, 3 layers: spike")
    # Half of everything; the indices of the gather come on top.
    assert at_once.ratio == pytest.approx(0.5, rel=0.01) and one_by_one.ratio == pytest.approx(0.5 / 3, rel=0.02)
    assert one(rows, "all layers sliced, then freed", "the same of the paper").bytes == pytest.approx(1.33e9, rel=0.01)
    goals = [row for row in rows if row.goal is not None]
    assert len(goals) == 3 * 4 + 1 and all(row.met for row in goals)
    held = one(rows, "ours, snapkv", "keys and values held")
    assert held.bytes == 3 * 8 * (128 + 1) * 2 * 128 * 4 * 2


def test_memory_goals_are_met(measured):
    assert one(measured("learner"), "both tracks", "learner's peak").met
    assert one(measured("fused_head"), "fused", "head, extra memory").met
    peaks = [row for row in measured("chunked_prefill") if row.case.endswith("peak of a layer")]
    assert [row.ratio for row in peaks] == [1.0, 1.0]


def test_generate_holds_prompt_share_and_response(measured):
    rows = measured("generate")
    assert one(rows, "DynamicCache").bytes == 2 * 2 * (64 + 4 - 1) * TOKEN
    assert one(rows, "snapkv, prompt").bytes == 2 * 2 * (32 + 4) * TOKEN


def test_growth_has_every_point_of_every_curve(measured):
    rows = measured("growth")
    assert len({row.claim for row in rows}) == len(CURVES)
    for curve in CURVES.values():
        points = [row.at for row in rows if row.claim.endswith(f"against {curve.axis}")]
        assert set(curve.quick) <= set(points)
    by_budget = [row for row in rows if "budget" in row.claim and row.case == "h2o"]
    assert [row.bytes for row in by_budget] == [2 * 2 * (keys + 1) * TOKEN for keys in (32, 64)]
