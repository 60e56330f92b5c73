"""Linear layers of few rows, run by `test_interpreted.py` in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graphfuse.errors import ArgumentError
from graphfuse.kernels.skinny_product import SkinnyTile, in_registers, skinny_product, tile_for
from tests.kernels.interpreter_as_gpus import arithmetic_of_gpus

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def as_on_gpus():
    with arithmetic_of_gpus():
        yield


def inputs(rows, outputs, num_inputs, dtype=BF16):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 2, num_inputs, generator=generator).to(dtype)[:, 1]  # rows apart
    weight = torch.randn(outputs, num_inputs, generator=generator).to(dtype) / num_inputs**0.5
    return x, weight, torch.randn(outputs, generator=generator).to(dtype)


def check(got, x, weight, bias):
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype == x.dtype and got.is_contiguous()
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=2**-7 if x.dtype == BF16 else 2**-9)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 17, 32])
@pytest.mark.parametrize(("outputs", "num_inputs"), [(48, 64), (37, 96), (256, 272)])
def test_few_rows(rows, outputs, num_inputs, with_bias):
    x, weight, bias = inputs(rows, outputs, num_inputs)
    bias = bias if with_bias else None
    check(skinny_product(x, weight, bias), x, weight, bias)


def test_half_precision_and_columns_apart():
    x, weight, bias = inputs(5, 40, 128, FP16)
    check(skinny_product(x.t().contiguous().t(), weight, bias), x, weight, bias)


def test_no_rows_and_what_is_beside_them_is_not_read():
    x, weight, _ = inputs(3, 40, 128)
    assert skinny_product(x[:0], weight).shape == (0, 40)
    wide = torch.full((5, 128), float("nan"), dtype=BF16)
    wide[1:4] = x
    check(skinny_product(wide[1:4], weight), x, weight, None)


@pytest.mark.parametrize("tile", [SkinnyTile(16, 32, 1, 2), SkinnyTile(64, 64, 4, 3), SkinnyTile(16, 1024, 4, 1)])
def test_any_tile_gives_the_same(tile):
    x, weight, bias = inputs(7, 100, 160)
    check(skinny_product(x, weight, bias, tile), x, weight, bias)


def test_tiles_serve_the_shapes_of_models():
    for outputs in (1, 64, 128, 2048, 2560, 12288, 76000):
        for num_inputs in (64, 768, 2048, 2880, 6144, 7168, 18432):
            for rows in (1, 2, 3, 16):
                tile = tile_for(rows, outputs, num_inputs)
                if in_registers(rows, num_inputs):
                    assert tile.block_n * tile.block_k <= 16384 and tile.block_k >= num_inputs
                else:
                    assert tile.block_n >= 16 and tile.num_stages * (tile.block_n + 32) * tile.block_k * 2 < 227 * 1024


@pytest.mark.parametrize("rows", [1, 8])
def test_a_bias_of_any_strides(rows):
    x, weight, _ = inputs(rows, 48, 64)
    for bias in (torch.randn(96).to(BF16)[::2], torch.randn(1).to(BF16).expand(48), weight[:, 0]):
        check(skinny_product(x, weight, bias), x, weight, bias)


def test_more_rows_are_refused():
    x, weight, _ = inputs(33, 48, 64)
    with pytest.raises(ArgumentError, match="at most 32"):
        skinny_product(x, weight)
