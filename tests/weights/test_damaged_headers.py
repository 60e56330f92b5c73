"""safetensors headers and indices that lie about what the files hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphfuse.errors import CheckpointError
from graphfuse.weights.files import find_tensors, read_header
from tests.weights.conftest import shard

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}


def write(folder: Path, header, size: int = 32, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(size))
    return file


def test_a_sound_header(tmp_path):
    empty = {**A, "shape": [0, 9], "data_offsets": [32, 32]}
    tensors = read_header(write(tmp_path, {"__metadata__": {"format": "pt"}, "a": A, "b": B, "empty": empty}))
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {
        "a": ((2, 3), "F32"),
        "b": ((4,), "BF16"),
        "empty": ((0, 9), "F32"),
    }


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"[]", "it is no object"),
        (b"[" * 100_000, "nested more than 64 levels deep"),
        (b'{"a": {}, "a": {}}', "the key 'a' stands twice"),
        (b'{"a": 1e999}', "'a' is inf, which is no object"),
        (b'\xff{"a": 1}', "can't decode"),
        ({"a": [A]}, "which is no object"),
        ({"a": {**A, "shape": None}}, "'a' has shape None"),
        ({"a": {**A, "shape": "23"}}, "'a' has shape '23'"),
        ({"a": {**A, "shape": [2, -3]}}, "'a' has shape [2, -3]"),
        ({"a": {**A, "shape": [2, 3.0]}}, "'a' has shape [2, 3.0]"),
        ({"a": {**A, "shape": [2, True, 3]}}, "'a' has shape [2, True, 3]"),
        ({"a": {**A, "shape": [2**63]}}, "'a' has shape [9223372036854775808]"),
        ({"a": {**A, "dtype": ["F32"]}}, "'a' has dtype ['F32']"),
        ({"a": {**A, "data_offsets": [0]}}, "'a' has data_offsets [0]"),
        ({"a": {**A, "data_offsets": ["0", "24"]}}, "'a' has data_offsets ['0', '24']"),
        ({"a": {**A, "data_offsets": [24, 0]}}, "'a' has data_offsets [24, 0]"),
        ({"a": {**A, "data_offsets": [-24, 0]}}, "'a' has data_offsets [-24, 0]"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e999]}}', "'a' has data_offsets [0, inf]"),
        ({"a": {**A, "data_offsets": [0, 20]}}, "'a' of shape [2, 3] and dtype F32 has 20 bytes"),
        ({"a": A, "b": {**B, "data_offsets": [20, 28]}}, "'b' overlaps 'a'"),
        ({"a": A, "b": A}, "'b' overlaps 'a'"),
    ],
    ids=str,
)
def test_a_header_that_cannot_be_is_named_with_its_tensor(tmp_path, header, problem):
    with pytest.raises(CheckpointError) as error:
        read_header(write(tmp_path, header))
    assert str(error.value).startswith(f"The header of {tmp_path / 'model.safetensors'} is damaged (")
    assert problem in str(error.value)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 100 << 20, 1000], ids=hex)
def test_a_header_longer_than_the_file_is_not_looked_for(tmp_path, length):
    with pytest.raises(CheckpointError, match="is truncated or not a safetensors file"):
        read_header(write(tmp_path, {"a": A}, length=length))


def test_a_tensor_behind_the_end_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="tensor 'b' ends behind the file"):
        read_header(write(tmp_path, {"a": A, "b": B}, size=31))


def test_folders_in_place_of_files(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds neither"):
        find_tensors(tmp_path)


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    file = write(tmp_path, {"a": A})

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be read \(.*Permission denied\)\. Check its permissions"):
        read_header(file)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {}}',
        b"[" * 9000,
        b'{"weight_map": {"a": "x"},',
    ],
    ids=str,
)
def test_a_damaged_index_is_an_error_of_the_index(copy_of, content):
    folder = copy_of("llama")
    (folder / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        find_tensors(folder)


@pytest.mark.parametrize(
    "name", [None, 5, ["a.safetensors"], "", "x\0", "\x1b[31m", "a\nb", "/a.safetensors"], ids=repr
)
def test_a_name_in_the_index_that_is_none(copy_of, name):
    folder = copy_of("llama")
    shard(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="which is no name of a file beside it") as error:
        find_tensors(folder)
    assert str(error.value).isprintable()


def test_a_name_in_the_index_that_no_file_can_have(copy_of):
    folder = copy_of("llama")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(CheckpointError, match=r"x…, which is not there"):
        find_tensors(folder)
