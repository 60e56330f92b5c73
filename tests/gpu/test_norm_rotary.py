"""Norm and rotation of queries and keys on a GPU: the kernel against the eager formula, replayed, and in a model."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config

import graphfuse
from graphfuse.models import registry
from graphfuse.models.layers import RMSNorm, ZeroCentredRMSNorm, rotate
from graphfuse.ops.norm_rotary import norm_rotary

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

EPS = 1e-6
SHAPES = {"qwen3": (32, 4, 128, 128), "qwen3_next": (16, 2, 256, 64), "glm": (12, 1, 128, 64), "80": (5, 5, 80, 80)}
"""Heads of queries and of keys, their size, and how much of it is rotated."""


def inputs(num_tokens, shape, dtype):
    """As a model has them: q and k are views of one product."""
    q_heads, kv_heads, size, rotated = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, device="cuda")

    qkv = (
        normal(num_tokens, (q_heads + 2 * kv_heads) * size).to(dtype).view(1, num_tokens, q_heads + 2 * kv_heads, size)
    )
    q, k, _ = qkv.split([q_heads, kv_heads, kv_heads], dim=2)
    angles = normal(1, num_tokens, 1, rotated)
    weights = [(normal(size) * 0.1 + 1).to(dtype) for _ in range(2)]
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype), weights


def normalised(x, weight, norm_type):
    norm = norm_type(x.shape[-1], EPS, dtype=x.dtype, device=x.device)
    norm.weight.data.copy_(weight)
    return norm(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 128, 2000])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rotation_is_the_eager_one_bit_for_bit(shape, num_tokens, dtype):
    q, k, cos, sin, _ = inputs(num_tokens, shape, dtype)
    for x, rotated in zip((q, k), norm_rotary(q, k, cos, sin), strict=True):
        assert rotated.is_contiguous()
        assert torch.equal(rotated, rotate(x, cos, sin))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("norm_type", [RMSNorm, ZeroCentredRMSNorm])
@pytest.mark.parametrize("num_tokens", [1, 7, 2000])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_norm_rounds_as_the_eager_one(shape, num_tokens, norm_type, dtype):
    """Squares are added in another order: a few results are rounded to a neighbour."""
    q, k, cos, sin, weights = inputs(num_tokens, shape, dtype)
    zero_centred = norm_type is ZeroCentredRMSNorm
    got = norm_rotary(q, k, cos, sin, *weights, EPS, float(zero_centred), not zero_centred)
    atol = {torch.bfloat16: 2**-4, torch.float16: 2**-7, torch.float32: 2**-18}[dtype]
    for x, weight, rotated in zip((q, k), weights, got, strict=True):
        want = rotate(normalised(x, weight, norm_type), cos, sin)
        torch.testing.assert_close(rotated, want, atol=atol, rtol=0)
        if dtype != torch.float32:
            assert (rotated != want).float().mean() < 0.01


def test_a_captured_call_replays_on_new_inputs():
    q, k, cos, sin, weights = inputs(64, "qwen3", torch.bfloat16)
    norm_rotary(q, k, cos, sin, *weights, EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = norm_rotary(q, k, cos, sin, *weights, EPS)
    q.mul_(3).sub_(1)
    k.neg_()
    graph.replay()
    for got, want in zip(results, norm_rotary(q, k, cos, sin, *weights, EPS), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_a_compiled_model_calls_the_op_and_gives_the_eager_models_logits(executor):
    config = Qwen3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, vocab_size=512,
    )  # fmt: skip
    device = torch.device("cuda")
    model, exact = (
        registry.build(config, None, dtype, device).requires_grad_(False) for dtype in (torch.bfloat16, torch.float32)
    )
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.copy_(torch.rand(parameter.shape, generator=generator, device=device) + 0.5)
        else:
            parameter.normal_(0, 0.06, generator=generator)
    exact.load_state_dict(model.state_dict())
    ids = torch.randint(0, 512, (2, 33), generator=generator, device=device)
    positions = torch.arange(33, device=device).repeat(2, 1)
    settings = graphfuse.FuseConfig(executor=executor, watch=False)
    with graphfuse.compile(model, None, config=settings) as compiled, torch.no_grad():
        got, eager, want = (m(ids, positions).float() for m in (compiled, model, exact))
        assert compiled.report.rules["norm_rotary"]["matches"] == 3
    error, eager_error = ((logits - want).norm() / want.norm() for logits in (got, eager))
    assert error <= 1.2 * eager_error
