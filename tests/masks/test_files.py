"""Shadow masks on disk: what was saved comes back, and nothing else does."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import save_file

from smdlib import NEVER, ShadowMask
from smdlib.masks import ShadowMaskFileError
from smdlib.masks import files as files_module


def some_mask(*batch, tokens=5) -> ShadowMask:
    own = torch.arange(tokens)[:, None, None]
    evicted_at = torch.where(torch.rand(*batch, tokens, 2, 3) < 0.5, own + 1 + torch.randint(0, 9, (1,)), NEVER).int()
    return ShadowMask(evicted_at=evicted_at, batch_size=batch)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    mask, path = some_mask(2), tmp_path / "mask.safetensors"
    mask.save(path)
    return mask, path


def write_as_mask(path, tensor, **metadata):
    """A file with our format name and a checksum that holds."""
    data = {"format": files_module._FORMAT, "evicted_at": files_module._digest(tensor)} | metadata
    save_file({"evicted_at": tensor}, path, metadata=data)


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
@pytest.mark.parametrize("as_type", [str, lambda path: path])
def test_what_was_saved_comes_back(tmp_path, batch, as_type):
    mask, path = some_mask(*batch), tmp_path / "mask.safetensors"
    mask.save(as_type(path))
    loaded = ShadowMask.load(as_type(path))
    assert type(loaded) is ShadowMask and loaded.batch_size == batch
    assert torch.equal(loaded.evicted_at, mask.evicted_at) and loaded.evicted_at.dtype is torch.int32
    assert [file.name for file in tmp_path.iterdir()] == ["mask.safetensors"]


def test_a_view_of_a_mask_is_saved_alone(tmp_path):
    mask = some_mask(4)
    mask[1:2].save(tmp_path / "one")
    assert torch.equal(ShadowMask.load(tmp_path / "one").evicted_at, mask.evicted_at[1:2])
    assert (tmp_path / "one").stat().st_size < 500


def test_saving_replaces_the_file(saved):
    _, path = saved
    other = some_mask(3, tokens=9)
    other.save(path)
    assert torch.equal(ShadowMask.load(path).evicted_at, other.evicted_at)


def test_a_mask_in_a_relative_path(saved, monkeypatch):
    mask, path = saved
    monkeypatch.chdir(path.parent)
    mask.save("here")
    assert torch.equal(ShadowMask.load("here").evicted_at, mask.evicted_at)


def test_truncated_at_any_length(saved):
    _, path = saved
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ShadowMaskFileError, match="is damaged or not a shadow mask file"):
            ShadowMask.load(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ShadowMaskFileError, match="is damaged"):
        ShadowMask.load(path)


@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80, 0xFF])
def test_flipped_bits_at_any_offset(saved, flip):
    """Never a wrong record, never another kind of error. (A flip that JSON does not mind leaves the record right.)"""
    mask, path = saved
    whole, harmless = path.read_bytes(), 0
    for offset in range(len(whole)):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ flip]) + whole[offset + 1 :])
        try:
            loaded = ShadowMask.load(path)
        except ShadowMaskFileError as error:
            assert str(path) in str(error) and re.search("is damaged|not a shadow mask", str(error)), (offset, error)
        else:
            assert torch.equal(loaded.evicted_at, mask.evicted_at), offset
            harmless += 1
    assert harmless <= 16  # padding of the header


def test_flipped_bytes_of_the_content(saved):
    mask, path = saved
    whole = path.read_bytes()
    for offset in range(len(whole) - mask.nbytes, len(whole)):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x04]) + whole[offset + 1 :])
        with pytest.raises(ShadowMaskFileError, match="its content does not match its checksum"):
            ShadowMask.load(path)


def test_another_safetensors_file(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ShadowMaskFileError, match=r"not a shadow mask: format None, tensors \['weight'\]; expected format"
    ):
        ShadowMask.load(tmp_path / "model.safetensors")


def test_another_version_of_the_format(tmp_path):
    write_as_mask(tmp_path / "later", some_mask(1).evicted_at, format="smdlib.shadow_mask/2")
    with pytest.raises(
        ShadowMaskFileError, match=r"format 'smdlib\.shadow_mask/2'.*expected format 'smdlib\.shadow_mask/1'"
    ):
        ShadowMask.load(tmp_path / "later")


@pytest.mark.parametrize(
    "content", [b"", b"hello, this is no mask\n" * 20, b"\0" * 100, b"\xff" * 9, json.dumps({}).encode()]
)
def test_a_file_of_another_kind(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ShadowMaskFileError, match=r"notes\.txt is damaged or not a shadow mask file"):
        ShadowMask.load(path)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no shadow mask file at .*absent"):
        ShadowMask.load(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="no shadow mask file at"):
        ShadowMask.load(tmp_path)  # a folder


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(1, 4, 1, 1, dtype=torch.int32), "not a record of evictions: a key is gone before its own query"),
        (torch.full((1, 4, 1, 1), NEVER), "must be int32"),
        (torch.full((4, 1), NEVER, dtype=torch.int32), "must be int32 .* of shape"),
        (torch.ones(1, 4, 1, 1, dtype=torch.float32), "must be int32"),
    ],
)
def test_an_impossible_record(tmp_path, tensor, message):
    write_as_mask(tmp_path / "mask", tensor)
    with pytest.raises(ShadowMaskFileError, match=message):
        ShadowMask.load(tmp_path / "mask")


def test_a_record_of_a_dtype_that_numpy_lacks(tmp_path):
    tensor = torch.ones(1, 4, 1, 1, dtype=torch.bfloat16)
    save_file({"evicted_at": tensor}, tmp_path / "mask", metadata={"format": files_module._FORMAT, "evicted_at": "0"})
    with pytest.raises(ShadowMaskFileError, match="does not match its checksum"):
        ShadowMask.load(tmp_path / "mask")


@pytest.mark.parametrize("failing", ["save_file", "replace"])
def test_an_interrupted_save_keeps_the_old_file(saved, monkeypatch, failing):
    mask, path = saved

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(files_module if failing == "save_file" else os, failing, interrupt)
    with pytest.raises(KeyboardInterrupt):
        some_mask(7).save(path)
    monkeypatch.undo()
    assert torch.equal(ShadowMask.load(path).evicted_at, mask.evicted_at)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_folder_must_exist(tmp_path):
    with pytest.raises(FileNotFoundError):
        some_mask(1).save(tmp_path / "absent" / "mask")


def test_an_impossible_record_is_not_saved_either(tmp_path):
    impossible = ShadowMask(evicted_at=torch.full((4, 1, 1), NEVER), batch_size=[])  # int64
    with pytest.raises(ValueError, match="must be int32"):
        impossible.save(tmp_path / "mask")
    assert not list(tmp_path.iterdir())


def test_token_ids_come_back_and_are_checked(tmp_path):
    mask, path = some_mask(2), tmp_path / "mask"
    mask.token_ids = torch.randint(0, 9, (2, 5), dtype=torch.int32)
    mask.save(path)
    loaded = ShadowMask.load(path)
    assert torch.equal(loaded.token_ids, mask.token_ids)
    content = path.read_bytes()
    at = content.rindex(mask.token_ids.numpy().tobytes())
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(ShadowMaskFileError, match="does not match its checksum"):
        ShadowMask.load(path)
    assert torch.equal(loaded.token_ids, mask.token_ids)  # not a view of the file
