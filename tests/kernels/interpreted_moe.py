"""The cases of the MoE kernels, run by `test_moe_kernels.py` in a process with TRITON_INTERPRET=1.

The measure is the distance from float64: the kernels must be no further from it than the plain path is. Memory that
nobody wrote holds NaN, so that to read it is seen.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphfuse.ops import moe_launch, moe_reference, moe_triton
from graphfuse.tuning.moe_tiles import Tile, Tiles
from tests.kernels.interpreter_as_gpus import arithmetic_of_gpus, no_reads_of
from tests.kernels.moe_layers import FORMS, exact, make_inputs, make_layer, quantise_tokens

FEW = Tiles(Tile(16, 128, 64), Tile(16, 128, 64))  # few programs, which are what takes time here
SMALL = Tiles(Tile(16, 32, 32), Tile(16, 32, 32))
SWAPPED = Tiles(Tile(16, 64, 64, swap_ab=True), Tile(16, 64, 32, swap_ab=True))
UNLIKE = Tiles(Tile(32, 64, 32, group_size_m=4, num_stages=2), Tile(32, 32, 64, swap_ab=True))
WIDE = Tiles(Tile(64, 256, 128, group_size_m=8, num_warps=8), Tile(64, 64, 128, num_stages=4))
TILES = {"few": FEW, "small": SMALL, "swapped": SWAPPED, "unlike": UNLIKE, "wide": WIDE}

BF16 = torch.bfloat16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
slow = pytest.mark.slow


BOTH_PATHS = pytest.mark.parametrize("path", ["sorted", "unsorted"], indirect=True)


@pytest.fixture(autouse=True, params=["sorted", pytest.param("unsorted", marks=slow)])
def path(request, monkeypatch):
    """Whether choices are sorted before the products; the number of them decides where this does not."""
    monkeypatch.setattr(moe_launch, "UNSORTED_CHOICES", {"sorted": 0, "unsorted": 1 << 20}[request.param])


@pytest.fixture(autouse=True)
def arithmetic_and_memory_of_gpus():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills memory that nobody wrote
    with arithmetic_of_gpus():
        yield


def run(layer, tokens, ids, topk_weights, tiles=FEW, tokens_scale=None, first_expert=0):
    w, scale = layer.weights, layer.tokens_scale if tokens_scale is None else tokens_scale
    assert moe_triton.can_run(tokens, w, layer.dtype, layer.activation) is None
    got = moe_triton.run(
        tokens, w, ids, topk_weights, layer.activation, layer.activation_limit, scale, layer.intermediate_scale,
        layer.dynamic, layer.dtype, tiles, first_expert,
    )  # fmt: skip
    assert (got.shape, got.dtype, got.is_contiguous()) == (tokens.shape, layer.dtype, True)
    return got


def plain(layer, tokens, ids, topk_weights, tokens_scale=None):
    return moe_reference.run(
        tokens, layer.weights, ids.long(), topk_weights, layer.activation, layer.activation_limit,
        layer.tokens_scale if tokens_scale is None else tokens_scale, layer.intermediate_scale, layer.dynamic,
        layer.dtype,
    )  # fmt: skip


def check(layer, tokens, ids, topk_weights, tiles=FEW, tokens_scale=None):
    got = run(layer, tokens, ids, topk_weights, tiles, tokens_scale)
    truth = exact(layer, tokens, ids, topk_weights, tokens_scale)
    theirs = plain(layer, tokens, ids, topk_weights, tokens_scale)
    assert got.isfinite().all()
    if not len(tokens):
        return got
    ours_off, theirs_off = (got.double() - truth).norm(dim=1), (theirs.double() - truth).norm(dim=1)  # [T]
    # What the last rounding alone may cost; float32 differs by the order of its sums only.
    floor = truth.norm(dim=1) * torch.finfo(layer.dtype).eps / (0.25 if layer.dtype is torch.float32 else 4)
    assert ours_off.norm() <= 1.1 * theirs_off.norm() + floor.norm(), (ours_off, theirs_off)
    # A single row that is off is seen too; by chance alone one may be off by more than the plain path's.
    assert (ours_off <= 2 * theirs_off + 2 * floor + 0.1 * theirs_off.max()).all(), (ours_off, theirs_off)
    return got


@BOTH_PATHS
@pytest.mark.parametrize("dtype", [BF16, *(pytest.param(d, marks=slow) for d in DTYPES[1:])], ids=str)
@pytest.mark.parametrize("tiles", [*TILES])
def test_every_dtype_with_every_tile(dtype, tiles):
    layer = make_layer(dtype=dtype)
    check(layer, *make_inputs(layer, 7, 3), TILES[tiles])


@pytest.mark.parametrize(
    "dtype", [BF16, pytest.param(torch.float16, marks=slow), pytest.param(torch.float32, marks=slow)]
)
@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("tiles", ["few", *(pytest.param(t, marks=slow) for t in TILES if t != "few")])
def test_every_number_format(form, dtype, tiles):
    # 200 and 136 inputs: the last block or group is short.
    layer = make_layer(form, dtype=dtype, num_experts=3, hidden_size=200, intermediate_size=136)
    check(layer, *make_inputs(layer, 7, 2), TILES[tiles])


@pytest.mark.parametrize("form", FORMS)
def test_swapped_operands_in_every_number_format(form):
    layer = make_layer(form, block_shape=(32, 64), hidden_size=96, intermediate_size=72, biases=True)
    check(layer, *make_inputs(layer, 3, 2), SWAPPED)


@pytest.mark.parametrize("block_shape", [(128, 128), (64, 128), (32, 32), pytest.param((16, 64), marks=slow)])
@pytest.mark.parametrize("form", ["block, dynamic", pytest.param("block, 16 bits", marks=slow)])
@pytest.mark.parametrize(
    "tiles", ["few", "wide", pytest.param("swapped", marks=slow), pytest.param("unlike", marks=slow)]
)
def test_blocks_of_any_size_with_tiles_of_any_size(block_shape, form, tiles):
    layer = make_layer(form, block_shape=block_shape, num_experts=2, hidden_size=160, intermediate_size=96)
    check(layer, *make_inputs(layer, 5, 2), TILES[tiles])


@pytest.mark.parametrize("kind", ["expert", "channel", "block"])
@pytest.mark.parametrize("activations", ["dynamic", "16 bits"])
def test_tokens_that_are_already_quantised(kind, activations):
    layer = make_layer(f"{kind}, {activations}", num_experts=3, hidden_size=200, intermediate_size=136)
    tokens, ids, weights = make_inputs(layer, 7, 2)
    stored, scale = quantise_tokens(tokens, 128 if kind == "block" else None)
    check(layer, stored, ids, weights, tokens_scale=scale)


@pytest.mark.parametrize("tiles", ["few", pytest.param("swapped", marks=slow)])
def test_quantised_tokens_with_one_scale_and_static_scales_for_each_expert(tiles):
    layer = make_layer("expert, static", scales_per_expert=True)
    tokens, ids, weights = make_inputs(layer, 7, 2)
    check(layer, tokens, ids, weights, TILES[tiles])
    scale = torch.tensor([0.05])
    stored = (tokens.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    got = run(layer, stored, ids, weights, TILES[tiles], tokens_scale=scale)
    per_row = scale.expand(7, 1).contiguous()
    assert torch.equal(got, run(layer, stored, ids, weights, TILES[tiles], tokens_scale=per_row))
    truth = exact(layer, stored, ids, weights, per_row)
    assert (got.double() - truth).norm() <= 0.05 * truth.norm()


@pytest.mark.parametrize("interleaved", [False, True], ids=["concatenated", "interleaved"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("biases", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("form", ["unscaled", *(pytest.param(f, marks=slow) for f in FORMS[1:])])
def test_every_layout_with_and_without_biases(form, interleaved, transposed, biases):
    layer = make_layer(
        form, interleaved=interleaved, transposed=transposed, biases=biases, block_shape=(32, 32), num_experts=3
    )
    check(layer, *make_inputs(layer, 4, 2))


@pytest.mark.parametrize("activation", [*moe_reference.ACTIVATIONS])
@pytest.mark.parametrize("limit", [None, 0.7])
def test_every_activation_with_and_without_limit(activation, limit):
    layer = make_layer(activation=activation, limit=limit, biases=True, num_experts=3)
    check(layer, *make_inputs(layer, 4, 2))
    layer = make_layer("channel, dynamic", activation=activation, limit=limit, num_experts=3)
    check(layer, *make_inputs(layer, 4, 2))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 33, pytest.param(130, marks=slow)])
@pytest.mark.parametrize("form", ["unscaled", pytest.param("channel, dynamic", marks=slow)])
@pytest.mark.parametrize("tiles", ["few", pytest.param("swapped", marks=slow), pytest.param("unlike", marks=slow)])
def test_any_number_of_tokens(num_tokens, form, tiles):
    layer = make_layer(form, num_experts=4, hidden_size=48, intermediate_size=32)
    check(layer, *make_inputs(layer, num_tokens, 2), TILES[tiles])


@pytest.mark.parametrize("top_k", [1, 3, 8, 10])
@pytest.mark.parametrize("form", ["unscaled", pytest.param("block, dynamic", marks=slow)])
def test_any_number_of_choices(top_k, form):
    layer = make_layer(form, num_experts=12, hidden_size=48, intermediate_size=32, block_shape=(32, 32))
    check(layer, *make_inputs(layer, 5, top_k))


@pytest.mark.parametrize("sizes", [(75, 37), (17, 8), (64, 32), pytest.param((130, 65), marks=slow)])
@pytest.mark.parametrize("form", ["unscaled", "channel, dynamic"])
@pytest.mark.parametrize("transposed", [False, pytest.param(True, marks=slow)], ids=["", "transposed"])
def test_sizes_that_are_no_multiples_of_the_tiles(sizes, form, transposed):
    hidden, inter = sizes
    layer = make_layer(
        form, num_experts=2, hidden_size=hidden, intermediate_size=inter, biases=True, transposed=transposed
    )  # fmt: skip
    check(layer, *make_inputs(layer, 3, 2))


ROUTINGS = {
    "one expert takes all": torch.full((20, 1), 2),
    "one expert is chosen twice by a token": torch.tensor([[1, 1, 3], [3, 1, 3], [0, 0, 0]]),
    "most experts are empty": torch.tensor([[0, 4]] * 5),
    "some are held elsewhere": torch.tensor([[-3, 0], [4, 5], [7, -1], [1, 2], [-1, 4]]),
    "all are held elsewhere": torch.tensor([[-3, 5], [6, 5], [7, -1]]),
    "numbers are far out": torch.tensor([[-(2**31), 1], [2**31 - 1, 3]]),
}


@BOTH_PATHS
@pytest.mark.parametrize("routing", [*ROUTINGS])
@pytest.mark.parametrize("ids_dtype", [torch.int32, pytest.param(torch.int64, marks=slow)], ids=str)
@pytest.mark.parametrize("tiles", ["few", pytest.param("swapped", marks=slow)])
def test_routings(routing, ids_dtype, tiles):
    layer, ids = make_layer(biases=True), ROUTINGS[routing].to(ids_dtype)
    tokens, _, weights = make_inputs(layer, *ids.shape)
    got = check(layer, tokens, ids, weights, TILES[tiles])
    nowhere = ((ids < 0) | (ids >= 5)).all(1)
    assert torch.equal(got[nowhere], torch.zeros_like(got[nowhere]))


@BOTH_PATHS
@pytest.mark.parametrize("first_expert", [0, 7])
def test_an_id_is_of_an_expert_held_here_or_of_none_whatever_int32_makes_of_it(first_expert):
    layer = make_layer(num_experts=4)
    far = [first_expert + 2**32, first_expert + 3 - 2**32, 2**31, -(2**31), 2**63 - 1, -(2**63)]
    ids = torch.tensor([[first_expert + 2, id] for id in far])
    tokens, _, weights = make_inputs(layer, *ids.shape)
    nobody = torch.tensor([[first_expert + 2, -1]] * len(far))
    want = run(layer, tokens, nobody, weights, first_expert=first_expert)
    assert torch.equal(run(layer, tokens, ids, weights, first_expert=first_expert), want)


@BOTH_PATHS
@pytest.mark.parametrize("form", ["unscaled", pytest.param("channel, dynamic", marks=slow), "block, dynamic"])
def test_the_shares_of_two_ranks_with_their_own_experts_sum_up(form):
    layer = make_layer(form, dtype=torch.float32, num_experts=5, block_shape=(32, 32))
    tokens, ids, weights = make_inputs(layer, 6, 3)
    shares = [
        run(_slice(layer, first, last), tokens, ids, weights, first_expert=first) for first, last in [(0, 2), (2, 5)]
    ]
    torch.testing.assert_close(shares[0] + shares[1], run(layer, tokens, ids, weights), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["unscaled", "block, dynamic"])
def test_a_rank_without_experts_adds_nothing(form):
    layer = make_layer(form, num_experts=3, block_shape=(32, 32))
    tokens, ids, weights = make_inputs(layer, 4, 2)
    assert torch.equal(run(_slice(layer, 3, 3), tokens, ids, weights, first_expert=3), torch.zeros_like(tokens))


def _slice(layer, first, last):
    """A rank's experts: views into the weights of all."""
    w = layer.weights
    names = ("gate_up", "down", "gate_up_scale", "down_scale")
    parts = {n: None if getattr(w, n) is None else getattr(w, n)[first:last] for n in names}
    return replace(layer, weights=replace(w, **parts))


