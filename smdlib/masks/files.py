"""Shadow masks on disk: safetensors with a format name and a checksum."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from smdlib.masks.shadow import check_record

_FORMAT = "smdlib.shadow_mask/1"
_NAME = "evicted_at"
_IDS = "token_ids"


class ShadowMaskFileError(ValueError):
    """A file is not a shadow mask, or no longer one; the message says what is wrong with it."""


def _digest(tensor: Tensor) -> str:
    # As bytes, so that a foreign file's dtype cannot fail here (numpy has no bfloat16).
    return hashlib.sha256(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def save_mask(evicted_at: Tensor, token_ids: Tensor | None, path: Path) -> None:
    """Write a record to ``path``; a crash leaves the previous file whole.

    Args:
        evicted_at: int32 ``[*batch, T, L, H]``.
        token_ids: int32 ``[*batch, T]`` or ``None``.
        path: File to write.

    Raises:
        FileNotFoundError: if its folder does not exist.
        ValueError: if this is no record, which `load_mask` would refuse.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write a shadow mask to {path}: there is no folder {path.parent}")
    check_record(evicted_at)
    tensors = {_NAME: evicted_at} if token_ids is None else {_NAME: evicted_at, _IDS: token_ids}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    digests = {name: _digest(tensor) for name, tensor in tensors.items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, temporary, metadata={"format": _FORMAT, **digests})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_mask(path: Path) -> tuple[Tensor, Tensor | None]:
    """Read a record that `save_mask` wrote.

    Args:
        path: File to read.

    Returns:
        ``evicted_at`` int32 ``[*batch, T, L, H]`` and ``token_ids`` int32 ``[*batch, T]`` or ``None``.

    Raises:
        FileNotFoundError: if there is no such file.
        ShadowMaskFileError: if it is damaged, foreign, or not a possible record.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no shadow mask file at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata, names = file.metadata() or {}, list(file.keys())
            # Cloned, or else the tensors would follow later changes of the file.
            tensors = {name: file.get_tensor(name).clone() for name in names if name in (_NAME, _IDS)}
    except (SafetensorError, OSError) as error:
        raise ShadowMaskFileError(f"{path} is damaged or not a shadow mask file: {error}") from error
    if metadata.get("format") != _FORMAT or _NAME not in tensors:
        raise ShadowMaskFileError(
            f"{path} is a safetensors file, but not a shadow mask: format {metadata.get('format')!r}, tensors {names}; "
            f"expected format {_FORMAT!r}, as ShadowMask.save writes it."
        )
    if any(_digest(tensor) != metadata.get(name) for name, tensor in tensors.items()):
        raise ShadowMaskFileError(f"{path} is damaged: its content does not match its checksum. Record the mask again.")
    try:
        check_record(tensors[_NAME])
    except ValueError as error:
        raise ShadowMaskFileError(f"{path}: {error}") from error
    return tensors[_NAME], tensors.get(_IDS)
