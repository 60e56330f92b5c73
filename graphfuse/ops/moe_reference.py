"""Reference of `graphfuse::moe_experts`: one expert after the other, in the plain formulas.

It rounds where the eager modules of the families round (after each projection and product, in the compute dtype) and
sums over the choices in float32. Quantised weights are dequantised one expert at a time. A projection of quantised
activations multiplies what is stored, times its scales, in float32 (float64 for float64), and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GATE_UP_LAYOUTS = ("concatenated", "interleaved")

ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "swiglu_oai": lambda gate, up: gate * torch.sigmoid(1.702 * gate) * (up + 1),
}


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of the experts held here, as stored; see `moe_experts` for their shapes."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    gate_up_scale: Tensor | None
    down_scale: Tensor | None
    block_shape: tuple[int, ...] | None
    interleaved: bool
    transposed: bool

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def gate_up_shape(self) -> tuple[int, int, int]:
        """(E, output, input), whatever the stored order."""
        return _output_first(self.gate_up, self.transposed)

    @property
    def down_shape(self) -> tuple[int, int, int]:
        return _output_first(self.down, self.transposed)

    def optional(self) -> tuple[Tensor | None, ...]:
        return self.gate_up_bias, self.down_bias, self.gate_up_scale, self.down_scale

    def expert(self, weight: Tensor, scale: Tensor | None, index: int, dtype: torch.dtype) -> Tensor:
        """One expert's matrix `[output, input]` in `dtype`, dequantised if it has scales."""
        matrix = weight[index].t() if self.transposed else weight[index]
        if scale is None:
            return matrix.to(dtype)
        factor = scale[index].float()  # [], [N] or [blocks of N, blocks of K]
        if factor.dim() == 1:
            factor = factor[:, None]
        elif factor.dim() == 2 and self.block_shape is not None:
            factor = _spread(_spread(factor, 0, self.block_shape[0], matrix.shape[0]), 1, self.block_shape[1],
                             matrix.shape[1])  # fmt: skip
        return (matrix.to(torch.promote_types(dtype, torch.float32)) * factor).to(dtype)


def run(
    tokens: Tensor,
    weights: ExpertWeights,
    local_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    activation_limit: float | None,
    tokens_scale: Tensor | None,
    intermediate_scale: Tensor | None,
    dynamic: bool,
    dtype: torch.dtype,
) -> Tensor:
    """`[T, H]`; `local_ids` `[T, K]` count from the first expert held here, others are skipped."""
    accumulate_in = torch.promote_types(dtype, torch.float32)
    dynamic_tokens, static_scale = dynamic, tokens_scale
    if tokens.dtype.is_floating_point and tokens.dtype.itemsize > 1:
        tokens = tokens.to(dtype)
    else:
        tokens = _dequantise_tokens(tokens.to(accumulate_in), tokens_scale, weights.block_shape)
        dynamic_tokens, static_scale = False, None
    accumulator = torch.zeros(tokens.shape, dtype=accumulate_in, device=tokens.device)
    held = (local_ids >= 0) & (local_ids < weights.num_experts)
    for index in torch.unique(local_ids[held]).tolist():
        token, choice = torch.where(local_ids == index)
        x = _rounded(tokens[token], static_scale, dynamic_tokens, index, weights)  # [N, H]
        x = F.linear(
            x,
            weights.expert(weights.gate_up, weights.gate_up_scale, index, x.dtype),
            None if weights.gate_up_bias is None else weights.gate_up_bias[index].to(x.dtype),
        )
        x = gated_activation(x.to(dtype), weights.interleaved, activation, activation_limit)
        x = _rounded(x, intermediate_scale, dynamic, index, weights)  # [N, I]
        x = F.linear(
            x,
            weights.expert(weights.down, weights.down_scale, index, x.dtype),
            None if weights.down_bias is None else weights.down_bias[index].to(x.dtype),
        )
        share = topk_weights[token, choice, None].to(accumulator.dtype)
        accumulator.index_add_(0, token, x.to(dtype).to(accumulator.dtype) * share)
    return accumulator.to(dtype)


def gated_activation(gate_up: Tensor, interleaved: bool, activation: str, limit: float | None) -> Tensor:
    """`[N, 2I]` → `[N, I]`."""
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return ACTIVATIONS[activation](gate, up)


def _output_first(weight: Tensor, transposed: bool) -> tuple[int, int, int]:
    experts, a, b = weight.shape
    return (experts, b, a) if transposed else (experts, a, b)


def _spread(scale: Tensor, dim: int, block: int, size: int) -> Tensor:
    """Repeat each block's scale over the elements of the block; the last block may be cut short."""
    return scale.repeat_interleave(block, dim).narrow(dim, 0, size)


def _dequantise_tokens(tokens: Tensor, scale: Tensor | None, block_shape: tuple[int, ...] | None) -> Tensor:
    assert scale is not None  # checked by the op
    scale = scale.float()
    if scale.dim() == 2 and scale.shape[1] > 1 and block_shape is not None:
        scale = _spread(scale, 1, block_shape[1], tokens.shape[1])
    return tokens * scale


def _rounded(x: Tensor, scale: Tensor | None, dynamic: bool, index: int, weights: ExpertWeights) -> Tensor:
    """x as it comes back from storage in the weights' dtype, in float32 at least, with a static scale (of this expert,
    or one for all) or with scales found on the fly; x itself if there is neither."""
    dtype = weights.gate_up.dtype
    if scale is not None:
        step = scale[index if scale.numel() > 1 else 0].float()
    elif dynamic:
        step = _steps(x.float(), _largest(dtype), weights.block_shape)
    else:
        return x
    stored = x.float() / step
    if dtype.is_floating_point:
        stored = stored.clamp(-_largest(dtype), _largest(dtype))
    else:
        stored = stored.round().clamp(torch.iinfo(dtype).min, _largest(dtype))
    return stored.to(dtype).to(torch.promote_types(x.dtype, torch.float32)) * step


def _steps(x: Tensor, largest: float, block_shape: tuple[int, ...] | None) -> Tensor:
    """Scales that bring the largest magnitude of each row, or of each row's groups, to `largest`."""
    size = x.shape[1]
    group = size if block_shape is None else block_shape[1]
    amax = F.pad(x.abs(), (0, -size % group)).unflatten(1, (-1, group)).amax(2)  # [N, groups]
    # A row of zeros divided by a scale of zero would be NaN.
    return _spread((amax / largest).clamp(min=torch.finfo(torch.float32).tiny), 1, group, size)


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
