"""Fill a model's parameters from safetensors files, reading only what this rank needs.

safetensors maps a file into memory, so what is read stays resident until the mapping goes. Boxes are copied in pieces
of bounded size and the mapping is renewed after as many bytes were touched: a rank's peak memory is its shard plus
about `BUFFER_BYTES`, whatever the size of the files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from graphfuse.errors import CheckpointError, brief
from graphfuse.weights import mxfp4
from graphfuse.weights.files import DTYPES, FP8, FP8_SCALE, ITEMSIZES, StoredTensor
from graphfuse.weights.plan import Copy, TensorPlan

BUFFER_BYTES = 64 << 20


def fill(
    model: nn.Module,
    plans: Iterable[TensorPlan],
    stored: dict[str, StoredTensor],
    ignored: Callable[[str], bool],
    advance: Callable[[int], None],
) -> None:
    """Copy every planned box into its parameter; `advance` hears of each finished tensor.

    Raises:
        CheckpointError: a planned tensor is missing or has another shape or an unknown dtype, the checkpoint has a
            tensor that nobody takes, a parameter of the model gets nothing, or a file cannot be read.
    """
    plans = list(plans)
    check(model, plans, stored, ignored)
    by_file: dict[Path, list[TensorPlan]] = {}
    for plan in plans:
        by_file.setdefault(stored[plan.name].file, []).append(plan)
    for file, of_file in sorted(by_file.items()):
        reader = Reader(file)
        for plan in of_file:
            if plan.scales is not None:
                _decode(reader, plan, stored)
            else:
                for copy in plan.copies:
                    reader.copy(stored[plan.name], copy)
            advance(1)
        reader.close()


def _decode(blocks: Reader, plan: TensorPlan, stored: dict[str, StoredTensor]) -> None:
    """The boxes of an MXFP4 tensor, whose scales may be in another file than its blocks."""
    assert plan.scales is not None
    scales = blocks if stored[plan.scales].file == blocks.file else Reader(stored[plan.scales].file)
    for copy in plan.copies:
        for box, keep, into in mxfp4.pieces(plan.shape, copy, BUFFER_BYTES // 4):
            packed, powers = blocks.read(stored[plan.name], box), scales.read(stored[plan.scales], box)
            # Packed bytes are an eighth of what they decode to: they are what goes to a GPU.
            into.copy_(mxfp4.decode(packed.to(into.device), powers.to(into.device))[..., keep])
    if scales is not blocks:
        scales.close()


def check(
    model: nn.Module, plans: list[TensorPlan], stored: dict[str, StoredTensor], ignored: Callable[[str], bool]
) -> None:
    """Plans, checkpoint and parameters match exactly, with nothing left over on any side."""
    where = next(iter(stored.values())).file.parent if stored else Path()
    needed = [part for plan in plans for part in _stored_parts(plan)]
    for name, shapes, dtypes in needed:
        tensor = stored.get(name)
        if tensor is None:
            raise CheckpointError(
                f"The checkpoint {where} has no tensor {name!r}, which the model needs. Check that it is complete "
                "and belongs to its config.json."
            )
        if tensor.shape not in shapes:
            raise CheckpointError(
                f"Tensor {name!r} in {tensor.file} has shape {list(tensor.shape)}, but the config asks for "
                f"{list(shapes[0])}. Check that the weights belong to config.json."
            )
        if tensor.dtype not in dtypes:
            raise CheckpointError(
                f"Tensor {name!r} in {tensor.file} has dtype {tensor.dtype}; readable are {', '.join(dtypes)}. "
                "Check the quantization_config of its config.json, or use an unquantised checkpoint."
            )
    unlisted = sorted(name for name, tensor in stored.items() if not tensor.listed and not ignored(name))
    if unlisted:
        raise CheckpointError(
            f"{stored[unlisted[0]].file} has the tensor {unlisted[0]!r}, which the checkpoint's index does not list. "
            "Check that both are of one checkpoint, or download them again."
        )
    taken = {name for name, _, _ in needed}
    extra = sorted(name for name in stored if name not in taken and not ignored(name))
    if extra:
        raise CheckpointError(
            f"{stored[extra[0]].file} has the tensor {extra[0]!r}, which the model does not know"
            + (f" (and {len(extra) - 1} more)" if len(extra) > 1 else "")
            + ". Check that the weights belong to config.json."
        )
    filled = {id(plan.target) for plan in plans}
    empty = sorted(name for name, p in model.named_parameters() if id(p) not in filled)
    if empty:
        raise CheckpointError(f"No tensor of the checkpoint fills {empty[0]!r}. The model's name map is incomplete.")


def _stored_parts(plan: TensorPlan) -> list[tuple[str, tuple[tuple[int, ...], ...], tuple[str, ...]]]:
    """The stored tensors that a plan reads: name, the shapes and the dtypes it may have."""
    if plan.scales is not None:
        blocks, scales = mxfp4.stored_shapes(plan.shape)
        return [(plan.name, (blocks,), (mxfp4.STORED,)), (plan.scales, (scales,), (mxfp4.STORED,))]
    if plan.target.dtype == torch.float8_e4m3fn:
        return [(plan.name, (plan.shape,), (FP8,))]
    return [(plan.name, (plan.shape, *plan.also), (*DTYPES, FP8_SCALE) if plan.is_scale else tuple(DTYPES))]


class Reader:
    """One file, mapped; the mapping is renewed when enough of it was touched."""

    def __init__(self, file: Path) -> None:
        self.file, self.touched = file, 0
        self.handle = self._open()

    def copy(self, stored: StoredTensor, copy: Copy) -> None:
        if copy.into.numel() == 0:
            return
        if copy.change is not None:
            copy.into.copy_(copy.change(self.read(stored, tuple(slice(0, n) for n in stored.shape))))
        else:
            for source, into in pieces(stored, copy):
                into.copy_(self.read(stored, source))

    def read(self, stored: StoredTensor, box: tuple[slice, ...]) -> Tensor:
        """A box of a tensor. Rows that are read in part count whole, since their pages may all be touched."""
        rows = math.prod(s.stop - s.start for s in box[:1])
        touched = rows * row_bytes(stored)
        try:
            if self.touched + touched > BUFFER_BYTES and self.touched:
                self.close()
                self.handle, self.touched = self._open(), 0
            self.touched += touched
            return self.handle.get_slice(stored.name)[box]
        except (SafetensorError, RuntimeError, OSError) as error:
            raise CheckpointError(
                f"Tensor {stored.name!r} in {self.file} cannot be read ({brief(error)}). Download the file again."
            ) from error

    def close(self) -> None:
        self.handle.__exit__(None, None, None)
        self.handle = None

    def _open(self):
        try:
            return safe_open(self.file, framework="pt", device="cpu").__enter__()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.file} cannot be read ({brief(error)}). Download it again.") from error


def pieces(stored: StoredTensor, copy: Copy) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """The copy, cut along its first dimension into (source, into), a buffer each at most; a single row is never cut."""
    if not stored.shape:
        yield copy.source, copy.into
        return
    step = max(1, BUFFER_BYTES // max(1, row_bytes(stored)))
    first = copy.source[0].start or 0
    for start in range(0, copy.into.shape[0], step):
        into = copy.into[start : start + step]
        rows = slice(first + start, first + start + into.shape[0])
        yield (rows, *copy.source[1:]), into


def row_bytes(stored: StoredTensor) -> int:
    return math.prod(stored.shape[1:]) * ITEMSIZES[stored.dtype]


def default_dtype(config_dtype: torch.dtype | None, stored: dict[str, StoredTensor]) -> torch.dtype:
    """The config's, else the one most of the checkpoint's tensors are stored in."""
    if config_dtype is not None:
        return config_dtype
    kinds = [DTYPES[t.dtype] for t in stored.values() if t.dtype in DTYPES]
    return max(set(kinds), key=kinds.count) if kinds else torch.float32
