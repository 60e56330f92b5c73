"""Finding a checkpoint's safetensors files and reading their headers.

A header is read here rather than through safetensors' own reader, so that damage is reported with the file and the
tensor it hits. The format: 8 bytes little-endian header size, a JSON object of that size, then the data.
Source: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from graphfuse.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


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


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, checked to lie within it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{file} is truncated or not a safetensors file. Download it again.")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors = {name: StoredTensor(name, file, tuple(t["shape"]), t["dtype"]) for name, t in header.items()}
            ends = {name: int(t["data_offsets"][1]) for name, t in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(f"The header of {file} is damaged ({error}). Download it again.") from error
    cut = [name for name, end in ends.items() if 8 + length + end > size]
    if cut:
        raise CheckpointError(f"{file} is truncated: tensor {cut[0]!r} ends behind the file. Download it again.")
    return tensors


def _from_index(index: Path) -> dict[str, StoredTensor]:
    """The tensors of all files of the index, and whether it lists them. It never leads to a file elsewhere."""
    try:
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        names_of = {file: {name for name, f in files.items() if f == file} for file in sorted(set(files.values()))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged ({error}). Download it again.") from error
    tensors: dict[str, StoredTensor] = {}
    for file, names in names_of.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\\" in file:
            raise CheckpointError(
                f"{index} names the file {file!r}, which is no name of a file beside it. Download it again, from a "
                "source that you trust."
            )
        path = index.parent / file
        if not path.is_file():
            raise CheckpointError(f"{index} names the file {file!r}, which is not there. Download it again.")
        header = read_header(path)
        lacking = sorted(names - header.keys())
        if lacking:
            raise CheckpointError(f"{index} says that {lacking[0]!r} is in {file}, but it is not. Download them again.")
        twice = sorted(name for name in header if files.get(name, file) != file)
        if twice:
            raise CheckpointError(
                f"{index} says that {twice[0]!r} is in {files[twice[0]]}, but {file} holds it too. Download both again."
            )
        tensors |= {name: replace(tensor, listed=name in names) for name, tensor in header.items()}
    return tensors
