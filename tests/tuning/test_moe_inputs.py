"""Inputs of MoE measurements: values of the size a model has, forms that the op takes, routings as they are named."""

import pytest
import torch

from graphfuse.errors import ConfigError
from graphfuse.ops.moe import moe_experts
from graphfuse.tuning.moe_inputs import (
    FORMS,
    experts_touched,
    form_of,
    make_routing,
    make_tokens,
    make_weights,
    num_sets,
)
from graphfuse.tuning.moe_tiles import MoeShape

SHAPE = MoeShape(8, 96, 192, 2)
FP8_SHAPE = MoeShape(8, 96, 192, 2, "fp8_w8a8")
BLOCK_SHAPE = MoeShape(8, 96, 192, 2, "fp8_w8a8", (128, 128))
SHAPE_OF = {"fp8_tensor": FP8_SHAPE, "fp8_channel": FP8_SHAPE, "fp8_block": BLOCK_SHAPE}
ROUTER = MoeShape(64, 32, 32, 4)


def layer_of(form, seed=0):
    return make_weights(SHAPE_OF.get(form, SHAPE), device="cpu", form=form, seed=seed)


def dequantised(weights, which):
    matrix, scale = getattr(weights, which), getattr(weights, f"{which}_scale")
    experts = [weights.expert(matrix, scale, index, torch.float32) for index in range(weights.num_experts)]
    return torch.stack(experts)  # [E, outputs, inputs]


@pytest.mark.parametrize("form", FORMS)
def test_the_op_takes_every_form_and_values_stay_near_one(form):
    layer, shape = layer_of(form), SHAPE_OF.get(form, SHAPE)
    weights = layer.weights
    (tokens,) = make_tokens(64, shape, sets=1, device="cpu")
    ((ids, shares),) = make_routing(64, shape, sets=1, device="cpu")
    out = moe_experts(
        tokens, weights.gate_up, weights.down, ids, shares, shape.num_experts, 0,
        weights.gate_up_bias, weights.down_bias, "interleaved" if weights.interleaved else "concatenated",
        weights.transposed, layer.activation, layer.activation_limit, weights.gate_up_scale, weights.down_scale,
        layer.tokens_scale, layer.intermediate_scale, weights.block_shape,
    )  # fmt: skip
    assert tokens.std().item() == pytest.approx(1, rel=0.05)
    assert 0.3 < out.float().std().item() < 1.5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("which", "inputs"), [("gate_up", 192), ("down", 96)])
def test_a_product_neither_grows_nor_shrinks_its_inputs(form, which, inputs):
    values = dequantised(layer_of(form).weights, which)
    assert values.shape[2] == inputs
    assert (values.std() * inputs**0.5).item() == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("form", ["fp8_tensor", "fp8_channel", "fp8_block"])
def test_scales_use_the_whole_range_of_fp8(form):
    weights = layer_of(form).weights
    assert weights.gate_up.dtype == torch.float8_e4m3fn
    assert weights.gate_up.float().abs().amax((1, 2)).tolist() == [448] * 8
    # Of three mantissa bits an error of up to 1/16 remains, 1/28 or so on average.
    bf16 = make_weights(SHAPE, device="cpu").weights.gate_up.float()
    error = (dequantised(weights, "gate_up") - bf16).norm() / bf16.norm()
    assert 0.005 < error < 0.05


def test_each_form_has_the_scales_it_is_named_for():
    tensor, channel, block = (layer_of(form) for form in ("fp8_tensor", "fp8_channel", "fp8_block"))
    assert tensor.weights.down_scale.shape == (8,)
    assert channel.weights.down_scale.shape == (8, 192)
    assert block.weights.gate_up_scale.shape == (8, 2, 2), "192 x 192 in blocks of 128, the last ones cut short"
    assert tensor.tokens_scale is not None and not tensor.dynamic
    assert channel.dynamic and channel.tokens_scale is None and channel.weights.block_shape is None
    assert block.dynamic and block.weights.block_shape == (128, 128)


def test_gpt_oss_has_biases_gates_beside_ups_and_inputs_before_outputs():
    layer = layer_of("bf16_bias_interleaved")
    weights = layer.weights
    assert weights.transposed and weights.interleaved and weights.gate_up.shape == (8, 192, 192)
    assert weights.down.shape == (8, 96, 192) and weights.gate_up_bias.shape == weights.down_bias.shape == (8, 192)
    assert (layer.activation, layer.activation_limit) == ("swiglu_oai", 7.0)


def test_weights_are_the_same_for_a_seed_and_differ_between_experts():
    first, again, other = layer_of("fp8_block"), layer_of("fp8_block"), layer_of("fp8_block", seed=1)
    assert torch.equal(first.weights.down.float(), again.weights.down.float())
    assert not torch.equal(first.weights.down.float(), other.weights.down.float())
    assert not torch.equal(first.weights.down[0].float(), first.weights.down[1].float())


def test_experts_of_a_token_are_distinct_and_their_weights_sum_to_one():
    for routing in ("uniform", "skewed"):
        for ids, shares in make_routing(50, ROUTER, routing=routing, sets=2, device="cpu"):
            assert ids.dtype == torch.int32 and ids.shape == shares.shape == (50, 4)
            assert all(len(set(row)) == 4 for row in ids.tolist())
            assert torch.allclose(shares.sum(1), torch.ones(50)) and shares.min() > 0


def test_uniform_routing_uses_all_experts_alike():
    ((ids, _),) = make_routing(4096, ROUTER, sets=1, device="cpu")
    counts = ids.flatten().bincount(minlength=64).float()  # 256 expected, a deviation of 16
    assert counts.min() > 190 and counts.max() < 330


def test_skewed_routing_has_a_few_popular_experts_others_in_each_set():
    made = make_routing(4096, ROUTER, routing="skewed", sets=4, device="cpu")
    counts = [ids.flatten().bincount(minlength=64).sort(descending=True) for ids, _ in made]
    for sorted_counts in counts:
        share = sorted_counts.values / sorted_counts.values.sum()
        assert 0.12 < share[0] < 0.25, "a quarter at most: no token takes an expert twice"
        assert share[:8].sum() > 0.4 and share[-32:].sum() < 0.25
    assert len({tuple(each.indices[:8].tolist()) for each in counts}) == 4


def test_few_tokens_touch_few_experts():
    assert experts_touched(make_routing(1, ROUTER, sets=16, device="cpu")) == 4
    expected = 64 * (1 - (1 - 4 / 64) ** 8)
    assert experts_touched(make_routing(8, ROUTER, sets=64, device="cpu")) == pytest.approx(expected, rel=0.05)


def test_few_tokens_are_timed_on_many_sets():
    assert [num_sets(tokens) for tokens in (0, 1, 64, 128, 512, 8192)] == [16, 16, 16, 8, 2, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_weights(SHAPE, device="cpu", form="int4"), "The form 'int4' is not known"),
        (lambda: make_weights(SHAPE, device="cpu", form="fp8_tensor"), "Use bf16, or change the shape"),
        (lambda: make_weights(BLOCK_SHAPE, device="cpu", form="fp8_tensor"), "Use fp8_block"),
        (lambda: make_routing(1, SHAPE, routing="even", sets=1, device="cpu"), "The routing 'even' is not known"),
    ],
    ids=["form", "dtype", "block_shape", "routing"],
)
def test_what_does_not_fit_is_an_error_that_says_what_does(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_usual_form_follows_the_shape():
    assert [form_of(shape) for shape in (SHAPE, FP8_SHAPE, BLOCK_SHAPE)] == ["bf16", "fp8_tensor", "fp8_block"]
