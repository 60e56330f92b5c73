"""Triton's interpreter with the arithmetic of GPUs: what it does otherwise is put right here, for the tests.

It truncates float32 to bfloat16 and to FP8, loses subnormal numbers, knows no NaN of FP8, and multiplies the bit
patterns of bfloat16 matrices. GPUs round to nearest even, like PyTorch; what is too large for FP8 becomes its largest.

Import it only where TRITON_INTERPRET=1 was set before Triton was imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_INTEGERS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_convert_float = interpreter._convert_float
_patch_lang_tensor = interpreter._patch_lang_tensor


@contextlib.contextmanager
def arithmetic_of_gpus() -> Iterator[None]:
    """While it is entered, conversions and products of kernels come out as on a GPU."""
    builder = interpreter.InterpreterBuilder
    with (
        mock.patch.object(interpreter, "_convert_float", _convert),
        mock.patch.object(builder, "create_dot", _dot),
        mock.patch.object(builder, "create_splat", _splat),
        mock.patch.object(interpreter, "_patch_lang_tensor", _patch_tensor),
    ):
        yield


@contextlib.contextmanager
def no_reads_of(forbidden: torch.Tensor) -> Iterator[None]:
    """While it is entered, a kernel that reads the memory of a contiguous tensor fails, whatever it does with it."""
    load = interpreter.InterpreterBuilder.create_masked_load
    first, end = forbidden.data_ptr(), forbidden.data_ptr() + forbidden.nbytes

    def checked(builder, pointers, mask, *args):
        read = np.asarray(pointers.data)[np.asarray(mask.data, dtype=bool)]
        assert not ((read >= first) & (read < end)).any(), "a kernel reads memory that is not its own"
        return load(builder, pointers, mask, *args)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_masked_load", checked):
        yield


def _convert(data, source, target, rounding_mode):
    if source not in _TORCH or target not in _TORCH:
        return _convert_float(data, source, target, rounding_mode)
    to = _TORCH[target]
    values = _as_torch(data, source).float()
    if to.itemsize == 1:
        values = values.clamp(-torch.finfo(to).max, torch.finfo(to).max)
    return values.to(to).view(_INTEGERS[to.itemsize]).numpy()


def _dot(builder, a, b, accumulator, input_precision, max_num_imprecise_acc):
    left, right = (_operand(t.data, t.dtype.scalar) for t in (a, b))
    product = np.matmul(left, right, dtype=accumulator.data.dtype)
    return interpreter.TensorHandle(product + accumulator.data, accumulator.dtype.scalar)


def _splat(builder, block_type, scalar):
    """The interpreter makes integers of a scalar comparison, which can no longer be a mask."""
    data = np.full(block_type.shape, scalar.data, dtype=np.asarray(scalar.data).dtype)
    return interpreter.TensorHandle(data, scalar.dtype.scalar)


def _patch_tensor(tensor, scope):
    """Triton 3.6 asks NumPy to make a number of an array of one, which NumPy 2.4 refuses."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _operand(data, dtype):
    return _as_torch(data, dtype).float().numpy() if dtype in _TORCH else data


def _as_torch(data, dtype):
    """The interpreter's numbers, some of which it holds as bit patterns, as a tensor."""
    bits = np.array(data).view(f"u{_TORCH[dtype].itemsize}")
    return torch.from_numpy(bits).view(_TORCH[dtype])
