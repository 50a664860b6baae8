"""Rollouts in Ray workers: what arrives in the learner's process is what was sampled, by the weights it names."""

from __future__ import annotations

import copy
import math
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock

from smdlib import NEVER, GRPOLoss, ShadowMask, SMDLoss, group_advantage
from smdlib.rollout import policy_versions
from tests.distributed.rollouts import (
    GROUP,
    PROMPTS,
    QUESTIONS,
    ROUNDS,
    ROWS,
    TEMPERATURE,
    WORKERS,
    checksum,
    make_signing_actor,
)
from tests.rollout.actors import gaps

pytest.importorskip("ray")
pytestmark = pytest.mark.slow  # starting the workers, once for all tests
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "distributed" / "ray_rollout.py"
BOUND = 1e-4


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Rows by round, and the learner as it was in each (see `rollouts.py`); once for all of pytest's processes."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    file = folder / "ray_rollouts.pt"
    with FileLock(folder / "ray_rollouts.lock", timeout=400):
        if not file.exists():
            command = [sys.executable, "-m", "tests.distributed.rollouts", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
            if done.returncode:
                torch.save({"failed": done.stderr}, file)
    found = torch.load(file, weights_only=False)
    assert "failed" not in found, found["failed"]
    return SimpleNamespace(**found)


def rows_of(run):
    return [row for batch in run.rounds for row in batch.unbind(0)]


def test_every_worker_samples_its_own_prompts(run):
    assert run.written == ROWS * ROUNDS
    draws = [PROMPTS * WORKERS * index for index in range(ROUNDS)]
    for first, batch in zip(draws, run.rounds, strict=True):
        found = sorted((int(row["group"]), int(row["worker"]), int(row["row"])) for row in batch.unbind(0))
        groups = range(first, first + PROMPTS * WORKERS)
        assert found == [(g, g % WORKERS, g % len(QUESTIONS)) for g in groups for _ in range(GROUP)]
    assert len({len(row["tokens", "full"]) for row in rows_of(run)}) > 5  # ragged, as they were sampled
    sampled = [tuple(row["tokens", "full"].tolist()) for row in rows_of(run)]
    assert len(set(sampled)) > 0.8 * len(sampled)


def test_advantages_are_of_whole_groups(run):
    for batch in run.rounds:
        rows = sorted(batch.unbind(0), key=lambda row: int(row["group"]))
        rewards = torch.stack([row["next", "reward"].reshape(()) for row in rows])
        assert rewards.view(-1, GROUP).std(1).max() > 0
        found = torch.stack([row["advantage"].reshape(()) for row in rows])
        torch.testing.assert_close(found, group_advantage(rewards, GROUP), rtol=1e-4, atol=1e-4)


def test_masks_arrive_byte_for_byte(run):
    for row in rows_of(run):
        shadow = row["shadow"]
        assert isinstance(shadow, ShadowMask) and shadow.evicted_at.dtype == torch.int32
        assert torch.equal(checksum(shadow), row["checksum"])
        assert torch.equal(shadow.token_ids[:-1].long(), row["tokens", "full"][:-1])  # the last is never fed back
    shadow = rows_of(run)[0]["shadow"].clone()
    shadow.evicted_at[3, 1, 1] += 1
    assert not torch.equal(checksum(shadow), rows_of(run)[0]["checksum"])


def test_versions_count_the_pushes(run):
    assert run.pushed == [1, 2, 3] and run.puts == 3  # all workers read what was put once
    for version, batch in enumerate(run.rounds):
        assert policy_versions(batch).tolist() == [version] * ROWS


def test_log_probs_are_those_of_the_version_and_of_no_other(run):
    for row in rows_of(run):
        version = int(policy_versions(row))
        for other, learner in enumerate(run.learners):
            masked, dense = gaps(learner, row, TEMPERATURE)
            assert masked <= BOUND if other == version else masked > 1e-3
            assert other != version or dense > masked
    dense = [gaps(run.learners[int(policy_versions(row))], row, TEMPERATURE)[1] for row in rows_of(run)]
    assert max(dense) > 0.5  # without the masks the learner would be wrong


@pytest.mark.parametrize("version", range(ROUNDS))
def test_first_ratio_of_every_token_is_one(run, version):
    actor, batch = copy.deepcopy(run.learners[version]), run.rounds[version]
    output = SMDLoss(actor, grpo=GRPOLoss(actor, temperature=TEMPERATURE))(batch)
    assert output.max_mismatch <= BOUND and abs(output.max_ratio - 1) <= BOUND  # the largest |log ratio|, both ways
    assert output.clip_fraction == 0
    output.loss_objective.backward()
    gradient = actor.model.lm_head.weight.grad
    assert gradient is not None and gradient.abs().max() > 0
    stale = run.learners[(version + 1) % ROUNDS]
    assert SMDLoss(stale, grpo=GRPOLoss(stale, temperature=TEMPERATURE))(batch).max_mismatch > 1e-3


def test_dense_rows_arrive_too(run):
    rows, learner = run.dense, make_signing_actor(None, -1)
    assert rows.shape == (GROUP,) and policy_versions(rows).tolist() == [0] * GROUP
    for row in rows.unbind(0):
        assert torch.equal(checksum(row["shadow"]), row["checksum"])
        assert row["shadow"].evicted_at.min() == NEVER
        assert gaps(learner, row, TEMPERATURE)[0] <= BOUND


def test_a_reward_that_raises_is_an_error_here_that_names_the_row(run):
    assert "RewardError" in run.bases  # Ray's error is also one of the class that was raised
    assert re.search(r"RewardError: .*KeyError: 'answer' \(row 1, response", run.error)


def started(*options, timeout=300):
    """Run the example; also return its processes that are still there when it has ended."""
    marker = f"SMDLIB_TEST={uuid.uuid4()}"
    name, value = marker.split("=")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {name: value},
    )
    end = time.monotonic() + 10
    while (left := [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if marker in read(path)]) and (
        time.monotonic() < end
    ):
        time.sleep(0.2)
    return done, left


def read(path):
    try:
        return path.read_text(errors="replace")
    except OSError:  # ended meanwhile, or another user's
        return ""


def test_example_prints_what_its_docstring_promises():
    done, left = started("--updates", "2", "--group", "4")
    assert done.returncode == 0, done.stderr
    found = re.findall(
        r"reward ([\d.]+), .*rows by version \{(.*)\}, largest mismatch by staleness \{(.*)\} nats, 16 of 16 masks",
        done.stdout,
    )
    assert [re.findall(r"(\d+):", versions) for _, versions, _ in found] == [["0"], ["0", "1"]]
    mismatch = [dict(pair.split(": ") for pair in values.split(", ")) for *_, values in found]
    assert all(float(values["0"]) <= BOUND for values in mismatch) and float(mismatch[1]["1"]) > 1e-3
    assert all(math.isfinite(float(reward)) for reward, *_ in found)
    assert not left


def test_example_leaves_nothing_behind_after_an_error():
    done, left = started("--timeout", "0.01", timeout=120)
    assert done.returncode == 1 and "TimeoutError" in done.stderr
    assert not left
