"""The study: tasks, arms on library components, a grid that loses nothing, and a report that counts right."""

from __future__ import annotations

import doctest
import itertools
import json
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from examples.study import cells, random_mask, report, results, statistics
from examples.study.__main__ import main
from examples.study.arms import ARMS, Arm
from examples.study.claims import EVALUATIONS, Claim, CostClaim, findings, savings, verdict
from examples.study.grid import ELSEWHERE, Grid, Job, full_grid, quick_grid
from examples.study.model import Shape, make_model, make_tokenizer
from examples.study.pretrain import Pretraining, checkpoint
from examples.study.random_mask import random_shadow
from examples.study.report import tables
from examples.study.rollout import add_dense_log_probs, sample
from examples.study.run import TASKS, run, summary
from examples.study.setting import Eviction, Scale, Setting
from examples.study.statistics import bootstrap, paired
from examples.study.table import Table
from examples.study.work import do_grid
from smdlib import MaskedAttentionAdapter

SCALE = Scale(updates=1, rows=8, warmup=1, probe_every=1, eval_prompts=4, eval_batch=4, initialisations=1)
SHAPE = Shape(hidden=32, feed_forward=48, layers=2)
# Enough that some of its answers earn something and others do not.
PRETRAINING = Pretraining(target=0.0, check_every=150, max_steps=150, held_out=8, batch=8)
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Checkpoints of the small model."""
    return tmp_path_factory.mktemp("checkpoints")


def do(folder: Path, arm: str, **fields) -> dict:
    scale = replace(SCALE, updates=fields.pop("updates", 1))
    return run(Setting(arm, group=4, **fields), scale, SHAPE, PRETRAINING, folder)


# ---------------------------------------------------------------------------------------------------------- the tasks


def words(task, seed: int = 0) -> tuple[list[str], list[str]]:
    """One problem in words."""
    problem = task.problems(1, torch.Generator().manual_seed(seed))
    return [task.vocabulary[i] for i in problem.prompts[0]], [task.vocabulary[i] for i in problem.answers[0]]


def edges_of(prompt: list[str]) -> list[tuple[str, str]]:
    return [(source, target) for source, _, target in (word.partition(">") for word in prompt) if source and target]


def entries_of(prompt: list[str]) -> list[tuple[str, str]]:
    return [(entry, amount) for entry, _, amount in (word.partition("=") for word in prompt) if amount]


@pytest.mark.parametrize("seed", range(3))
def test_the_chase_is_answered_by_following_edges(seed):
    prompt, answer = words(TASKS["chase"].lesson, seed)
    edges = dict(edges_of(prompt))
    assert len(edges) == 16 and len(edges_of(prompt)) == 96
    assert [edges[at] for at in [prompt[-1], *answer[:-1]]] == answer


@pytest.mark.parametrize("seed", range(3))
def test_the_ledger_is_answered_by_reading_it(seed):
    prompt, answer = words(TASKS["ledger"].lesson, seed)
    amounts = dict(entries_of(prompt))
    assert len(amounts) == 16 and len(entries_of(prompt)) == 96
    days = [f"{prompt[-1]}d{day}" for day in range(4)]
    total = sum(int(amounts[day]) for day in days)
    assert answer == [*(f"{day}={amounts[day]}" for day in days), str(total)]


def chased(prompt: list[str], answer: list[str]) -> dict[str, str]:
    return dict(zip([prompt[-1], *answer], answer, strict=False))


def booked(prompt: list[str], answer: list[str]) -> dict[str, str]:
    return dict(entries_of(answer))


@pytest.mark.parametrize(("name", "read", "truth_of"), [("chase", edges_of, chased), ("ledger", entries_of, booked)])
def test_one_record_in_five_is_wrong(name, read, truth_of):
    wrong, total = 0, 0
    for seed in range(40):
        prompt, answer = words(TASKS[name], seed)
        truth = truth_of(prompt, answer)
        listed = [(key, value) for key, value in read(prompt) if key in truth]
        wrong += sum(value != truth[key] for key, value in listed)
        total += len(listed)
    assert wrong / total == pytest.approx(0.2, abs=0.04)


@pytest.mark.parametrize("name", TASKS)
def test_prompts_are_long_and_every_word_is_one_token(name):
    problems = TASKS[name].problems(2, torch.Generator())
    assert 100 <= problems.prompts.shape[1] <= 500 and problems.answers.shape[1] == {"chase": 6, "ledger": 5}[name]
    vocabulary = TASKS[name].vocabulary
    assert len(set(vocabulary)) == len(vocabulary)
    assert make_tokenizer(TASKS[name]).decode(problems.prompts[0]).split() == [
        vocabulary[i] for i in problems.prompts[0]
    ]


@pytest.mark.parametrize("module", [cells, random_mask, statistics], ids=lambda module: module.__name__)
def test_examples_of_docstrings(module):
    assert doctest.testmod(module, globs=vars(module) | {"torch": torch}).failed == 0


def test_a_hop_counts_from_where_the_one_before_led_to():
    task = TASKS["chase"]
    problem = task.problems(1, torch.Generator().manual_seed(0))
    first, follower = task.vocabulary.index("n0"), problem.truth[0]
    response = problem.answers.clone()
    assert task.right(response, problem).all()
    response[0, 2] = (response[0, 2] - first + 1) % 16 + first
    response[0, 3] = follower[response[0, 2] - first] + first
    response[0, 4] = 0  # an edge, which is no node; the hop after it has nothing to start from
    assert task.right(response, problem)[0].tolist() == [True, True, False, True, False, False]


def test_a_sum_counts_by_what_was_written_down():
    task = TASKS["ledger"]
    problem = task.problems(1, torch.Generator().manual_seed(0))
    assert task.right(problem.answers, problem).all()
    amounts = [int(task.vocabulary[token].partition("=")[2]) for token in problem.answers[0, :-1]]
    response = problem.answers.clone()
    response[0, 1] += 1 if amounts[1] < 4 else -1
    assert task.right(response, problem)[0].tolist() == [True, False, True, True, False]
    response[0, 4] += 1 if amounts[1] < 4 else -1
    assert task.right(response, problem)[0].tolist() == [True, False, True, True, True]
    response[0, 1] = task.vocabulary.index("<page>")  # no entry, so there is nothing to add up
    assert task.right(response, problem)[0].tolist() == [True, False, True, True, False]


# ----------------------------------------------------------------------------------------------------------- the arms


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_takes_an_update_and_logs_its_gap(folder, name):
    record = do(folder, name)
    gap = record["worst"]["max_mismatch"]
    assert record["curve"]["reward"][0] > 0 and record["worst"]["grad_norm"] > 0.01, "there was nothing to learn"
    arm = ARMS[name]
    if arm.exact or not arm.sparse:
        assert record["worst"]["rms_mismatch"] <= gap < 1e-5, "the learner replays what the sampler saw"
    else:
        assert gap > 1e-4, "nothing was evicted, or something else than the dense policy was scored"
    assert ("acceptance_p5" in record["curve"]) == arm.sparse
    assert ("rejected_fraction" in record["curve"]) == arm.old
    assert record["cost"]["kv_bytes"] > 0 and set(record["solved"]) == {"dense", "sparse"}


def test_the_same_setting_gives_the_same_numbers(folder):
    one, other = do(folder, "smd", updates=2), do(folder, "smd", updates=2)
    assert results.numbers(one) == results.numbers(other)
    assert results.numbers(do(folder, "smd", updates=2, seed=1)) != results.numbers(one)


def test_a_pretrained_checkpoint_is_made_once_and_again_alike(tmp_path):
    paths = [checkpoint(tmp_path / name, TASKS["ledger"], SHAPE, 0, PRETRAINING) for name in "ab"]
    one, other = (torch.load(path, weights_only=True) for path in paths)
    assert all(torch.equal(one[name], other[name]) for name in one)
    paths[0].write_bytes(b"not read again")
    assert checkpoint(tmp_path / "a", TASKS["ledger"], SHAPE, 0, PRETRAINING) == paths[0]
    assert checkpoint(tmp_path / "a", TASKS["ledger"], SHAPE, 1, PRETRAINING) != paths[0]


def test_old_log_probs_are_those_of_the_dense_policy():
    task = TASKS["chase"]
    adapter = MaskedAttentionAdapter(make_model(task, SHAPE, 0))
    problems = task.problems(2, torch.Generator().manual_seed(0))
    batch = sample(adapter, make_tokenizer(task), task, problems, 2, Eviction("random", 0.3), draw=0)
    add_dense_log_probs(batch, adapter)
    with torch.no_grad():
        whole = adapter.log_probs(batch["tokens", "full"])
    mask = batch["masks", "all_assistant_mask"]
    assert torch.equal(batch["log_probs", "old"].isnan(), ~mask)
    assert (batch["log_probs", "old"] - whole)[mask].abs().max() < 1e-5
    assert (batch["log_probs", "full"] - whole)[mask].abs().max() > 1e-4


def test_the_random_record_is_one_that_the_cache_could_have_made():
    """As many keys gone as under the policy ``random``, at the same time; each head another choice."""
    task, keep = TASKS["chase"], 0.3
    adapter = MaskedAttentionAdapter(make_model(task, SHAPE, 0))
    problems = task.problems(2, torch.Generator().manual_seed(0))
    rows = sample(adapter, make_tokenizer(task), task, problems, 2, Eviction("random", keep), draw=0)
    real = rows["shadow"].evicted_at
    made = random_shadow(tuple(real.shape), problems.prompts.shape[1], keep, 2, torch.Generator().manual_seed(0))
    assert set(made.unique().tolist()) == set(real.unique().tolist()) and len(made.unique()) == 3
    assert all(((made == at).sum(1) == (real == at).sum(1)).all() for at in made.unique())
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    assert not torch.equal(made[0, :, 0, 0], made[0, :, 0, 1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arm": "smdd"}, "no arm 'smdd'; there are .*'smd'"),
        ({"arm": "smd", "task": "chse"}, "no task 'chse'; there are .*'chase'"),
        ({"arm": "smd", "seed": -1}, "the seed is -1"),
    ],
)
def test_what_cannot_be_run_is_told_before_the_pretraining(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        do(tmp_path, **fields)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda actor, coeff: None, "arm 'broken' made None; its function has to return a loss"),
        (
            lambda actor, coeff: lambda batch: TensorDict({"kl": torch.ones(())}),
            r"returned \['kl'\]; expected .*'loss_",
        ),
    ],
)
def test_an_arm_without_a_loss_is_refused(folder, monkeypatch, build, message):
    monkeypatch.setitem(ARMS, "broken", Arm("broken", build))
    with pytest.raises(ValueError, match=message):
        do(folder, "broken")


# ----------------------------------------------------------------------------------------------------------- the grid


def test_the_grid_names_every_run_once_and_pairs_its_arms():
    grid = full_grid()
    keys = [job.setting.key for job in grid.jobs]
    assert len(set(keys)) == len(keys)
    seeds: dict[str, set[int]] = {}
    for job in grid.jobs:
        seeds.setdefault(job.setting.cell, set()).add(job.setting.seed)
    assert all(len(found) in (1, 3, 5, 16) for found in seeds.values())
    assert {job.setting.arm for job in grid.jobs} == {*ARMS, "start"}
    assert {job.setting.arm for job in quick_grid().jobs} == {*ARMS, "start"}
    assert set(ELSEWHERE) == set(TASKS)
    assert Setting.from_dict(json.loads(json.dumps(grid.jobs[40].setting.as_dict()))) == grid.jobs[40].setting


def small_grid() -> Grid:
    settings = [Setting(arm, group=4, seed=seed) for seed in range(2) for arm in ("dense", "naive", "smd")]
    return Grid(tuple(Job(setting) for setting in settings), SCALE, SHAPE, PRETRAINING)


@pytest.mark.slow
def test_a_killed_grid_keeps_what_was_done_and_does_the_rest(tmp_path):
    grid, path = small_grid(), tmp_path / "results.jsonl"
    worker = multiprocessing.get_context("spawn").Process(target=do_grid, args=(grid, tmp_path, 1))
    worker.start()
    for _ in range(600):
        if len(results.load(path)) >= 2:
            break
        time.sleep(0.1)
    worker.kill()
    worker.join()
    before = results.load(path)
    assert 2 <= len(before) < len(grid.jobs), "it was over before it was killed"
    with path.open("ab") as file:
        file.write(b'{"key": "cut o')  # what a kill in the middle of a line leaves
    records = do_grid(grid, tmp_path, 1)
    assert [record["key"] for record in records] == [job.setting.key for job in grid.jobs]
    assert results.load(path)[: len(before)] == before, "a finished run was changed or lost"
    assert len(results.load(path)) == len(grid.jobs), "a finished run was done again"
    stamp = path.stat().st_mtime_ns
    assert do_grid(grid, tmp_path, 1) == records and path.stat().st_mtime_ns == stamp


def test_a_folder_keeps_runs_of_one_size(tmp_path):
    """Quick and full runs have the same keys."""
    nothing = Grid((), SCALE, SHAPE, PRETRAINING)
    assert do_grid(nothing, tmp_path, 1) == [] == do_grid(nothing, tmp_path, 1)
    with pytest.raises(ValueError, match=r"has runs of another size .*another folder with --out"):
        do_grid(replace(nothing, scale=replace(SCALE, updates=2)), tmp_path, 1)
    with pytest.raises(ValueError, match="workers is 0"):
        do_grid(nothing, tmp_path, 0)


def test_commands_refuse_files_that_are_not_there_and_write_nothing(tmp_path, capsys):
    assert main(["report", "--results", str(tmp_path / "no"), "--tables", str(tmp_path / "t.inc")]) == 2
    assert main(["compare", "--results", str(tmp_path / "no")]) == 2
    assert "no; `make study` writes one" in capsys.readouterr().err.replace("\n", "") and not list(tmp_path.iterdir())
    (tmp_path / "other").write_text('{"key": "a"}\n')
    assert main(["compare", "--results", str(tmp_path / "other")]) == 1, "nothing was compared"
    assert main(["compare", "--results", str(tmp_path / "other"), "--committed", str(tmp_path / "other")]) == 0


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    jobs = [Job(Setting(arm, group=4)) for arm in ("dense", "no such arm", "smd")]
    with pytest.raises(RuntimeError, match=r"1 of 3 runs failed, the first was .*no such arm"):
        do_grid(Grid(tuple(jobs), SCALE, SHAPE, PRETRAINING), tmp_path, 1)
    assert [record["setting"]["arm"] for record in results.load(tmp_path / "results.jsonl")] == ["dense", "smd"]


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"key": "a"}\n{"key":\n{"key": "b"}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*results.jsonl is damaged"):
        results.load(path)


def test_other_numbers_are_told_and_other_times_are_not():
    record = {"key": "a", "solved": {"dense": 0.5}, "cost": {"seconds": 1.0, "kv_bytes": 8.0}}
    assert results.differences([record | {"cost": {"seconds": 2.0, "kv_bytes": 8.0}}], [record]) == []
    assert results.differences([record | {"solved": {"dense": 0.6}}], [record]) == ["a"]
    assert results.differences([record | {"cost": {"seconds": 1.0, "kv_bytes": 9.0}}], [record]) == ["a"]


def test_the_curve_is_means_and_extremes_of_each_stretch():
    history = [
        {"reward": r, "max_ratio": m, "max_mismatch": 0.0, "grad_norm": r} | dict.fromkeys(
            ("seconds", "rollout_seconds", "wall_seconds", "kv_bytes"), 2.0
        )
        for r, m in ((0.1, 3.0), (0.3, 1.0), (0.5, 2.0))
    ]  # fmt: skip
    short = summary(history, every=2)
    assert short["curve"]["reward"] == [0.2, 0.5] and short["curve"]["max_ratio"] == [3.0, 2.0]
    assert short["worst"]["grad_norm"] == 0.5 and short["cost"]["seconds"] == 2.0


# --------------------------------------------------------------------------------------------------------- the report


def record(arm: str, seed: int, dense: float, sparse: float) -> dict:
    setting = Setting(arm, seed=seed)
    solved = {"dense": dense, "sparse": sparse, "snapkv-70": sparse / 2}
    cost = {"seconds": 1.0, "rollout_seconds": 0.5, "kv_bytes": 1e6}
    worst = {"max_mismatch": (seed + 1) * 1e-6, "grad_norm": 1.0} | ({"rms_mismatch": 5e-7} if arm == "smd" else {})
    curve = {"reward": [0.1], "grad_norm": [1.0], "kl_approx_k3": [0.5]}
    return {"key": setting.key, "setting": setting.as_dict(), "solved": solved, "reward": solved, "curve": curve,
            "worst": worst, "cost": cost}  # fmt: skip


def test_the_interval_is_that_of_the_plain_formula():
    values = [0.4, 0.7, 0.5, 0.9, 0.6]
    estimate = bootstrap(values)
    plain = sorted(sum(pick) / 5 for pick in itertools.product(values, repeat=5))
    outside = 0.000955  # normal tail beyond 2.776 (Student's, 4 degrees of freedom) times the root of 5 / 4
    assert estimate.mean == pytest.approx(np.mean(values))
    assert estimate.low == pytest.approx(plain[round(outside * len(plain))], abs=0.021)
    assert estimate.high == pytest.approx(plain[-1 - round(outside * len(plain))], abs=0.021)
    assert bootstrap(values) == estimate and bootstrap([0.3]).low == 0.3


def test_intervals_of_five_seeds_hold_the_mean_about_as_often_as_they_say():
    rng = np.random.default_rng(0)
    estimates = [bootstrap(list(rng.normal(size=5)), 2000) for _ in range(400)]
    assert 0.9 < np.mean([one.low <= 0 <= one.high for one in estimates]) < 0.98, "percentiles alone hold it in .84"


def test_differences_are_paired_by_seed():
    one, other = {0: 0.1, 1: 0.5, 2: 0.9, 7: 1.0}, {0: 0.0, 1: 0.4, 2: 0.8, 8: 0.0}
    estimate = paired(one, other)
    assert (estimate.count, estimate.low, estimate.high) == (3, pytest.approx(0.1), pytest.approx(0.1))
    with pytest.raises(ValueError, match="no seed in common"):
        paired({0: 1.0}, {1: 1.0})


def test_verdicts_follow_the_intervals():
    """SMD is better with every key, worse with evicted ones."""
    good = [record("smd", seed, 0.8 + 0.01 * seed, 0.4) for seed in range(5)]
    table = Table(good + [record("naive", seed, 0.7 + 0.01 * seed, 0.42) for seed in range(5)])
    claim = Claim("", "smd", "naive", "better", (Setting(""),))
    found = findings(claim, table)
    assert [(one.evaluation, one.holds, one.opposite) for one in found] == [
        ("dense", True, False),
        ("sparse", False, True),
    ]
    assert verdict(found) == "partly: +1 x1 o0"
    assert verdict(found[:1]) == "holds: +1 x0 o0" and verdict(found[1:]) == "not seen here: +0 x1 o0"
    assert verdict(findings(replace(claim, kind="as good"), table)) == "holds: +2 x0 o0", "within the margin"
    assert findings(claim, Table(table.records[1:])) == [] and verdict([]) == "not run", "four pairs are too few"


def test_savings_are_shares_of_the_other_arm():
    cheap = [record("smd", seed, 0.5, 0.2) for seed in range(5)]
    for one in cheap:
        one["cost"] = one["cost"] | {"kv_bytes": 2.5e5, "seconds": 1.05}
    table = Table(cheap + [record("dense", seed, 0.5, 0.2) for seed in range(5)])
    memory, seconds = (CostClaim("", "smd", "dense", cost, -0.1, (Setting(""),)) for cost in ("kv_bytes", "seconds"))
    assert savings(memory, table)[0].estimate.mean == pytest.approx(0.75)
    assert savings(seconds, table)[0].estimate.mean == pytest.approx(-0.05) and savings(seconds, table)[0].holds
    assert savings(replace(seconds, bound=0.0), table)[0].opposite


def test_arms_that_sample_dense_are_compared_under_other_evictions_too():
    seventy = Eviction("snapkv", 0.3)
    table = Table([record("dense", seed, 0.9, 0.6) for seed in range(2)])
    at = Setting("dense", eviction=seventy)
    assert table.values(at, "dense") == {0: 0.9, 1: 0.9} and table.values(at, "sparse") == {0: 0.3, 1: 0.3}
    assert table.values(at.but(arm="smd"), "dense") == {}


def test_a_mean_elsewhere_is_of_the_seeds_that_were_evaluated_there():
    records = [record("dense", seed, 0.5 + seed, 0.1) for seed in range(3)]
    del records[2]["solved"]["snapkv-70"]
    assert Table(records).values(Setting("dense", eviction=Eviction("snapkv", 0.3)), "dense") == {0: 0.5, 1: 1.5}


def test_gains_are_over_the_checkpoint_that_a_seed_started_from():
    records = [record("smd", seed, 0.5, 0.25) for seed in range(5)]
    for seed, solved in enumerate((0.1, 0.2, 0.4)):
        records.append(record("start", seed, solved, 0.05))
        records[-1]["setting"]["rate"] = 0.0
    table = Table(records)
    text = report.accuracy(table, Setting(""), "title")
    gains = bootstrap([0.4, 0.3, 0.1, 0.4, 0.3])
    assert f".500 [.500, .500] (5)\n     - {gains}\n     - .250 [.250, .250] (5)\n     - .200" in text
    assert "* - before\n     - .233\n     - \u2013\n     - .050" in text


def test_the_replay_is_told_over_all_runs():
    text = report.replay(Table([record(arm, seed, 0.5, 0.2) for seed in range(3) for arm in ("smd", "naive")]))
    assert "* - smd\n     - float32\n     - 3\n     - 180\n     - 5.0e-07\n     - 3.0e-06\n" in text
    assert "naive" not in text


def test_the_tables_hold_the_numbers():
    text = tables(Table([record(arm, seed, 0.8, 0.5) for arm in ("smd", "dense") for seed in range(5)]))
    assert "SMD is as good as dense at 50 %" in text and "**holds: +2 x0 o0**" in text and "**not run**" in text
    assert ".800 [.800, .800] (5)" in text and "chase, snapkv-50: cost of an update" in text


def test_the_committed_results_are_small_and_give_the_committed_tables():
    path = DOCS / "runs" / "study.jsonl"
    if not path.exists():
        pytest.skip("the grid has not been run")
    assert path.stat().st_size < 2**20
    records = results.load(path)
    assert (DOCS / "runs" / "study_tables.inc").read_text(encoding="utf-8") == tables(Table(records))
    exact = [one["worst"] for one in records if one["setting"]["arm"] in ("smd", "smd_track1")]
    assert max(worst["rms_mismatch"] for worst in exact) < 1e-5
    assert max(worst["max_mismatch"] for worst in exact) < 1e-4
    double = [one["worst"]["max_mismatch"] for one in records if one["setting"]["dtype"] == "float64"]
    assert len(double) == 2 and max(double) < 1e-5, "what is left in float32 is more than rounding"


def test_the_table_of_the_readme_has_the_committed_means():
    table = Table(results.load(DOCS / "runs" / "study.jsonl"))
    rows = (DOCS.parent / "README.md").read_text(encoding="utf-8").split("## Does it hold?")[1].split("\n\n")[2]
    arms = ("dense", "dense_kl", "smd", "smd_track1", "track2", "naive", "naive_sampler", "sparse_rl")
    for arm, row in zip(arms, rows.splitlines()[2:], strict=True):
        means = [statistics.bootstrap(list(table.values(Setting(arm), name).values())).mean for name in EVALUATIONS]
        assert [cell.strip() for cell in row.split("|")[2:4]] == [statistics.short(mean) for mean in means], arm


def test_the_arm_of_the_page_is_short_and_runs(folder):
    source = (Path(__file__).parents[2] / "examples" / "study" / "own_arm.py").read_text(encoding="utf-8")
    body = [line for line in source.split('"""')[-1].splitlines() if line.strip()]
    assert len(body) <= 10
    before = dict(ARMS)
    try:
        exec(compile(source, "own_arm.py", "exec"), {"__name__": "own_arm"})
        (name,) = set(ARMS) - set(before)
        assert "rejected_fraction" in do(folder, name)["curve"]
    finally:
        ARMS.clear()
        ARMS.update(before)


