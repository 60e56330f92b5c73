"""The search finds a planted optimum with a bounded number of trials, whatever does not run."""

import math

import pytest

from graphfuse.errors import BackendUnavailableError
from graphfuse.tuning.moe_cost import Device, row_blocks, seconds, touched_experts
from graphfuse.tuning.moe_search import EFFORTS, search
from graphfuse.tuning.moe_shared_memory import Limits, shared_memory_bytes
from graphfuse.tuning.moe_space import BLOCKS_K, BLOCKS_M, BLOCKS_N, GROUPS, STAGES, neighbours, ranked, ranked_blocks_m
from graphfuse.tuning.moe_space import tiles as all_tiles
from graphfuse.tuning.moe_tiles import MoeShape, Tile, Tiles
from tests.tuning.fake_meter import H200, SHAPE, planted, surface

START = Tiles(Tile(64, 64, 64), Tile(64, 64, 64))
BLOCK_FP8 = MoeShape(256, 256, 7168, 8, "fp8_w8a8", (128, 128))


class Counted:
    """Times from the surface, and how often they were asked for."""

    def __init__(self, num_tokens, broken=lambda tiles: False):
        self.num_tokens, self.broken, self.asked = num_tokens, broken, []

    def __call__(self, candidates, rounds):
        self.asked += [(tiles, rounds) for tiles in candidates]
        return [math.inf if self.broken(tiles) else surface(self.num_tokens, tiles) for tiles in candidates]


def find(num_tokens, effort, broken=lambda tiles: False, **others):
    measure = Counted(num_tokens, broken)
    best = search(SHAPE, num_tokens, measure, device=H200, effort=EFFORTS[effort], others=(START,), **others)
    return best, measure


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 256, 512, 1024, 4096])
def test_a_full_search_finds_the_planted_optimum(num_tokens):
    best, measure = find(num_tokens, "full")
    assert best.us <= 1.02 * surface(num_tokens, planted(num_tokens))
    assert len(measure.asked) <= 300
    assert len({tiles for tiles, _ in measure.asked}) <= 180


@pytest.mark.parametrize("num_tokens", [1, 64, 512, 4096])
def test_a_quick_search_comes_close_with_far_fewer_trials(num_tokens):
    best, measure = find(num_tokens, "quick")
    assert best.us <= 1.15 * surface(num_tokens, planted(num_tokens))
    assert len(measure.asked) <= 90
    assert len({tiles for tiles, _ in measure.asked}) <= 50


def test_the_neighbours_tiles_lead_a_quick_search_to_the_optimum():
    best, _ = find(128, "quick", neighbour=planted(64))
    assert best.tiles == planted(128)


def test_a_tie_goes_to_the_neighbour_and_more_than_a_tie_does_not():
    near = planted(128)
    near = Tiles(near.gate_up, Tile(16, 64, 128, 32, 4, 4))  # 0.4 % slower
    assert surface(128, near) < 1.01 * surface(128, planted(128))
    assert find(128, "full", neighbour=near)[0].tiles == near
    far = Tiles(near.gate_up, Tile(16, 64, 128, 16, 4, 3))  # 1.6 % slower
    assert find(128, "full", neighbour=far)[0].tiles == planted(128)


def test_candidates_that_do_not_run_are_passed_over():
    def broken(tiles):
        return tiles.gate_up.swap_ab or tiles.down.num_stages == 4 or tiles == START

    best, _ = find(64, "full", broken)
    assert not broken(best.tiles)
    least = min(surface(64, Tiles(g, d)) for g, d in [
        (Tile(16, 128, 128, 32, 4, 3), Tile(16, 64, 128, 16, 4, 3)),
    ])  # fmt: skip
    assert best.us <= 1.02 * least


def test_nothing_that_runs_is_an_error():
    with pytest.raises(BackendUnavailableError, match="None of the tiles runs for 64 tokens"):
        find(64, "quick", lambda tiles: True)


def test_the_same_times_lead_to_the_same_trials():
    assert find(64, "full")[1].asked == find(64, "full")[1].asked


def test_every_candidate_is_in_the_space_and_fits_the_device():
    small = Device(shared_memory=101_376)
    _, measure = find(2048, "full")
    for shape, device, candidates in (
        (SHAPE, H200, [t for tiles, _ in measure.asked if tiles != START for t in (tiles.gate_up, tiles.down)]),
        (SHAPE, small, [t for m in BLOCKS_M for t in all_tiles(SHAPE, "gate_up", m, small)]),
        (BLOCK_FP8, H200, [t for m in BLOCKS_M for t in all_tiles(BLOCK_FP8, "down", m, H200)]),
    ):
        assert candidates
        for tile in candidates:
            assert tile.block_size_m in BLOCKS_M and tile.block_size_n in BLOCKS_N and tile.block_size_k in BLOCKS_K
            assert tile.group_size_m in GROUPS and tile.num_stages in STAGES and tile.num_warps in (4, 8)
            assert shared_memory_bytes(tile, Limits.of(shape)) <= device.shared_memory
            assert tile.block_size_m * tile.block_size_n / (32 * tile.num_warps) <= 128
            assert not (tile.swap_ab and (tile.block_size_m >= 64 or tile.block_size_n < 64))
            assert shape is not BLOCK_FP8 or tile.block_size_k == 128


def test_neighbours_differ_in_one_parameter():
    tile = Tile(64, 128, 64, 16, 4, 3)
    for blocks in (False, True):
        near = neighbours(tile, SHAPE, "gate_up", H200, blocks=blocks)
        assert tile not in near and len(set(near)) == len(near)
        for other in near:
            assert sum(a != b for a, b in zip(vars(tile).values(), vars(other).values(), strict=True)) == 1
            assert blocks or (other.block_size_n, other.block_size_k) == (128, 64)


def test_the_cost_model_knows_what_everybody_knows():
    # Rows that are not there cost as much as others: few tokens take the smallest block, many a large one.
    assert ranked_blocks_m(SHAPE, 8, H200)[0] == 16
    assert ranked_blocks_m(SHAPE, 8192, H200)[0] in (128, 256)
    # Weights of the touched experts once are the least that few tokens take.
    weights = touched_experts(SHAPE, 32) * 3 * 384 * 2048 * 2
    best = sum(seconds(SHAPE, 32, n, ranked(SHAPE, 32, n, 16, H200)[0], H200) for n in ("gate_up", "down"))
    assert weights / 4.3e12 < best < 1.5 * weights / 4.3e12
    # Arithmetic is the least that many take.
    flops = 8192 * 8 * 3 * 384 * 2048 * 2
    best = sum(seconds(SHAPE, 8192, n, ranked(SHAPE, 8192, n, 128, H200)[0], H200) for n in ("gate_up", "down"))
    assert flops / 790e12 < best < 2.5 * flops / 790e12


@pytest.mark.parametrize(("mean", "block", "expected"), [(0.01, 16, 0.00995), (1.0, 16, 0.632), (512.0, 16, 32.5)])
def test_blocks_of_rows_are_counted_with_their_spread(mean, block, expected):
    assert row_blocks(mean, block) == pytest.approx(expected, rel=0.01)
