"""The alternatives compute what the reference does."""

import pytest
import torch

from graphfuse.tuning.moe_alternatives import flashinfer, grouped_mm
from graphfuse.tuning.moe_bench import Expected
from graphfuse.tuning.moe_inputs import make_routing, make_tokens, make_weights
from graphfuse.tuning.moe_tiles import MoeShape

BF16 = MoeShape(8, 96, 192, 2)
FP8 = MoeShape(8, 96, 192, 2, "fp8_w8a8")
BLOCKS = MoeShape(8, 96, 192, 2, "fp8_w8a8", (64, 64))


def error(shape, form, device):
    layer = make_weights(shape, device=device, form=form)
    (tokens,) = make_tokens(40, shape, sets=1, device=device)
    ((ids, shares),) = make_routing(40, shape, sets=1, device=device)
    forward = grouped_mm(layer)
    assert not isinstance(forward, str), forward
    return Expected.of(layer, (tokens, ids, shares)).error(forward(tokens, ids, shares))


@pytest.mark.parametrize("form", ["bf16", "bf16_bias_interleaved"])
def test_grouped_products_give_the_references_result(form):
    assert error(BF16, form, "cpu") < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["fp8_tensor", "fp8_channel"])
def test_grouped_products_of_fp8_give_the_references_result(form):
    assert error(FP8, form, "cuda") < 5e-2


def test_an_error_is_seen_in_any_checked_row():
    layer = make_weights(BF16, device="cpu")
    (tokens,) = make_tokens(16, BF16, sets=1, device="cpu")
    ((ids, shares),) = make_routing(16, BF16, sets=1, device="cpu")
    out, expected = grouped_mm(layer)(tokens, ids, shares), Expected.of(layer, (tokens, ids, shares))
    assert expected.error(out) < 1e-2
    out[15] = 0
    assert expected.error(out) == pytest.approx(0.25, abs=0.1)


def test_what_torch_and_flashinfer_lack_is_said():
    assert "a scale for each block" in grouped_mm(make_weights(BLOCKS, device="cpu"))
    assert "bf16 without biases only" in flashinfer(make_weights(FP8, device="cpu"), 8)


def test_without_flashinfer_that_is_the_reason(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert flashinfer(make_weights(BF16, device="cpu"), 8) == "FlashInfer is not installed."


@pytest.mark.gpu
def test_grouped_products_can_be_captured():
    layer = make_weights(BF16, device="cuda")
    (tokens,) = make_tokens(40, BF16, sets=1, device="cuda")
    ((ids, shares),) = make_routing(40, BF16, sets=1, device="cuda")
    forward = grouped_mm(layer)
    eager = forward(tokens, ids, shares)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(tokens, ids, shares)
    graph.replay()
    assert torch.equal(out, eager)
