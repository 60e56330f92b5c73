"""Routed experts of a mixture-of-experts layer as one op: `graphfuse::moe_experts`.

    for each token t and choice k, with expert e = topk_ids[t, k]:
        gate, up = split(gate_up[e] @ tokens[t] + gate_up_bias[e])
        out[t]  += topk_weights[t, k] * (down[e] @ (activation(gate) * up) + down_bias[e])

One schema covers every layout and number format the families use, so that models never choose a kernel. Models leave
`launch` empty and get the plain path: `moe_reference` on the CPU and for quantised weights, two grouped matrix products
on CUDA. A pass fills in `kernel` and gets the tuned Triton kernels.

The result is this rank's share. With the intermediate dimension sharded, or with the experts spread over the ranks, it
is a partial sum that the model all-reduces; a sharded model gives `down_bias` on one rank only.

Legend: T tokens, H hidden, E experts held here, I intermediate size here, K choices per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphfuse.errors import ArgumentError
from graphfuse.kernels.sizes import ceil_div
from graphfuse.ops import moe_grouped, moe_reference
from graphfuse.ops.moe_reference import ACTIVATIONS, GATE_UP_LAYOUTS, ExpertWeights


@torch.library.custom_op("graphfuse::moe_experts", mutates_args=())
def moe_experts(
    tokens: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    first_expert: int = 0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_up_layout: str = "concatenated",
    transposed: bool = False,
    activation: str = "silu",
    activation_limit: float | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    tokens_scale: Tensor | None = None,
    intermediate_scale: Tensor | None = None,
    block_shape: Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
    dynamic: bool = False,
    launch: str = "",
) -> Tensor:
    """Weighted sum of the chosen experts' outputs.

    Args:
        tokens: `[T, H]`, float16/bfloat16/float32/float64, or quantised to the weights' dtype with `tokens_scale`.
        gate_up: `[E, 2I, H]`, or `[E, H, 2I]` if `transposed`.
        down: `[E, H, I]`, or `[E, I, H]` if `transposed`.
        topk_ids: `[T, K]` int32 or int64 ids of the whole model's experts. Ids of experts that are not held here
            (and negative ones) contribute nothing.
        topk_weights: `[T, K]`, floating.
        num_experts, first_expert: held here are the experts first_expert .. first_expert + E - 1 of num_experts.
        gate_up_bias, down_bias: `[E, 2I]` (in the layout of gate_up) and `[E, H]`.
        gate_up_layout: "concatenated" (gate rows, then up rows) or "interleaved" (gate, up, gate, up, ...).
        activation: "silu", "gelu", "gelu_tanh": act(gate) * up; "swiglu_oai": gate * sigmoid(1.702 gate) * (up + 1).
        activation_limit: clamp gate from above and up on both sides before the activation.
        gate_up_scale, down_scale: what stored weights are multiplied by: `[E]`, per output channel `[E, N]`, or with
            `block_shape = (n, k)` one per block, `[E, ceil(N / n), ceil(K / k)]`. Always (output N, input K) in this
            order, whatever `transposed` says.
        tokens_scale: floating tokens: a static scale, `[1]` or `[E]`, with which they are rounded to the weights'
            dtype; quantised tokens: what to multiply them by, `[1]`, `[T, 1]`, or `[T, ceil(H / k)]` with blocks.
        intermediate_scale: static scale, `[1]` or `[E]`, with which the activated values are rounded to the weights'
            dtype before the down projection.
        out_dtype: dtype of the result and of the arithmetic; needed for quantised tokens, else the tokens' dtype.
        dynamic: round floating tokens, and the activated values, to the weights' dtype with scales found on the fly:
            the largest magnitude over the dtype's largest value, one for each row, or with blocks one for each row and
            group of k inputs. It takes the place of tokens_scale (of floating tokens) and intermediate_scale.
        launch: launch parameters, the text of a `MoeTable`; where the Triton kernels cannot run, the plain path does.

    Returns:
        `[T, H]` in out_dtype. The sum over K is accumulated in float32 (float64 for float64).

    Raises:
        ArgumentError: a shape, dtype, device or name does not fit.
    """
    weights, dtype = _checked(
        tokens, gate_up, down, topk_ids, topk_weights, num_experts, first_expert, gate_up_bias, down_bias,
        gate_up_layout, transposed, activation, activation_limit, gate_up_scale, down_scale, tokens_scale,
        intermediate_scale, block_shape, out_dtype, dynamic,
    )  # fmt: skip
    _check_token_dims(tokens, topk_ids, topk_weights, tokens_scale)
    if launch:
        from graphfuse.ops import moe_triton
        from graphfuse.tuning.moe_table import MoeTable

        if moe_triton.can_run(tokens, weights, dtype, activation) is None and _triton_runs_on(tokens.device):
            return moe_triton.run(
                tokens, weights, topk_ids, topk_weights, activation, activation_limit, tokens_scale,
                intermediate_scale, dynamic, dtype, MoeTable.from_text(launch).tiles(tokens.shape[0]), first_expert,
            )  # fmt: skip
    local_ids = topk_ids.long() - first_expert
    if moe_grouped.can_run(tokens, weights, dtype):
        return moe_grouped.run(tokens, weights, local_ids, topk_weights, activation, activation_limit)
    return moe_reference.run(
        tokens, weights, local_ids, topk_weights, activation, activation_limit, tokens_scale, intermediate_scale,
        dynamic, dtype,
    )  # fmt: skip


def _triton_runs_on(device: torch.device) -> bool:
    if device.type == "cuda":
        return True
    from triton import knobs  # not above: Triton is published for Linux only

    return knobs.runtime.interpret


@moe_experts.register_fake
def _(tokens, *args, **kwargs):
    _, dtype = _checked(tokens, *args, **kwargs)
    return tokens.new_empty(tokens.shape, dtype=dtype)


def _checked(
    tokens, gate_up, down, topk_ids, topk_weights, num_experts, first_expert=0, gate_up_bias=None, down_bias=None,
    gate_up_layout="concatenated", transposed=False, activation="silu", activation_limit=None, gate_up_scale=None,
    down_scale=None, tokens_scale=None, intermediate_scale=None, block_shape=None, out_dtype=None, dynamic=False,
    launch="",
) -> tuple[ExpertWeights, torch.dtype]:  # fmt: skip
    """The weights and the dtype of the result, for the arguments of the op. Raises what can be told without looking at
    the token dimension (it may be unknown while tracing)."""
    if gate_up_layout not in GATE_UP_LAYOUTS:
        raise ArgumentError(f"gate_up_layout is {gate_up_layout!r}. Known: {', '.join(GATE_UP_LAYOUTS)}.")
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"activation is {activation!r}. Known: {', '.join(sorted(ACTIVATIONS))}.")
    w = ExpertWeights(
        gate_up, down, gate_up_bias, down_bias, gate_up_scale, down_scale,
        tuple(block_shape) if block_shape is not None else None, gate_up_layout == "interleaved", transposed,
    )  # fmt: skip
    if tokens.dim() != 2 or w.gate_up.dim() != 3 or w.down.dim() != 3:
        raise ArgumentError(
            f"moe_experts got tokens of {tokens.dim()} dimensions, gate_up of {w.gate_up.dim()} and down of "
            f"{w.down.dim()}. Pass tokens [T, H] and weights of three dimensions, experts first."
        )
    _, two_i, hidden = w.gate_up_shape
    if two_i % 2 or w.down_shape != (w.num_experts, hidden, two_i // 2) or tokens.shape[1] != hidden:
        raise ArgumentError(
            f"Shapes do not fit (transposed={w.transposed}): tokens [T, {tokens.shape[1]}], gate_up "
            f"{list(w.gate_up.shape)}, down {list(w.down.shape)}. Need gate_up [E, 2I, H] and down [E, H, I], or with "
            "transposed=True [E, H, 2I] and [E, I, H]."
        )
    if topk_ids.dim() != 2 or topk_weights.dim() != 2 or topk_ids.shape[1] != topk_weights.shape[1]:
        raise ArgumentError("topk_ids and topk_weights have different shapes. Pass both as [T, K].")
    if topk_ids.dtype not in (torch.int32, torch.int64) or not topk_weights.is_floating_point():
        raise ArgumentError(
            f"topk_ids are {topk_ids.dtype}, topk_weights {topk_weights.dtype}. Pass int32 or int64 ids and floating "
            "weights."
        )
    if first_expert < 0 or first_expert + w.num_experts > num_experts:
        raise ArgumentError(
            f"{w.num_experts} experts from number {first_expert} do not lie within {num_experts}. "
            "Check first_expert and num_experts."
        )
    _check_optional(w, two_i, hidden)
    if intermediate_scale is not None and tuple(intermediate_scale.shape) not in ((1,), (w.num_experts,)):
        shape = list(intermediate_scale.shape)
        raise ArgumentError(f"intermediate_scale has shape {shape}. Pass [1] or [E] = [{w.num_experts}].")
    quantised_tokens = not _is_plain_float(tokens.dtype)
    if quantised_tokens and (tokens_scale is None or out_dtype is None):
        raise ArgumentError(f"tokens are {tokens.dtype}. Quantised tokens need tokens_scale and out_dtype.")
    if quantised_tokens and tokens_scale.dim() == 2:
        block_k = w.block_shape[1] if w.block_shape else hidden
        if tokens_scale.shape[1] not in (1, ceil_div(hidden, block_k)):
            raise ArgumentError(f"tokens_scale is [T, {tokens_scale.shape[1]}]. Pass [1], [T, 1] or one per block.")
    elif tokens_scale is not None and tuple(tokens_scale.shape) not in (
        {(1,)} if quantised_tokens else {(1,), (w.num_experts,)}
    ):
        raise ArgumentError(f"tokens_scale has shape {list(tokens_scale.shape)}, which moe_experts does not know.")
    if out_dtype is not None and not _is_plain_float(out_dtype):
        raise ArgumentError(f"out_dtype is {out_dtype}. Use float16, bfloat16, float32 or float64.")
    if not quantised_tokens and w.gate_up_scale is None and w.gate_up.dtype != tokens.dtype:
        raise ArgumentError(
            f"tokens are {tokens.dtype} but the weights are {w.gate_up.dtype} without scales. Use one dtype, or pass "
            "gate_up_scale and down_scale."
        )
    if (tokens_scale is not None or intermediate_scale is not None) and _is_plain_float(w.gate_up.dtype):
        raise ArgumentError(f"Activation scales are given but the weights are {w.gate_up.dtype}, not quantised.")
    if dynamic:
        _check_dynamic(w.gate_up.dtype, tokens_scale is not None and not quantised_tokens, intermediate_scale)
    for t in (w.gate_up, w.down, topk_ids, topk_weights, tokens_scale, intermediate_scale, *w.optional()):
        if t is not None and t.device != tokens.device:
            raise ArgumentError(f"tokens are on {tokens.device}, another input on {t.device}. Use one device.")
    return w, out_dtype or tokens.dtype


def _check_optional(w: ExpertWeights, two_i: int, hidden: int) -> None:
    if (w.gate_up_scale is None) != (w.down_scale is None):
        raise ArgumentError("Only one of gate_up_scale and down_scale is given. Pass both or neither.")
    if w.gate_up.dtype != w.down.dtype:
        raise ArgumentError(f"gate_up is {w.gate_up.dtype}, down {w.down.dtype}. Use one dtype for both.")
    if w.gate_up_scale is None and not _is_plain_float(w.gate_up.dtype):
        raise ArgumentError(f"The weights are {w.gate_up.dtype}. Quantised weights need gate_up_scale and down_scale.")
    for name, bias, size in (("gate_up_bias", w.gate_up_bias, two_i), ("down_bias", w.down_bias, hidden)):
        if bias is not None and tuple(bias.shape) != (w.num_experts, size):
            raise ArgumentError(f"{name} has shape {list(bias.shape)}. Pass [{w.num_experts}, {size}].")
    if w.block_shape is not None and (len(w.block_shape) != 2 or min(w.block_shape) < 1):
        raise ArgumentError(f"block_shape is {list(w.block_shape)}. Pass two positive sizes, (output, input).")
    scales = (("gate_up_scale", w.gate_up_scale, two_i, hidden), ("down_scale", w.down_scale, hidden, two_i // 2))
    for name, scale, n, k in scales:
        if scale is None:
            continue
        experts = w.num_experts
        if w.block_shape is not None:
            allowed: list[tuple[int, ...]] = [(experts, ceil_div(n, w.block_shape[0]), ceil_div(k, w.block_shape[1]))]
        else:
            allowed = [(experts,), (experts, n)]
        if tuple(scale.shape) not in allowed:
            shapes = " or ".join(str(list(a)) for a in allowed)
            raise ArgumentError(f"{name} has shape {list(scale.shape)}. Pass {shapes}.")


def _check_dynamic(weights: torch.dtype, scaled_tokens: bool, intermediate_scale: Tensor | None) -> None:
    if _is_plain_float(weights) or not weights.is_signed:
        raise ArgumentError(
            f"dynamic=True rounds activations to the weights' dtype, which is {weights}. "
            "Pass weights quantised to a signed dtype with their scales, or dynamic=False."
        )
    if scaled_tokens:
        raise ArgumentError(
            "dynamic=True finds the scales of floating tokens itself, but tokens_scale is given. "
            "Leave tokens_scale out, pass tokens that are already quantised, or pass dynamic=False."
        )
    if intermediate_scale is not None:
        raise ArgumentError(
            "dynamic=True finds the scales of the activated values itself, but intermediate_scale is given. "
            "Leave intermediate_scale out, or pass dynamic=False."
        )


def _check_token_dims(tokens, topk_ids, topk_weights, tokens_scale) -> None:
    num_tokens = tokens.shape[0]
    if topk_ids.shape[0] != num_tokens or topk_weights.shape[0] != num_tokens:
        raise ArgumentError(
            f"There are {num_tokens} tokens but {topk_ids.shape[0]} rows of ids and {topk_weights.shape[0]} of "
            "weights. Pass one row for each token."
        )
    if tokens_scale is not None and tokens_scale.dim() == 2 and tokens_scale.shape[0] != num_tokens:
        raise ArgumentError(f"There are {num_tokens} tokens but {tokens_scale.shape[0]} rows of tokens_scale.")


def _is_plain_float(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
