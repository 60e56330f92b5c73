"""Finding a checkpoint's safetensors files and reading their headers.

A header is read here rather than through safetensors' own reader, so that damage is reported with the file and the
tensor it hits. The format: 8 bytes little-endian header size, a JSON object of that size, then the data.
Source: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch

from graphfuse.errors import CheckpointError, brief
from graphfuse.jsonfile import parse_json, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TEMPLATES = "additional_chat_templates"
MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
FP8, FP8_SCALE = "F8_E4M3", "F8_E8M0"
"""Weights in FP8, read into parameters of that dtype only, and powers of two, which are scales."""
ITEMSIZES = {**{name: dtype.itemsize for name, dtype in DTYPES.items()}, "U8": 1, FP8: 1, FP8_SCALE: 1}
"""Bytes an element of what can be read: also of packed weights."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what its header says of it."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    listed: bool = True
    """False where the checkpoint has an index and the tensor is not in it, which is right for ignored ones only."""


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint folder by name.

    Raises:
        CheckpointError: no safetensors files, only pickled ones, a file of the index is missing, or a header is
            damaged.
    """
    index = folder / INDEX
    if index.is_file():
        return _from_index(index)
    single = folder / SINGLE
    if single.is_file():
        return read_header(single)
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{folder} holds only pickled weights ({', '.join(pickled[:3])}), which can run code when opened. Convert "
            "them to safetensors, for example with transformers' save_pretrained."
        )
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}. Pass the folder of a complete checkpoint.")


def check_links(folder: Path) -> None:
    """Refuses symbolic links out of the folder, but for those into the store of the hub's cache.

    A link in a checkpoint that was unpacked or cloned leads where its author wanted. The folder itself may be one.

    Raises:
        CheckpointError: a file, or a file of its folder of chat templates, is such a link.
    """
    try:
        inside = folder.resolve(strict=True)
        for path in (*folder.iterdir(), *(folder / TEMPLATES).glob("*")):
            if not path.is_symlink():
                continue
            target = path.resolve()
            stored = target.parent.name == "blobs" and target.parent.parent.name.startswith("models--")
            if not target.is_relative_to(inside) and not stored:
                raise CheckpointError(
                    f"{path} is a link to {target}, which is outside of the folder. Put the file itself there, or a "
                    "hard link to it (cp -rlL does so for a whole folder)."
                )
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise CheckpointError(f"{folder} cannot be read ({brief(error)}). Check it and its links.") from error


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, checked to lie within it and not in each other."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{file} is truncated or not a safetensors file. Download it again.")
            content = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({brief(error)}). Check its permissions and the disk.") from error
    try:
        header = parse_json(content)
        if not isinstance(header, dict):
            raise ValueError("it is no object")
        header.pop("__metadata__", None)
        entries = {name: _entry(name, entry, file) for name, entry in header.items()}
    except ValueError as error:
        raise CheckpointError(f"The header of {file} is damaged ({error}). Download it again.") from error
    last, end_of_last = "", 0
    for tensor, begin, end in sorted(entries.values(), key=lambda entry: entry[1:]):
        if 8 + length + end > size:
            raise CheckpointError(
                f"{file} is truncated: tensor {brief(tensor.name)} ends behind the file. Download it again."
            )
        if begin < end_of_last:
            raise CheckpointError(
                f"The header of {file} is damaged ({brief(tensor.name)} overlaps {brief(last)}). Download it again."
            )
        last, end_of_last = tensor.name, end
    return {name: tensor for name, (tensor, _, _) in entries.items()}


def _entry(name: str, entry: Any, file: Path) -> tuple[StoredTensor, int, int]:
    """A tensor, and where its bytes begin and end. Raises `ValueError`."""
    if not isinstance(entry, dict):
        raise ValueError(f"{brief(name)} is {brief(entry)}, which is no object")
    shape, dtype, offsets = entry.get("shape"), entry.get("dtype"), entry.get("data_offsets")
    if not _are_sizes(shape):
        raise ValueError(f"{brief(name)} has shape {brief(shape)}")
    if not isinstance(dtype, str):
        raise ValueError(f"{brief(name)} has dtype {brief(dtype)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{brief(name)} has data_offsets {brief(offsets)}")
    begin, end = offsets
    if dtype in ITEMSIZES and end - begin != math.prod(shape) * ITEMSIZES[dtype]:
        raise ValueError(f"{brief(name)} of shape {brief(shape)} and dtype {dtype} has {end - begin} bytes")
    return StoredTensor(name, file, tuple(shape), dtype), begin, end


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _is_plain_name(file: str) -> bool:
    return file not in ("", ".", "..") and file.isprintable() and "/" not in file and "\\" not in file


def _shown(file: str) -> str:
    return file if len(file) <= 255 else brief(file)


def _from_index(index: Path) -> dict[str, StoredTensor]:
    """The tensors of all files of the index, and whether it lists them. It never leads to a file elsewhere."""
    try:
        content = read_json(index)
        files = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(files, dict) or not files:
            raise ValueError('it has no "weight_map" of tensors to files')
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{index} is damaged ({brief(error)}). Download it again.") from error
    names_of: dict[str, set[str]] = {}
    for name, file in files.items():
        if not isinstance(file, str) or not _is_plain_name(file):
            raise CheckpointError(
                f"{index} names the file {brief(file)}, which is no name of a file beside it. Download it again, from "
                "a source that you trust."
            )
        names_of.setdefault(file, set()).add(name)
    tensors: dict[str, StoredTensor] = {}
    for file, names in sorted(names_of.items()):
        path = index.parent / file
        if not os.path.isfile(path):  # unlike Path's, it takes names that are too long for a file
            raise CheckpointError(f"{index} names the file {brief(file)}, which is not there. Download it again.")
        header = read_header(path)
        lacking = sorted(names - header.keys())
        if lacking:
            raise CheckpointError(
                f"{index} says that {brief(lacking[0])} is in {file}, but it is not. Download them again."
            )
        twice = sorted(name for name in header if files.get(name, file) != file)
        if twice:
            raise CheckpointError(
                f"{index} says that {brief(twice[0])} is in {_shown(files[twice[0]])}, but {file} holds it too. "
                "Download both again."
            )
        tensors |= {name: replace(tensor, listed=name in names) for name, tensor in header.items()}
    return tensors
