"""Cases that look like a pattern and are not, or are one in disguise. Same form as the zoo's, each with its reason."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor

from tests.passes.zoo import BF16, HIDDEN, Case, Module, gemma, gpt_oss, llama, uncast, wide

ADD_NORM, NORM = "all_reduce_add_rms_norm", "all_reduce_rms_norm"


def rstd(f: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)


# --- in disguise: fused -----------------------------------------------------------------------------------------------


def _t5(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    """The bf16 value times the float32 root."""
    h = r + m.sum(x)
    return m.norm.weight * (h * rstd(wide(h))).to(h.dtype), h


def _weightless_too(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    """The normalised value is read with the weight and without."""
    f = wide(r + m.sum(x))
    y = (f * rstd(f)).to(x.dtype)
    return m.norm.weight * y, y


def _late_residual(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    s = m.sum(x)
    h = torch.tanh(r @ m.norm.proj) + s
    return llama(h, m.norm.weight), h


def _read_before_the_norm(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    """The sum has a reader in front of a weight that is computed late: the weight must move, not the reader."""
    h = r + m.sum(x)
    y = h * 2
    return llama(h, m.norm.weight + 1), y


def _sizes_behind_the_add(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    h = r + m.sum(x)
    rows = torch.cat([h, r]).shape[0]
    return llama(h.view(2, rows // 4, HIDDEN), m.norm.weight), h


def _transposed_partial(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    h = m.sum(x.t().contiguous().t()).view(1, -1, HIDDEN) + r.unsqueeze(0)
    return llama(h, m.norm.weight), h


def _transposed_residual(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    h = r.t().contiguous().t() + m.sum(x)
    return llama(h, m.norm.weight), h


def _norm_of_norm(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    return llama(llama(h := r + m.sum(x), m.norm.weight), m.norm.other_weight), h


DISGUISED = [
    Case("t5", _t5, op=ADD_NORM),
    Case("weightless_too", _weightless_too, op=ADD_NORM),
    Case("late_residual", _late_residual, op=ADD_NORM),
    Case("read_before_the_norm", _read_before_the_norm, op=ADD_NORM),
    Case("sizes_behind_the_add", _sizes_behind_the_add, op=ADD_NORM),
    Case("transposed_partial", _transposed_partial, op=ADD_NORM),
    Case("transposed_residual", _transposed_residual, op=ADD_NORM),
    Case("norm_of_norm", _norm_of_norm, op=ADD_NORM),
    Case("rounded_weight_plus_one", lambda m, x, r: llama(r + m.sum(x), m.norm.weight + 1), op=ADD_NORM),
    Case("weight_times_constant", lambda m, x, r: llama(r + m.sum(x), m.norm.weight * 3), op=ADD_NORM),
    Case("fp32_weight_cast", lambda m, x, r: llama(r + m.sum(x), m.norm.weight32.to(BF16)), op=ADD_NORM),
    Case("one_weight_for_all", lambda m, x, r: llama(r + m.sum(x), m.norm.weight[:1].expand(HIDDEN)), op=ADD_NORM),
    Case("weight_as_a_row", lambda m, x, r: llama(r + m.sum(x), m.norm.weight.view(1, HIDDEN)), op=ADD_NORM),
    Case("read_in_fp32", lambda m, x, r: llama(r + m.sum(x), m.norm.weight).float(), op=ADD_NORM),
    Case("residual_is_the_partial", lambda m, x, r: llama(x + m.sum(x), m.norm.weight), op=ADD_NORM),
    Case("scalar_bias", lambda m, x, r: llama(r + (m.sum(x) + m.norm.bias[:1]), m.norm.weight), op=ADD_NORM),
    Case("float64", lambda m, x, r: (uncast(h := r + m.sum(x), m.norm.weight), h), torch.float64, op=ADD_NORM),
    Case(
        "rounded_weight_without_residual",
        lambda m, x, r: (llama(h := m.sum(x), m.norm.weight + 1), h),
        op=NORM,
    ),
]


# --- look-alikes: left alone ------------------------------------------------------------------------------------------


def _eps_after_root(m: Module, x: Tensor, r: Tensor) -> Tensor:
    f = wide(r + m.sum(x))
    return m.norm.weight * (f * (torch.rsqrt(f.pow(2).mean(-1, keepdim=True)) + 1e-6)).to(x.dtype)


def _mean_of_a_part(m: Module, x: Tensor, r: Tensor) -> Tensor:
    f = wide(r + m.sum(x))
    part = f.pow(2)[:, : HIDDEN // 2]
    return m.norm.weight * (f * torch.rsqrt(part.mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _square_of_another(m: Module, x: Tensor, r: Tensor) -> Tensor:
    f = wide(r + m.sum(x))
    return m.norm.weight * (f * rstd(wide(r))).to(x.dtype)


def _root_of_another(m: Module, x: Tensor, r: Tensor) -> Tensor:
    f = wide(r + m.sum(x))
    return m.norm.weight * (wide(r) * rstd(f)).to(x.dtype)


def _sum_over_another_size(m: Module, x: Tensor, r: Tensor) -> Tensor:
    f = wide(r + m.sum(x))
    return m.norm.weight * (f * torch.rsqrt(f.pow(2).sum(-1, keepdim=True) / (HIDDEN - 1) + 1e-6)).to(x.dtype)


def _cube(m: Module, x: Tensor, r: Tensor) -> Tensor:
    f = wide(r + m.sum(x))
    return m.norm.weight * (f * torch.rsqrt(f.pow(3).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _scaled_mean(m: Module, x: Tensor, r: Tensor) -> Tensor:
    f = wide(r + m.sum(x))
    return m.norm.weight * (f * torch.rsqrt(torch.add(1e-6, f.pow(2).mean(-1, keepdim=True), alpha=2))).to(x.dtype)


def _rounded_twice(m: Module, x: Tensor, r: Tensor) -> Tensor:
    f = wide(r + m.sum(x))
    return m.norm.weight * (f * rstd(f)).half().to(x.dtype)


def _weight_from_activations(m: Module, x: Tensor, r: Tensor) -> Tensor:
    h = r + m.sum(x)
    return llama(h, h.mean(0))


def _merged_heads(m: Module, x: Tensor, r: Tensor) -> Tensor:
    return llama(r + m.sum(x.view(-1, 4, HIDDEN // 4)).view(-1, HIDDEN), m.norm.weight)


def _in_place_on_an_input(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    dist.all_reduce(x, group=m.group)
    h = r + x
    return llama(h, m.norm.weight), h


def _in_place_on_a_slice(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    y = x @ m.norm.proj
    dist.all_reduce(y[:, : HIDDEN // 2], group=m.group)
    h = r + y
    return llama(h, m.norm.weight), h


def _through(dtype: torch.dtype) -> Callable[[Module, Tensor, Tensor], Tensor]:
    return lambda m, x, r: llama((r + m.sum(x)).to(dtype).to(x.dtype), m.norm.weight)


def _in_float64(m: Module, x: Tensor, r: Tensor) -> Tensor:
    f = (r + m.sum(x)).double()
    return m.norm.weight * (f * rstd(f)).to(x.dtype)


OTHER_ROUNDING = "the value is rounded to another dtype before the norm"

LOOK_ALIKES = [
    Case("eps_after_root", _eps_after_root, reason="no RMSNorm reads the sum"),
    Case("mean_of_a_part", _mean_of_a_part, reason="no RMSNorm reads the sum"),
    Case("square_of_another", _square_of_another, reason="no RMSNorm reads the sum"),
    Case("root_of_another", _root_of_another, reason="no RMSNorm reads the sum"),
    Case("sum_over_another_size", _sum_over_another_size, reason="no RMSNorm reads the sum"),
    Case("cube", _cube, reason="no RMSNorm reads the sum"),
    Case("scaled_mean", _scaled_mean, reason="no RMSNorm reads the sum"),
    Case("through_fp16", _through(torch.float16), reason=OTHER_ROUNDING),
    Case("down_and_up", _through(torch.bfloat16), torch.float32, reason=OTHER_ROUNDING),
    Case("in_float64", _in_float64, torch.float32, reason="the norm is computed in float64"),
    Case("rounded_twice", _rounded_twice, reason="the norm gives fp32, the reduced value is bf16"),
    Case(
        "rounded_to_fp16",
        lambda m, x, r: gpt_oss((r + m.sum(x)), m.norm.weight32).half(),
        reason="fp32 weight with bf16 activations",
    ),
    Case("weight_from_activations", _weight_from_activations, reason="the norm's weight is computed after the reduct"),
    Case(
        "weight_of_two",
        lambda m, x, r: llama(r + m.sum(x), m.norm.weight + m.norm.bias),
        reason="the norm's weight is computed after the reduction",
    ),
    Case(
        "scalar_residual",
        lambda m, x, r: llama(m.norm.eps.to(BF16) + m.sum(x), m.norm.weight),
        reason="the residual is broadcast to the shape of the reduced value",
    ),
    Case(
        "scaled_bias",
        lambda m, x, r: llama(r + torch.add(m.sum(x), m.norm.bias, alpha=2), m.norm.weight),
        reason="the add scales one of its operands",
    ),
    Case(
        "scaled_behind_the_bias",
        lambda m, x, r: llama(torch.add(r, m.sum(x) + m.norm.bias, alpha=2), m.norm.weight),
        reason="the add scales one of its operands",
    ),
    Case(
        "per_head_weightless",
        lambda m, x, r: llama((r + m.sum(x)).view(-1, 4, HIDDEN // 4), None),
        reason="no RMSNorm reads the sum; it feeds view",
    ),
    Case("merged_heads", _merged_heads, reason="no residual add follows; the reduced value feeds view"),
    Case("in_place_on_an_input", _in_place_on_an_input, reason="the reduced value has another user: copy_"),
    Case("in_place_on_a_slice", _in_place_on_a_slice, reason="no residual add follows; the reduced value feeds"),
    Case(
        "subtracted",
        lambda m, x, r: llama(r - m.sum(x), m.norm.weight),
        reason="no residual add follows; the reduced value feeds sub",
    ),
    Case("weight_behind_an_activation", lambda m, x, r: gemma(torch.relu(r + m.sum(x)), m.norm.weight), reason="relu"),
    Case(
        "min",
        lambda m, x, r: llama(r + fc.all_reduce(x, "min", m.group), m.norm.weight),
        reason="it reduces by min, only sums are fused",
    ),
]
