"""Checkpoints that are whole or not there: written aside, checked by size and hash, renamed into place."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import torch


class CheckpointError(RuntimeError):
    """A checkpoint is missing or damaged; the message says which file, and what to do."""


def rng_state() -> dict[str, Any]:
    """State of the random number generators of torch, on every device, and of Python."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()}


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue with generators as `rng_state` found them."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int = 2) -> Path:
    """Write ``state`` and delete all but the ``keep`` newest checkpoints.

    A crash at any moment leaves the earlier ones whole: the file gets its name after it was written to the disk, and
    counts from when its manifest (size and SHA-256) has its name too.

    Args:
        folder: Made if need be.
        step: Updates done.
        state: What ``torch.save`` takes.
        keep: Checkpoints to leave.

    Returns:
        The file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.pt"
    part = path.with_suffix(".part")
    torch.save(state, part)
    manifest = {"size": part.stat().st_size, "sha256": _digest(part)}
    _flush(part)
    _manifest(path).unlink(missing_ok=True)
    os.replace(part, path)
    note = path.with_suffix(".json.part")
    note.write_text(json.dumps(manifest))
    _flush(note)
    os.replace(note, _manifest(path))
    for old in checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
        _manifest(old).unlink(missing_ok=True)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints in ``folder``, oldest first."""
    found = [path for path in folder.glob("step-*.pt") if re.fullmatch(r"step-\d+", path.stem)]
    return sorted(path for path in found if _manifest(path).exists())


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint that `save_checkpoint` wrote.

    Args:
        path: The file, or the folder, for its newest.

    Returns:
        The state, on the CPU.

    Raises:
        CheckpointError: if there is none, or it is not what was written.
    """
    if path.is_dir() or not path.suffix:
        found = checkpoints(path)
        if not found:
            raise CheckpointError(f"no checkpoint in {path}; start without --resume.")
        path = found[-1]
    if not path.exists() or not _manifest(path).exists():
        raise CheckpointError(f"{path} is no finished checkpoint; {_others(path)}")
    manifest, size = json.loads(_manifest(path).read_text()), path.stat().st_size
    if size != manifest["size"]:
        raise CheckpointError(f"{path} is damaged: {size} bytes of {manifest['size']}; {_others(path)}")
    if _digest(path) != manifest["sha256"]:
        raise CheckpointError(f"{path} is damaged: its contents are not those that were written; {_others(path)}")
    # weights_only=False: the state holds generators' states; the file is our own.
    return torch.load(path, map_location="cpu", weights_only=False)


def _others(path: Path) -> str:
    earlier = [str(other) for other in checkpoints(path.parent) if other.name < path.name]
    if not earlier:
        return "there is no earlier one."
    return f"delete it to go on from {earlier[-1]}."


def _manifest(path: Path) -> Path:
    return path.with_suffix(".json")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
