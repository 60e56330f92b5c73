"""Launch parameters are made to fit shared memory, with as little change as that takes."""

from __future__ import annotations

import itertools

import pytest

from graphfuse.tuning.moe_shared_memory import Limits, fit, shared_memory_bytes
from graphfuse.tuning.moe_tiles import MoeShape, Tile, Tiles
from tests.tuning.moe import SMALL_MEMORY, both

FLOATS, FP8 = Limits(SMALL_MEMORY), Limits(SMALL_MEMORY, 1, 1)


def fitted(tile: tuple[int, ...], limits: Limits = FLOATS) -> tuple[int, int, int, int]:
    """(block_size_m, n, k, num_stages) of down."""
    result = fit(both(*tile), limits).down
    return result.block_size_m, result.block_size_n, result.block_size_k, result.num_stages


def test_what_fits_stays_as_it_is():
    tiles = both(64, 64, 64, 16, 8, 4, swap_ab=True)  # 65,536 bytes
    assert fit(tiles, FLOATS) is not tiles and fit(tiles, FLOATS) == tiles
    assert fit(both(256, 512, 1024, 1, 8, 10), Limits(None)) == both(256, 512, 1024, 1, 8, 10)


def test_stages_go_first_then_inputs_then_columns():
    assert fitted((64, 128, 64, 16, 8, 6)) == (64, 128, 64, 4)  # the 147,456 bytes that crash the peers: 98,304
    assert fitted((128, 128, 128, 16, 8, 4)) == (128, 128, 64, 2)
    assert fitted((256, 512, 1024, 1, 8, 10)) == (256, 512, 32, 2)
    assert fitted((256, 512, 16, 1, 8, 4), Limits(24_000)) == (256, 64, 16, 2)
    assert fitted((256, 64, 16, 1, 8, 4), Limits(10_000)) == (256, 16, 16, 1)


def test_what_fits_to_the_byte_fits():
    tile = (64, 64, 64, 1, 4, 2)
    assert fitted(tile, Limits(2 * 128 * 64 * 2)) == (64, 64, 64, 2)
    assert fitted(tile, Limits(2 * 128 * 64 * 2 - 1)) == (64, 64, 32, 2)


def test_eight_bit_operands_take_half():
    assert fitted((128, 128, 128, 16, 8, 3)) == (128, 128, 64, 3 - 1)
    assert fitted((128, 128, 128, 16, 8, 3), FP8) == (128, 128, 128, 3)


def test_only_what_does_not_fit_is_changed():
    small, large = Tile(64, 32, 64), Tile(64, 256, 128, num_stages=4)
    result = fit(Tiles(small, large), FLOATS)
    assert result.gate_up == small and result.down != large


def test_a_step_over_inputs_is_a_block_that_shares_a_scale():
    blocks = Limits(SMALL_MEMORY, 1, 1, (128, 128))
    assert fitted((64, 64, 256, 1, 4, 3), blocks) == fitted((64, 64, 32, 1, 4, 3), blocks) == (64, 64, 128, 3)
    assert fitted((256, 512, 128, 1, 8, 4), blocks) == (256, 128, 128, 2)
    assert fitted((64, 64, 128, 1, 4, 3), Limits(None, 1, 1, (128, 96))) == (64, 64, 32, 3)


def test_tensor_cores_keep_the_least_they_need():
    assert fitted((16, 16, 16)) == (16, 16, 16, 3)
    assert fitted((16, 16, 16), FP8) == (16, 16, 32, 3)
    assert fit(both(16, 16, 16), FLOATS).gate_up.block_size_n == 32  # 16 gates and 16 ups
    assert fitted((256, 512, 1024, 1, 8, 10), Limits(1)) == (256, 16, 16, 1)


@pytest.mark.parametrize("limits", [FLOATS, FP8, Limits(SMALL_MEMORY, 1, 1, (128, 128)), Limits(SMALL_MEMORY, 4, 4)])
def test_everything_a_file_may_hold_fits_99_kb(limits):
    powers = [1 << n for n in range(4, 11)]
    for m, n, k, stages in itertools.product(powers[:5], powers[:6], powers, range(1, 11)):
        result = fit(both(m, n, k, 1, 4, stages), limits)
        for tile in (result.gate_up, result.down):
            assert shared_memory_bytes(tile, limits) <= SMALL_MEMORY
            assert tile.block_size_m == m and min(tile.block_size_n, tile.block_size_k) >= 16
            assert tile.num_stages <= stages


def test_the_name_of_a_dtype_says_how_large_operands_are():
    def sizes(dtype, block_shape=None, **kwargs):
        limits = Limits.of(MoeShape(8, 256, 512, 2, dtype, block_shape), **kwargs)
        return limits.token_bytes, limits.weight_bytes

    assert sizes(None) == (2, 2) and sizes(None, float_bytes=4) == (4, 4)
    assert sizes("fp8_w8a8", (128, 128)) == sizes("fp8_w8a8") == sizes("int4_w4a8") == (1, 1)
    assert sizes("fp8_w8a8", rounds_tokens=True) == (2, 1)
    assert sizes("int8_w8a16") == sizes("int4_w4a16") == (2, 2)  # weights become floats in the product
