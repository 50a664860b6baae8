"""Checkpoints: whole or refused, and the one before still there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "checkpoints.py"
spec = importlib.util.spec_from_file_location("checkpoints", SOURCE)
assert spec is not None and spec.loader is not None
checkpoints = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checkpoints)


def save(folder: Path, step: int, keep: int = 2) -> Path:
    return checkpoints.save_checkpoint(folder, step, {"step": step, "weights": torch.full((300,), float(step))}, keep)


def test_the_newest_are_kept_and_loaded(tmp_path):
    for step in (1, 2, 10):
        save(tmp_path, step)
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["step-000002.pt", "step-000010.pt"]
    state = checkpoints.load_checkpoint(tmp_path)
    assert state["step"] == 10 and state["weights"].eq(10).all()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no manifest"])
def test_damage_is_named_and_the_one_before_loads(tmp_path, damage):
    before, path = save(tmp_path, 1), save(tmp_path, 2)
    contents = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(contents[:-1])
    elif damage == "flipped":
        path.write_bytes(contents[:500] + bytes([contents[500] ^ 1]) + contents[501:])
    else:
        path.with_suffix(".json").unlink()
    wanted = "no finished checkpoint" if damage == "no manifest" else "is damaged"
    with pytest.raises(checkpoints.CheckpointError, match=f"step-000002.pt.*{wanted}.*step-000001.pt"):
        checkpoints.load_checkpoint(path)
    assert checkpoints.load_checkpoint(before)["step"] == 1
    if damage == "no manifest":  # what a crash between the two renames leaves: it never counted
        assert checkpoints.load_checkpoint(tmp_path)["step"] == 1


@pytest.mark.parametrize("call", [1, 2])
def test_a_crash_while_saving_leaves_the_one_before(tmp_path, monkeypatch, call):
    save(tmp_path, 1)
    calls = []
    replace = checkpoints.os.replace

    def crash(*arguments):
        calls.append(1)
        if len(calls) == call:
            raise OSError("disk full")
        replace(*arguments)

    monkeypatch.setattr(checkpoints.os, "replace", crash)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 2)
    assert checkpoints.load_checkpoint(tmp_path)["step"] == 1


def test_saving_the_same_step_again_replaces_it(tmp_path):
    save(tmp_path, 1)
    checkpoints.save_checkpoint(tmp_path, 1, {"step": "again"})
    assert checkpoints.load_checkpoint(tmp_path)["step"] == "again"


def test_an_empty_folder(tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match="start without --resume"):
        checkpoints.load_checkpoint(tmp_path / "none")


def test_random_numbers_go_on_where_they_were():
    state = checkpoints.rng_state()
    first = torch.rand(3)
    checkpoints.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