@pytest.mark.parametrize("form", ["unscaled", pytest.param("expert, static", marks=slow), "block, dynamic"])
def test_views_are_read_where_they_lie(form):
    layer = make_layer(form, num_experts=3, block_shape=(32, 32))
    tokens, ids, weights = make_inputs(layer, 4, 2)
    want = run(layer, tokens, ids, weights)
    w = layer.weights
    turned = replace(w, gate_up=_stored_turned(w.gate_up), down=_stored_turned(w.down))
    assert not turned.gate_up.is_contiguous()
    assert torch.equal(run(replace(layer, weights=turned), tokens, ids, weights), want)
    wider = torch.cat([tokens, tokens], 1)[:, : tokens.shape[1]]
    assert torch.equal(run(layer, wider, ids.t().contiguous().t(), weights.t().contiguous().t()), want)


def _stored_turned(matrices):
    return matrices.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("topk_dtype", DTYPES, ids=str)
def test_weights_of_choices_in_any_dtype(topk_dtype):
    layer = make_layer()
    tokens, ids, weights = make_inputs(layer, 4, 3)
    check(layer, tokens, ids, weights.to(topk_dtype))


@pytest.mark.parametrize("programs", [0, 1])
@pytest.mark.parametrize("form", ["unscaled", pytest.param("expert, static", marks=slow), "block, dynamic"])
def test_programs_that_make_several_blocks_of_columns(form, programs, monkeypatch):
    layer = make_layer(form, block_shape=(32, 32))
    args = make_inputs(layer, 9, 3)
    want = run(layer, *args)
    monkeypatch.setattr(moe_launch, "PROGRAMS_TO_SPARE", programs)  # 8 blocks a program, or a few
    assert torch.equal(run(layer, *args), want)


