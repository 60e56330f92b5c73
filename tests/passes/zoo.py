"""Small modules, one per row of the table of patterns: what is fused, and what must be left alone with which reason.

Each takes x [T, H], this rank's partial sum, and residual [T, H]. `p` holds a weight of every kind. T is dynamic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = 64
BF16 = torch.bfloat16


class Parameters(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN).to(dtype))
        self.other_weight = nn.Parameter(torch.rand(HIDDEN).to(dtype))
        self.weight32 = nn.Parameter(torch.rand(HIDDEN))
        self.bias = nn.Parameter(torch.rand(HIDDEN).to(dtype))
        self.proj = nn.Parameter(torch.rand(HIDDEN, HIDDEN).to(dtype))
        self.eps = nn.Buffer(torch.tensor(1e-5))


class Module(nn.Module):
    def __init__(self, case: Case, group: dist.ProcessGroup, other: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.norm = Parameters(case.dtype)
        self.case, self.group, self.other = case, group, other

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        out = self.case.forward(self, x, residual)
        return out if isinstance(out, tuple) else (out,)

    def sum(self, x: Tensor) -> Tensor:
        return fc.all_reduce(x, "sum", self.group)


@dataclass(frozen=True)
class Case:
    name: str
    forward: Callable[[Module, Tensor, Tensor], Tensor | tuple[Tensor, ...]]
    dtype: torch.dtype = BF16
    op: str | None = None
    """The fused op expected there; None: left alone."""
    reason: str = ""
    """A part of the reason of a case that is left alone."""
    group: str = "compiled"


def wide(x: Tensor) -> Tensor:
    """float32, in which models compute their norms; float64 stays, so that a case in float64 is exact throughout."""
    return x if x.dtype == torch.float64 else x.float()


def llama(x: Tensor, w: Tensor | None, eps: float = 1e-6) -> Tensor:
    f = wide(x)
    y = (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if w is None else w * y


def gemma(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    f = wide(x)
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + wide(w))).to(x.dtype)


def gpt_oss(x: Tensor, w: Tensor, eps: float = 1e-5) -> Tensor:
    f = wide(x)
    return (w * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)


def by_product(x: Tensor, w: Tensor) -> Tensor:
    f = wide(x)
    return ((f * f).mean(-1, keepdim=True).add(3e-7).rsqrt() * f).to(x.dtype) * w


def by_square(x: Tensor, w: Tensor) -> Tensor:
    f = wide(x)
    return w * (f * (torch.square(f).mean(-1, keepdim=True) + 1e-3).pow(-0.5)).to(x.dtype)


def by_sqrt(x: Tensor, w: Tensor) -> Tensor:
    f = wide(x)
    return w * (f / torch.sqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def by_sum(x: Tensor, w: Tensor) -> Tensor:
    f = wide(x)
    return w * (f * torch.rsqrt(f.pow(2).sum(-1, keepdim=True) / HIDDEN + 1e-6)).to(x.dtype)


def uncast(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def gated(x: Tensor, w: Tensor, gate: Tensor) -> Tensor:
    f = wide(x)
    y = w * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return (y * F.silu(gate.float())).to(x.dtype)


def _in_place(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    y = x @ m.norm.proj
    dist.all_reduce(y, group=m.group)
    h = r + y
    return llama(h, m.norm.weight), h


def _fused_by_name(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    h = r + m.sum(x)
    return torch.ops.aten._fused_rms_norm(h, [HIDDEN], m.norm.weight, 1e-6)[0], h


def _two_layers(m: Module, x: Tensor, r: Tensor) -> Tensor:
    h = r + m.sum(x)
    y = llama(h, m.norm.weight) @ m.norm.proj
    h = h + m.sum(y)
    return llama(h, m.norm.other_weight)


def _two_norms(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    h = r + m.sum(x)
    return llama(h, m.norm.weight), llama(h, m.norm.other_weight), h


def _norm_then_add(m: Module, x: Tensor, r: Tensor) -> Tensor:
    h = r + gemma(m.sum(x), m.norm.weight)
    return h @ m.norm.proj


def _embedding(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    h = m.sum(x)
    return llama(h, m.norm.weight), h


def _views_before_add(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    h = r.unsqueeze(0) + m.sum(x).view(1, -1, HIDDEN)
    return llama(h, m.norm.weight), h


def _views_before_norm(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    h = r + m.sum(x)
    return llama(h.unsqueeze(0), m.norm.weight), h


def _batched(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    h = r.reshape(-1, 2, HIDDEN) + m.sum(x.reshape(-1, 2, HIDDEN))
    return llama(h, m.norm.weight), h


FUSED = [
    Case("residual", lambda m, x, r: (llama(h := r + m.sum(x), m.norm.weight), h), op="all_reduce_add_rms_norm"),
    Case("residual_right", lambda m, x, r: (llama(h := m.sum(x) + r, m.norm.weight), h), op="all_reduce_add_rms_norm"),
    Case("residual_dead", lambda m, x, r: llama(r + m.sum(x), m.norm.weight), op="all_reduce_add_rms_norm"),
    Case("two_layers", _two_layers, op="all_reduce_add_rms_norm"),
    Case("two_norms", _two_norms, op="all_reduce_add_rms_norm"),
    Case("gemma", lambda m, x, r: (gemma(h := r + m.sum(x), m.norm.weight), h), op="all_reduce_add_rms_norm"),
    Case("gpt_oss", lambda m, x, r: (gpt_oss(h := r + m.sum(x), m.norm.weight), h), op="all_reduce_add_rms_norm"),
    Case("product", lambda m, x, r: (by_product(h := r + m.sum(x), m.norm.weight), h), op="all_reduce_add_rms_norm"),
    Case("square", lambda m, x, r: (by_square(h := r + m.sum(x), m.norm.weight), h), op="all_reduce_add_rms_norm"),
    Case("sqrt", lambda m, x, r: (by_sqrt(h := r + m.sum(x), m.norm.weight), h), op="all_reduce_add_rms_norm"),
    Case("sum", lambda m, x, r: (by_sum(h := r + m.sum(x), m.norm.weight), h), op="all_reduce_add_rms_norm"),
    Case("uncast", lambda m, x, r: (uncast(h := r + m.sum(x), m.norm.weight), h), op="all_reduce_add_rms_norm"),
    Case(
        "float32",
        lambda m, x, r: (llama(h := r + m.sum(x), m.norm.weight), h),
        torch.float32,
        op="all_reduce_add_rms_norm",
    ),
    Case(
        "float16",
        lambda m, x, r: (llama(h := r + m.sum(x), m.norm.weight), h),
        torch.float16,
        op="all_reduce_add_rms_norm",
    ),
    Case("weightless", lambda m, x, r: (llama(h := r + m.sum(x), None), h), op="all_reduce_add_rms_norm"),
    Case(
        "f_rms_norm",
        lambda m, x, r: (F.rms_norm(h := r + m.sum(x), (HIDDEN,), m.norm.weight, 1e-6), h),
        op="all_reduce_add_rms_norm",
    ),
    Case(
        "f_rms_norm_default_eps",
        lambda m, x, r: (F.rms_norm(h := r + m.sum(x), (HIDDEN,), m.norm.weight), h),
        op="all_reduce_add_rms_norm",
    ),
    Case("fused_rms_norm", _fused_by_name, op="all_reduce_add_rms_norm"),
    Case("views_before_add", _views_before_add, op="all_reduce_add_rms_norm"),
    Case("views_before_norm", _views_before_norm, op="all_reduce_add_rms_norm"),
    Case("batched", _batched, op="all_reduce_add_rms_norm"),
    Case(
        "row_parallel_bias",
        lambda m, x, r: (llama(h := r + (m.sum(x) + m.norm.bias), m.norm.weight), h),
        op="all_reduce_add_rms_norm",
    ),
    Case("in_place", _in_place, op="all_reduce_add_rms_norm"),
    Case(
        "same_ranks_other_group",
        lambda m, x, r: llama(r + fc.all_reduce(x, "sum", m.other), m.norm.weight),
        op="all_reduce_add_rms_norm",
        group="same ranks",
    ),
    Case("embedding", _embedding, op="all_reduce_rms_norm"),
    Case("norm_then_add", _norm_then_add, op="all_reduce_rms_norm"),
    Case(
        "reduced_value_used_again",
        lambda m, x, r: (gpt_oss(h := m.sum(x), m.norm.weight), h * 2),
        op="all_reduce_rms_norm",
    ),
]


def _second_user(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    s = m.sum(x)
    return llama(r + s, m.norm.weight), s * 2


def _sharded_branch(m: Module, x: Tensor, r: Tensor) -> Tensor:
    return torch.relu(m.sum(x))


def _tensor_eps(m: Module, x: Tensor, r: Tensor) -> Tensor:
    f = wide(r + m.sum(x))
    return m.norm.weight * (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + m.norm.eps)).to(x.dtype)


def _other_dim(m: Module, x: Tensor, r: Tensor) -> Tensor:
    f = wide(r + m.sum(x))
    return m.norm.weight * (f * torch.rsqrt(f.pow(2).mean(0, keepdim=True) + 1e-6)).to(x.dtype)


def _per_head(m: Module, x: Tensor, r: Tensor) -> Tensor:
    heads = (r + m.sum(x)).view(-1, 4, HIDDEN // 4)
    return llama(heads, m.norm.weight[: HIDDEN // 4])


LEFT_ALONE = [
    Case("second_user", _second_user, reason="the reduced value has another user: mul"),
    Case(
        "other_group",
        lambda m, x, r: llama(r + fc.all_reduce(x, "sum", m.other), m.norm.weight),
        reason="it reduces over ranks [0, 1], the compiled group is ranks [0, 1, 2, 3]",
        group="fewer ranks",
    ),
    Case(
        "max",
        lambda m, x, r: llama(r + fc.all_reduce(x, "max", m.group), m.norm.weight),
        reason="it reduces by max, only sums are fused",
    ),
    Case(
        "avg",
        lambda m, x, r: llama(r + fc.all_reduce(x, "avg", m.group), m.norm.weight),
        reason="it reduces by avg, only sums are fused",
    ),
    Case("other_dimension", _other_dim, reason="the norm runs over dimensions [0], not over the last one"),
    Case("per_head", _per_head, reason="no RMSNorm reads the sum"),
    Case(
        "gated",
        lambda m, x, r: gated(r + m.sum(x), m.norm.weight, r),
        reason="a gated RMSNorm follows (its output is multiplied by",
    ),
    Case("gate_first", lambda m, x, r: llama(m.sum(x) * F.silu(r), m.norm.weight), reason="it feeds mul"),
    Case(
        "layer_norm",
        lambda m, x, r: F.layer_norm(r + m.sum(x), (HIDDEN,), m.norm.weight, m.norm.bias),
        reason="a LayerNorm follows, not an RMSNorm",
    ),
    Case(
        "fp32_weight",
        lambda m, x, r: gpt_oss(r + m.sum(x), m.norm.weight32),
        reason="fp32 weight with bf16 activations",
    ),
    Case(
        "fp32_weight_and_output",
        lambda m, x, r: llama(r + m.sum(x), m.norm.weight32),
        reason="the norm gives fp32, the reduced value is bf16",
    ),
    Case(
        "fp32_residual",
        lambda m, x, r: llama((r.float() + m.sum(x)), m.norm.weight32).to(BF16),
        reason="the residual is torch.float32, the reduced value torch.bfloat16",
    ),
    Case(
        "cast_before_add",
        lambda m, x, r: llama(r.float() + m.sum(x).float(), m.norm.weight32),
        reason="the reduced value changes its dtype before the add",
    ),
    Case("tensor_eps", _tensor_eps, reason="the norm's epsilon is a tensor"),
    Case(
        "scaled_residual",
        lambda m, x, r: llama(torch.add(r, m.sum(x), alpha=0.5), m.norm.weight),
        reason="the add scales one of its operands",
    ),
    Case(
        "multiplier",
        lambda m, x, r: llama(r + m.sum(x) * 0.22, m.norm.weight),
        reason="no residual add follows; the reduced value feeds mul",
    ),
    Case(
        "broadcast_residual",
        lambda m, x, r: llama(m.norm.proj[:1] + m.sum(x), m.norm.weight),
        reason="the residual is broadcast to the shape of the reduced value",
    ),
    # A vector that is computed may differ between the ranks, of which only the first would add it.
    Case(
        "computed_bias",
        lambda m, x, r: llama(r + (m.sum(x) + m.norm.bias * 2.0), m.norm.weight),
        reason="no RMSNorm reads the sum; it feeds add",
    ),
    Case("bias_without_residual", lambda m, x, r: torch.relu(m.sum(x) + m.norm.bias), reason="it feeds relu"),
    Case(
        "bias_then_norm",
        lambda m, x, r: llama(m.sum(x) + m.norm.bias, m.norm.weight),
        reason="the residual is broadcast to the shape of the reduced value",
    ),
    Case(
        "constant_residual",
        lambda m, x, r: llama(1.0 + m.sum(x), m.norm.weight),
        reason="a constant is added, not a residual",
    ),
    Case(
        "doubled",
        lambda m, x, r: llama((s := m.sum(x)) + s, m.norm.weight),
        reason="the reduced value is added to itself",
    ),
    Case("no_norm", lambda m, x, r: (r + m.sum(x)) @ m.norm.proj, reason="no RMSNorm reads the sum; it feeds mm"),
    Case("no_add", _sharded_branch, reason="no residual add follows; the reduced value feeds relu"),
    Case("output_only", lambda m, x, r: m.sum(x), reason="the reduced value feeds the model's output"),
    Case("integers", lambda m, x, r: m.sum(x.to(torch.int64)) + r.to(torch.int64), reason="it reduces int64"),
]