@pytest.mark.slow
def test_processes_are_told_to_use_one_thread(monkeypatch):
    from examples.study import work

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with work._pool(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_a_run_of_the_language_model_is_shortened_to_a_record():
    from examples.study.language import Size, language_table, record

    rows = [{"update": 0.0, "eval_dense": 0.25, "eval_sparse": 0.5}]
    costs = {"seconds": 3.0, "rollout_seconds": 1.0, "kv_bytes": 2e6}
    for update in range(1, 21):
        figures = {"reward": update / 20, "grad_norm": 1.0, "kl_approx_k3": 0.5, "max_mismatch": update * 1e-6}
        rows.append({"update": float(update), **figures, **costs})
    rows[-1] |= {"eval_dense": 0.75, "eval_sparse": 1.0}
    made = [record("smd", seed, Size(), rows) for seed in range(2)]
    assert made[0]["before"] == {"dense": 0.25, "sparse": 0.5} and made[0]["after"] == {"dense": 0.75, "sparse": 1.0}
    assert made[0]["curve"]["reward"] == [0.275, 0.775] and made[0]["worst"]["max_mismatch"] == 2e-5
    text = language_table(made)
    assert "0.75 (0.75, 0.75)" in text and "2e-05" in text and "- 0.25\n     - 0.50" in text