@pytest.mark.parametrize("programs", [0, 1 << 20], ids=["several blocks of columns", "one"])
@pytest.mark.parametrize("matrix", ["gate_up", "down"])
@pytest.mark.parametrize("sizes", [(96, 48), (75, 37)])
def test_nothing_behind_the_weights_is_read(sizes, matrix, programs, monkeypatch):
    monkeypatch.setattr(moe_launch, "PROGRAMS_TO_SPARE", programs)
    layer = make_layer(num_experts=2, hidden_size=sizes[0], intermediate_size=sizes[1])
    weights = getattr(layer.weights, matrix)
    memory = torch.zeros(2 * weights.numel() + (1 << 16), dtype=weights.dtype)
    held, behind = memory[: weights.numel()], memory[weights.numel() :]
    layer = replace(layer, weights=replace(layer.weights, **{matrix: held.copy_(weights.flatten()).view_as(weights)}))
    with no_reads_of(behind):
        check(layer, *make_inputs(layer, 4, 2), SMALL)


@pytest.mark.parametrize("form", ["unscaled", pytest.param("channel, dynamic", marks=slow), "block, dynamic"])
@pytest.mark.parametrize("tiles", ["few", pytest.param("swapped", marks=slow)])
def test_results_repeat_bit_for_bit_and_inputs_are_not_modified(form, tiles):
    layer = make_layer(form, block_shape=(32, 32))
    args = make_inputs(layer, 9, 3)
    before = [t.clone() for t in (*args, layer.weights.gate_up, layer.weights.down)]
    first = run(layer, *args, TILES[tiles])
    assert torch.equal(first, run(layer, *args, TILES[tiles]))
    after = (*args, layer.weights.gate_up, layer.weights.down)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("form", ["channel, dynamic", "block, dynamic"])
