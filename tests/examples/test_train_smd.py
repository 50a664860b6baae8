"""The training script, run as a user runs it: all arms, Ctrl-C, a kill at a random update, damaged checkpoints."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tokenizer import EOS, VOCABULARY, byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_smd.py"
UPDATES = 6
OPTIONS = (
    f"--updates {UPDATES} --prompts 2 --group 2 --micro-rows 2 --max-new-tokens 6 --eval-prompts 2 --eval-every 3 "
    "--save-every 2 --learning-rate 1e-3"
).split()

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model on disk."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=VOCABULARY + 1, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=EOS,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def start(model: Path, out: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, str(SCRIPT), "--model", str(model), "--out", str(out), *OPTIONS, *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "160"}
    )


def run(model: Path, out: Path, *options: str) -> str:
    process = start(model, out, *options)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def metrics(out: Path) -> list[dict[str, str]]:
    """The table of the run, without the times."""
    with (out / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in csv.DictReader(file)]


def wait_for(out: Path, updates: int) -> None:
    """Wait until so many updates are in the table (which also has a line for update 0)."""
    for _ in range(3000):
        if (out / "metrics.csv").exists() and len(metrics(out)) > updates:
            return
        time.sleep(0.02)
    raise TimeoutError(f"no {updates} updates in a minute")


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    output = run(model, out)
    assert f"smd after {UPDATES} updates: reward" in output and "KV" in output
    return out


def test_what_a_run_leaves_behind(whole):
    rows = metrics(whole)
    assert [float(row["update"]) for row in rows] == list(range(UPDATES + 1))
    assert [bool(row["eval_dense"] and row["eval_sparse"]) for row in rows] == [
        True,
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    for row in rows[1:]:
        assert float(row["max_mismatch"]) <= 1e-4
        assert float(row["prompts_per_row"]) == 0.5
        assert float(row["kl_dense_to_sparse"]) >= 0
    assert (whole / "log" / "scalars" / "reward.csv").read_text().count("\n") == UPDATES
    assert json.loads((whole / "config.json").read_text())["arm"] == "smd"
    assert (whole / "run.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (whole / "checkpoints").glob("*.pt")) == ["step-000004.pt", "step-000006.pt"]


def test_killed_at_a_random_update_and_resumed(model, whole, tmp_path):
    at = random.randint(3, UPDATES - 1)  # the first checkpoint, of update 2, is written after that update's metrics
    process = start(model, tmp_path)
    wait_for(tmp_path, at)
    process.kill()
    process.wait()
    output = run(model, tmp_path, "--resume")
    assert "going on after update" in output
    assert metrics(tmp_path) == metrics(whole), f"killed after update {at}"


def test_ctrl_c_saves_and_the_run_goes_on(model, whole, tmp_path):
    process = start(model, tmp_path)
    wait_for(tmp_path, 1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    done = len(metrics(tmp_path)) - 1
    assert 1 <= done < UPDATES, "it ran to its end before the signal came"
    assert (tmp_path / "checkpoints" / f"step-{done:06d}.pt").exists()
    run(model, tmp_path, "--resume")
    assert metrics(tmp_path) == metrics(whole)


@pytest.mark.parametrize("arm", ["dense", "naive", "tis", "sparse_rl"])
def test_arms(model, tmp_path, arm):
    logger = "tensorboard" if arm == "dense" else "csv"
    output = run(model, tmp_path, "--arm", arm, "--updates", "1", "--eval-every", "9", "--logger", logger)
    assert f"{arm} after 1 updates" in output
    row = metrics(tmp_path)[1]
    # A dense learner of dense samples is on policy; one of sparse samples is not.
    assert (float(row["max_mismatch"]) <= 1e-4) == (arm == "dense")
    assert ("rejected_fraction" in row) == (arm in ("tis", "sparse_rl"))
    assert bool(list(tmp_path.rglob("events.out.tfevents*"))) == (arm == "dense")


def test_a_truncated_checkpoint_is_an_error_that_names_the_one_before(model, whole, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for path in (whole / "checkpoints").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    newest = folder / "step-000006.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    process = start(model, tmp_path, "--resume")
    output, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    text = " ".join(output.split())
    assert "step-000006.pt is damaged" in text and "step-000004.pt" in text
    newest.unlink()
    assert "going on after update 4" in run(model, tmp_path, "--resume")
    assert metrics(tmp_path) == metrics(whole)
