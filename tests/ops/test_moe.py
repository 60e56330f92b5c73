"""`graphfuse::moe_experts` against a loop over tokens and choices in float64 that knows nothing of the op's code."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from graphfuse.errors import ArgumentError
from graphfuse.ops import moe, moe_triton
from graphfuse.ops.moe import moe_experts
from graphfuse.tuning.moe_table import MoeTable
from graphfuse.tuning.moe_tiles import MoeShape, Tile, Tiles

T, H, I, E, K = 6, 12, 10, 5, 3  # noqa: E741


def act(name, gate, up, limit):
    if limit is not None:
        gate, up = min(gate, limit), max(-limit, min(up, limit))
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    return {
        "silu": lambda: gate * sigmoid(gate) * up,
        "gelu": lambda: 0.5 * gate * (1 + math.erf(gate / math.sqrt(2))) * up,
        "gelu_tanh": lambda: 0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up,
        "swiglu_oai": lambda: gate * sigmoid(1.702 * gate) * (up + 1),
    }[name]()


def naive(
    tokens, gate_up, down, ids, weights, *, first=0, interleaved=False, name="silu", limit=None, b1=None, b2=None,
    round_tokens=lambda x, e: x, round_middle=lambda x, e: x,
):  # fmt: skip
    """gate_up [E, 2I, H] and down [E, H, I], plain numbers."""
    out = torch.zeros(tokens.shape, dtype=torch.float64)
    inter = down.shape[2]
    for t, k in itertools.product(range(tokens.shape[0]), range(ids.shape[1])):
        e = int(ids[t, k]) - first
        if not 0 <= e < gate_up.shape[0]:
            continue
        both = gate_up[e].double() @ round_tokens(tokens[t].double(), e)
        if b1 is not None:
            both = both + b1[e].double()
        pairs = [(both[2 * i], both[2 * i + 1]) if interleaved else (both[i], both[inter + i]) for i in range(inter)]
        middle = torch.tensor([act(name, float(g), float(u), limit) for g, u in pairs], dtype=torch.float64)
        y = down[e].double() @ round_middle(middle, e)
        if b2 is not None:
            y = y + b2[e].double()
        out[t] += float(weights[t, k]) * y
    return out


def random_inputs(num_experts=E, inter=I, hidden=H):
    tokens = torch.randn(T, hidden)
    gate_up, down = torch.randn(num_experts, 2 * inter, hidden), torch.randn(num_experts, hidden, inter)
    ids = torch.stack([torch.randperm(num_experts)[:K] for _ in range(T)])
    return tokens, gate_up, down, ids, torch.rand(T, K)


def assert_equal(got, want, tol=2e-5):
    torch.testing.assert_close(got.double(), want, atol=tol * max(1.0, float(want.abs().max())), rtol=0)


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_every_layout_with_and_without_biases(layout, transposed, biased):
    tokens, gate_up, down, ids, weights = random_inputs()
    b1, b2 = (torch.randn(E, 2 * I), torch.randn(E, H)) if biased else (None, None)
    stored = [w.transpose(1, 2).contiguous() if transposed else w for w in (gate_up, down)]
    got = moe_experts(
        tokens, *stored, ids, weights, gate_up_bias=b1, down_bias=b2, gate_up_layout=layout, transposed=transposed,
        num_experts=E,
    )  # fmt: skip
    assert_equal(got, naive(tokens, gate_up, down, ids, weights, interleaved=layout == "interleaved", b1=b1, b2=b2))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
@pytest.mark.parametrize("limit", [None, 0.7])
def test_every_activation_with_and_without_limit(name, limit):
    args = random_inputs()
    got = moe_experts(*args, activation=name, activation_limit=limit, num_experts=E)
    assert_equal(got, naive(*args, name=name, limit=limit))


def test_experts_held_elsewhere_contribute_nothing_and_the_shares_of_all_ranks_sum_up():
    tokens, gate_up, down, ids, weights = random_inputs()
    shares = [
        moe_experts(tokens, gate_up[a:b], down[a:b], ids.int(), weights, first_expert=a, num_experts=E)
        for a, b in [(0, 2), (2, 5)]
    ]
    assert_equal(shares[1], naive(tokens, gate_up[2:], down[2:], ids, weights, first=2))
    assert_equal(shares[0] + shares[1], naive(tokens, gate_up, down, ids, weights))
    ids[:, 0] = -1
    assert_equal(
        moe_experts(tokens, gate_up, down, ids, weights, num_experts=E), naive(tokens, gate_up, down, ids, weights)
    )


def test_slices_of_the_intermediate_dimension_sum_up_to_the_whole():
    tokens, gate_up, down, ids, weights = random_inputs()
    gate, up = gate_up.chunk(2, 1)
    shares = [
        moe_experts(
            tokens, torch.cat([gate[:, a:b], up[:, a:b]], 1), down[:, :, a:b].contiguous(), ids, weights, num_experts=E
        )
        for a, b in [(0, 4), (4, I)]
    ]
    assert_equal(shares[0] + shares[1], naive(tokens, gate_up, down, ids, weights))


def spread(scale, block_n, block_k, n, k):
    return torch.stack(
        [torch.tensor([[float(s[i // block_n, j // block_k]) for j in range(k)] for i in range(n)]) for s in scale]
    )


@pytest.mark.parametrize("kind", ["expert", "channel", "block"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_scaled_weights(kind, transposed, dtype):
    tokens, gate_up, down, ids, weights = random_inputs()
    block = (4, 8)  # divides neither 2I = 20 and H = 12 nor I = 10 in every direction
    whole, stored, scales = [], [], []
    for w in (gate_up, down):
        q = (w * 20).to(dtype)
        n, k = w.shape[1:]
        if kind == "expert":
            scale = torch.rand(E) / 10
            full = scale[:, None, None].expand(E, n, k)
        elif kind == "channel":
            scale = torch.rand(E, n) / 10
            full = scale[:, :, None].expand(E, n, k)
        else:
            scale = torch.rand(E, -(-n // block[0]), -(-k // block[1])) / 10
            full = spread(scale, *block, n, k)
        whole.append(q.float() * full)
        stored.append(q.transpose(1, 2).contiguous() if transposed else q)
        scales.append(scale)
    got = moe_experts(
        tokens, *stored, ids, weights, transposed=transposed, gate_up_scale=scales[0], down_scale=scales[1],
        block_shape=block if kind == "block" else None, num_experts=E,
    )  # fmt: skip
    assert_equal(got, naive(tokens, *whole, ids, weights))


@pytest.mark.parametrize("per_expert", [False, True])
def test_static_activation_scales_round_both_inputs_to_the_weights_dtype(per_expert):
    tokens, gate_up, down, ids, weights = random_inputs()
    fp8 = torch.float8_e4m3fn
    s1, s2 = (torch.rand(E if per_expert else 1) / 10 + 0.01 for _ in range(2))
    q1, q2 = gate_up.to(fp8), down.to(fp8)
    ones = torch.ones(E)
    got = moe_experts(
        tokens, q1, q2, ids, weights, gate_up_scale=ones, down_scale=ones, tokens_scale=s1, intermediate_scale=s2,
        num_experts=E,
    )  # fmt: skip

    def rounded(scale):
        def through_fp8(x, e):
            s = scale[e if per_expert else 0].double()
            return (x / s).clamp(-448, 448).float().to(fp8).double() * s

        return through_fp8

    want = naive(tokens, q1.float(), q2.float(), ids, weights, round_tokens=rounded(s1), round_middle=rounded(s2))
    assert_equal(got, want, tol=2e-2)  # one value on the edge between two fp8 numbers may fall to either side
    without = naive(tokens, q1.float(), q2.float(), ids, weights)
    assert float((got.double() - without).abs().max()) > float((got.double() - want).abs().max())


@pytest.mark.parametrize("kind", ["tensor", "token", "block"])
def test_tokens_that_are_already_quantised(kind):
    tokens, gate_up, down, ids, weights = random_inputs()
    fp8, block = torch.float8_e4m3fn, (4, 8)
    scale = {"tensor": torch.rand(1), "token": torch.rand(T, 1), "block": torch.rand(T, 2)}[kind]
    full = scale.repeat_interleave(8, 1)[:, :H] if kind == "block" else scale
    q, q1, q2 = tokens.to(fp8), gate_up.to(fp8), down.to(fp8)
    s1, s2 = torch.ones(E, 5, 2), torch.ones(E, 3, 2)
    got = moe_experts(
        q, q1, q2, ids, weights, gate_up_scale=s1, down_scale=s2, tokens_scale=scale, block_shape=block,
        out_dtype=torch.float32, num_experts=E,
    )  # fmt: skip
    assert got.dtype == torch.float32
    assert_equal(got, naive(q.float() * full, q1.float(), q2.float(), ids, weights))


def test_bfloat16_is_as_exact_as_its_rounding_allows_and_an_empty_batch_is_empty():
    tokens, gate_up, down, ids, weights = random_inputs()
    b = [t.bfloat16() for t in (tokens, gate_up, down)]
    got = moe_experts(*b, ids, weights, num_experts=E)
    assert got.dtype == torch.bfloat16
    assert_equal(got, naive(*b, ids, weights), tol=2e-2)
    assert moe_experts(tokens[:0], gate_up, down, ids[:0], weights[:0], num_experts=E).shape == (0, H)


def test_the_fake_kernel_agrees_and_works_on_meta():
    args = random_inputs()
    with FakeTensorMode() as mode:
        got = moe_experts(*[mode.from_tensor(t) for t in args], num_experts=E)
    assert (got.shape, got.dtype, got.stride()) == ((T, H), torch.float32, (H, 1))
    assert moe_experts(*[t.to("meta") for t in args], num_experts=E).is_meta


TABLE = MoeTable(
    MoeShape(E, I, H, K),
    tuple((m, Tiles(Tile(16, 32, 64), Tile(16, 64, 64, num_stages=m))) for m in (1, 2, 4, 8)),
    source="E=5,N=10.json",
)


def test_launch_parameters_change_nothing_where_triton_cannot_run():
    args = random_inputs()  # not on a CPU, but in its interpreter
    assert torch.equal(moe_experts(*args, E, launch=TABLE.to_text()), moe_experts(*args, E))
    with FakeTensorMode() as mode:
        got = moe_experts(*[mode.from_tensor(t) for t in args], E, launch=TABLE.to_text())
    assert got.shape == (T, H)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_launch_parameters_for_this_number_of_tokens_reach_the_kernels(monkeypatch, ids_dtype):
    calls = []

    def run(tokens, *rest):
        calls.append(rest)
        return torch.full_like(tokens, 7.0)

    pretend_to_have_triton(monkeypatch, run)
    tokens, gate_up, down, ids, weights = random_inputs()
    gate_up, down, ids, scales = fp8(gate_up), fp8(down), ids.to(ids_dtype) + 2, torch.ones(E)
    got = moe_experts(
        tokens, gate_up, down, ids, weights, E + 2, first_expert=2, activation="gelu", activation_limit=3.0,
        gate_up_scale=scales, down_scale=scales, dynamic=True, launch=TABLE.to_text(),
    )  # fmt: skip
    assert (got == 7).all()
    ((held, topk_ids, topk_weights, *options),) = calls
    assert held.gate_up.dtype == torch.float8_e4m3fn and held.down_scale is not None
    assert topk_ids.dtype == ids_dtype and torch.equal(topk_ids, ids) and torch.equal(topk_weights, weights)
    # limit, both static scales, dynamic, dtype, tiles, first_expert
    assert options == ["gelu", 3.0, None, None, True, torch.float32, TABLE.tiles(T), 2]


def test_launch_parameters_that_are_none_are_named(monkeypatch):
    pretend_to_have_triton(monkeypatch, None)
    with pytest.raises(ArgumentError, match="describes no launch parameters"):
        moe_experts(*random_inputs(), E, launch="fast")


def pretend_to_have_triton(monkeypatch, run):
    monkeypatch.setattr(moe, "_triton_runs_on", lambda device: True)
    monkeypatch.setattr(moe_triton, "can_run", lambda *args: None)
    monkeypatch.setattr(moe_triton, "run", run)


def fp8(t):
    return t.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_up_layout": "zipped"}, "Known: concatenated, interleaved"),
        ({"activation": "relu6"}, "Known: gelu, gelu_tanh, silu, swiglu_oai"),
        ({"tokens": torch.zeros(T, 1, H)}, "Pass tokens"),
        ({"down": torch.zeros(E, I, H)}, "Shapes do not fit"),
        ({"transposed": True}, "Shapes do not fit"),
        ({"topk_weights": torch.zeros(T, K + 1)}, "Pass both as"),
        ({"topk_ids": torch.zeros(T, K)}, "Pass int32 or int64"),
        ({"first_expert": 1}, "do not lie within 5"),
        ({"gate_up_bias": torch.zeros(E, I)}, "gate_up_bias has shape"),
        ({"down_bias": torch.zeros(E)}, "down_bias has shape"),
        ({"gate_up_scale": torch.ones(E)}, "Pass both or neither"),
        ({"gate_up_scale": torch.ones(E, 3), "down_scale": torch.ones(E)}, "gate_up_scale has shape"),
        ({"gate_up_scale": torch.ones(E), "down_scale": torch.ones(E), "block_shape": [4, 0]}, "two positive sizes"),
        ({"gate_up_scale": torch.ones(E), "down_scale": torch.ones(E), "block_shape": [4, 8]}, "gate_up_scale has"),
        ({"down": torch.zeros(E, H, I).bfloat16()}, "Use one dtype for both"),
        ({"tokens": torch.zeros(T, H).bfloat16()}, "without scales"),
        ({"gate_up": fp8(torch.zeros(E, 2 * I, H)), "down": fp8(torch.zeros(E, H, I))}, "Quantised weights need"),
        ({"intermediate_scale": torch.ones(2)}, "intermediate_scale has shape"),
        ({"intermediate_scale": torch.ones(1)}, "not quantised"),
        ({"tokens_scale": torch.ones(2)}, "tokens_scale has shape"),
        ({"tokens": fp8(torch.zeros(T, H))}, "need tokens_scale and out_dtype"),
        ({"tokens": fp8(torch.zeros(T, H)), "tokens_scale": torch.ones(T, 3), "out_dtype": torch.float32}, "per block"),
        ({"out_dtype": torch.int32}, "out_dtype is"),
        ({"topk_weights": torch.zeros(T, K, device="meta")}, "Use one device"),
        ({"topk_ids": torch.zeros(T + 1, K, dtype=torch.int64)}, "one row for each token"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_used_are_named(changes, message):
    tokens, gate_up, down, ids, weights = random_inputs()
    args = {
        "tokens": tokens, "gate_up": gate_up, "down": down, "topk_ids": ids, "topk_weights": weights, "num_experts": E,
    }  # fmt: skip
    with pytest.raises(ArgumentError, match=message):
        moe_experts(**{**args, **changes})