@pytest.mark.parametrize("tiles", ["few", pytest.param("swapped", marks=slow)])
def test_zeros_stay_zeros_and_nan_spoils_its_own_token_only(form, tiles):
    layer = make_layer(form, block_shape=(32, 32))
    tokens, ids, weights = make_inputs(layer, 6, 3)
    tokens[1], tokens[3, :32] = 0, 0  # a row, and a group of a row
    got = check(layer, tokens, ids, weights, TILES[tiles])
    assert torch.equal(got[1], torch.zeros_like(got[1]))
    for bad in (float("nan"), float("inf")):
        spoiled = tokens.clone()
        spoiled[4, 5] = bad
        found = run(layer, spoiled, ids, weights, TILES[tiles])
        assert found[4].isnan().all()
        assert torch.equal(found[[0, 1, 2, 3, 5]], got[[0, 1, 2, 3, 5]])


def test_what_the_kernels_cannot_run_is_said():
    layer = make_layer()
    tokens = make_inputs(layer, 2, 2)[0]
    in_float64 = make_layer(dtype=torch.float64).weights
    assert "float64" in moe_triton.can_run(tokens.double(), in_float64, torch.float64, "silu")
    odd_blocks = make_layer("block, dynamic", block_shape=(128, 96)).weights
    assert "96" in moe_triton.can_run(tokens, odd_blocks, BF16, "silu")
    scaled = make_layer("block, dynamic").weights
    powers = replace(scaled, down_scale=scaled.down_scale.to(torch.float8_e8m0fnu))
    assert "float8_e8m0fnu" in moe_triton.can_run(tokens, powers, BF16, "silu")
    integers = replace(layer.weights, gate_up=layer.weights.gate_up.to(torch.int8))
    assert "int8" in moe_triton.can_run(tokens, integers, BF16, "silu")
