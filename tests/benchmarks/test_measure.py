"""The measure itself: pairs, periods, files, tables, and peers that do what they are said to do."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as everything
from benchmarks import peers, table
from benchmarks._measure import Result, Times, alternate
from benchmarks._report import load, make_part, results_of, save
from benchmarks._table import cells, curve
from benchmarks.models import make_model, plain_twin
from smdlib import CompressedCache, MaskedAttentionAdapter

DOCS = Path(__file__).parents[2] / "docs"


# --- times


def test_ratios_are_of_rounds():
    """One slow round counts for both ways, one outlier for neither."""
    times = Times({"plain": [1.0, 10.0, 1.0, 1.0], "ours": [0.5, 5.0, 0.5, 30.0]})
    row = times.result("claim", "ours", "plain", goal=0.5)
    assert (row.seconds, row.ratio, row.met, row.pairs) == (2.75, 0.5, True, 4)
    assert times.result("claim", "plain", "plain").ratio == 1
    assert times.result("claim", "plain", "plain").met is None


def test_a_period_is_the_mean_over_calls_that_differ():
    """Every fourth call evicts; the warm-up shifts which."""
    times = Times({"plain": [1.0] * 8, "ours": [1.0, 5.0, 1.0, 1.0, 1.0, 11.0, 90.0, 1.0]}, warmup=2)
    row = times.result("claim", "ours", "plain", period=4)
    assert row.ratio == row.seconds == (3 * 1 + 8) / 4


def test_ways_alternate_and_are_prepared():
    called = []
    ways = {name: lambda name=name: called.append(name) for name in "ab"}
    times = alternate(ways, device="cpu", repeats=2, warmup=1, before={"b": lambda: called.append("before b")})
    assert called == ["a", "before b", "b", "before b", "b", "a", "a", "before b", "b"]
    assert [len(taken) for taken in times.seconds.values()] == [2, 2] and times.warmup == 1


# --- files and tables


def part_of(*results: Result) -> dict:
    return make_part(argparse.Namespace(device="cpu", sizes=[1, 2], json=None), results, 1.0)


def test_parts_are_saved_one_by_one(tmp_path):
    path, row = tmp_path / "runs" / "bench.json", Result("claim", "ours", 0.5, 0.75, "plain", 0.8, spread=(0.7, 0.8))
    save(path, "first", part_of(row))
    save(path, "second", part_of())
    save(path, "first", part_of(row, row))
    parts = load(path)
    assert list(parts) == ["first", "second"]
    assert [cells(result) for result in results_of(parts["first"])] == [cells(row)] * 2
    assert parts["first"]["results"][0]["met"] is True
    assert parts["first"]["environment"]["versions"]["torch"] == torch.__version__
    assert cells(row) == ("claim", "ours", "500.0 ms", "0.75", "plain", "<= 0.8", "yes", "")
    page = "\n".join(table.lines(parts))
    assert "sizes 1 2" in page and "≤ 0.8" in page and "tiny" not in page


def test_curves_are_summed_up():
    rows = [
        Result("step", case, 1.0, ratio, "plain", at=at)
        for at in (1, 2)
        for case, ratio in (("plain", 1.0), ("ours", at / 4))
    ]
    assert curve(rows) == [("step", "ours / plain", "1: 0.25, 2: 0.50")]


def test_a_part_that_fails_stops_no_other(tmp_path, monkeypatch, capsys):
    from benchmarks import fused_head, spikes

    monkeypatch.setattr(spikes, "measure", lambda args: 1 / 0)
    monkeypatch.setattr(
        fused_head, "measure", lambda args: [Result("claim", "ours", ratio=args.tokens / 2, of="plain")]
    )
    out = tmp_path / "bench.json"
    monkeypatch.setattr("sys.argv", ["bench", "--quick", "--only", "spikes", "fused", "--out", str(out)])
    assert everything.main() == 1
    assert list(json.loads(out.read_text())) == ["fused_head"]
    assert "failed: spikes" in capsys.readouterr().err


def test_the_page_shows_the_saved_results(tmp_path):
    parts = load(DOCS / "runs" / "bench.json")
    table.write(parts, tmp_path / "page")
    assert (tmp_path / "page").read_text() == (DOCS / "runs" / "bench_table.inc").read_text()
    names = {part.name for part in everything.PARTS}
    assert set(parts) <= names | {everything.ELSEWHERE}


# --- the peer


@torch.no_grad()
def step_logits(model, cache, ids, prompt):
    """Logits of a prefill and of every token after it."""
    chunks = [ids[:, :prompt], *ids[:, prompt:].split(1, 1)]
    return torch.cat([model(input_ids=chunk, cache=cache).logits for chunk in chunks], 1)


@pytest.fixture
def models():
    model = make_model("tiny", argparse.Namespace(vocabulary=64, layers=2, device="cpu", dtype="float32"))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(0, 1.4 / weight.shape[-1] ** 0.5)
    slicing = plain_twin(model)
    slicing.set_attn_implementation(peers.NAME)
    return model, plain_twin(model), slicing


def test_the_peer_that_slices_sees_what_streaming_sees(models):
    model, plain, slicing = models
    ids = torch.randint(64, (2, 40))
    sliced = step_logits(slicing, peers.slicing_cache(model.config, 16, "streaming"), ids, 24)
    with MaskedAttentionAdapter(model):
        cache = CompressedCache(model.config, "streaming", 16, evict_every=1)
        torch.testing.assert_close(sliced, step_logits(model, cache, ids, 24), rtol=0, atol=1e-4)
    assert (sliced - plain(ids).logits).abs().max() > 0.1


@pytest.mark.parametrize("policy", ["h2o", "streaming"])
def test_the_peer_that_slices_is_exact_until_it_evicts(models, policy):
    model, plain, slicing = models
    ids = torch.randint(64, (2, 40))
    cache = peers.slicing_cache(model.config, 36, policy)
    logits = step_logits(slicing, cache, ids, 24)
    with torch.no_grad():
        torch.testing.assert_close(logits[:, :36], plain(ids).logits[:, :36], rtol=0, atol=1e-4)
    assert cache.layers[0].keys.shape == (2, 2, 36, 16) and cache.get_seq_length() == 40


def test_the_peer_keeps_heavy_hitters_and_recent_keys():
    layer = peers.SlicingLayer(4, tracks_mass=True)
    keys = torch.arange(6.0).view(1, 1, 6, 1)
    layer.update(keys, keys)
    layer.evict(torch.tensor([[[1.0, 9.0, 0.0, 5.0, 0.0, 0.0]]]))
    assert layer.keys.flatten().tolist() == [1, 3, 4, 5]
    layer.update(torch.full((1, 1, 1, 1), 6.0), torch.zeros(1, 1, 1, 1))
    layer.evict(torch.tensor([[[0.0, 0.0, 7.0, 0.0, 0.0]]]))
    assert layer.keys.flatten().tolist() == [1, 4, 5, 6]
    assert layer.mass.flatten().tolist() == [9, 7, 0, 0]
