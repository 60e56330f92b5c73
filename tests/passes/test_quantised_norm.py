"""FP8 behind a fused reduction: which graphs get the op that rounds too, which keep the plain fused op and why, and
what both compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor, nn

import graphfuse
from graphfuse import FuseConfig
from graphfuse.ops.fp8_linear import FP8, fp8_linear, quantise_fp8
from graphfuse.passes.fuse_quantised_norm import FUSE_QUANTISED_NORM
from graphfuse.testing import assert_golden, fake_tp, trace
from tests.passes.zoo import gpt_oss, llama

OP, PLAIN = "all_reduce_add_rms_norm_fp8", "all_reduce_add_rms_norm"
GOLDEN = Path(__file__).parents[1] / "golden"
HIDDEN = 256
BF16 = torch.bfloat16


class Module(nn.Module):
    """x [T, H] is this rank's partial sum; its results are what `forward` makes of the sum and the residual."""

    def __init__(self, case: Case, group: Any, hidden_size: int = HIDDEN) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.case, self.group = case, group
        self.weight = nn.Parameter(random(hidden_size).to(BF16))
        self.bias = nn.Parameter(random(hidden_size).to(BF16))
        self.router = nn.Parameter(random(8, hidden_size).to(BF16))
        self.proj = nn.Parameter(random(16, hidden_size).to(FP8), requires_grad=False)
        self.proj_scale = nn.Parameter(torch.full((16,), 0.1))
        self.scale, self.other_scale = nn.Parameter(torch.tensor(0.02)), nn.Parameter(torch.tensor(0.03))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return self.case.forward(self, x, residual)

    def sum(self, x: Tensor) -> Tensor:
        return fc.all_reduce(x, "sum", self.group)

    def project(self, quantised: Tensor, scale: Tensor) -> Tensor:
        return fp8_linear(quantised, scale, self.proj, self.proj_scale, None, None, BF16)


@dataclass(frozen=True)
class Case:
    name: str
    forward: Callable[[Module, Tensor, Tensor], tuple[Tensor, ...]]
    roundings: int = 0
    """Left in the graph beside the fused op's."""
    reason: str = ""
    hidden_size: int = HIDDEN
    op: str = PLAIN
    """What a case that is left alone becomes."""


def _form(form: str) -> Callable[[Module, Tensor, Tensor], tuple[Tensor, ...]]:
    def forward(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        h = r + m.sum(x)
        return m.project(*quantise_fp8(llama(h, m.weight), form, m.scale if form == "static" else None)), h

    return forward


def _no_residual(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    h = m.sum(x)
    return m.project(*quantise_fp8(gpt_oss(h, m.weight), "token", None)), h + r


def _shared(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    """Two linears that round the same input alike, and a router that reads it as it is."""
    n = llama(r + m.sum(x), m.weight)
    ups, downs = m.project(*quantise_fp8(n, "group", None)), m.project(*quantise_fp8(n, "group", None))
    return ups, downs, n @ m.router.t()


def _two_scales(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    n = llama(r + m.sum(x), m.weight)
    return m.project(*quantise_fp8(n, "static", m.scale)), m.project(*quantise_fp8(n, "static", m.other_scale))


def _widened(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    return (m.project(*quantise_fp8(llama(r + m.sum(x), m.weight).float(), "token", None)),)


def _biased(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    h = r + (m.sum(x) + m.bias)
    return m.project(*quantise_fp8(llama(h, m.weight), "group", None)), h


FUSED = [
    Case("static", _form("static")),
    Case("token", _form("token")),
    Case("group", _form("group")),
    Case("no_residual", _no_residual),
    Case("shared", _shared),
    Case("two_scales", _two_scales, roundings=1),
    Case("widened", _widened),
    Case("biased", _biased),
]


def _reshaped(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    n = llama(r + m.sum(x), m.weight)
    quantised, scale = quantise_fp8(n.unsqueeze(0), "token", None)
    return (m.project(quantised, scale),)


def _narrowed(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    return (m.project(*quantise_fp8(llama(r + m.sum(x), m.weight).half(), "token", None)),)


def _scale_of_the_sum(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    h = r + m.sum(x)
    return (m.project(*quantise_fp8(llama(h, m.weight), "static", h.float().abs().amax() / 448)),)


def _not_the_norm(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    h = r + m.sum(x)
    return m.project(*quantise_fp8(h, "token", None)), llama(h, m.weight)


def _second_user(m: Module, x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    s = m.sum(x)
    return m.project(*quantise_fp8(llama(r + s, m.weight), "token", None)), s * 2


LEFT_ALONE = [
    Case("reshaped", _reshaped, 1, "changes its shape or dtype before it is rounded by quantise_fp8"),
    Case("narrowed", _narrowed, 1, "changes its shape or dtype before it is rounded by quantise_fp8"),
    Case("scale_of_the_sum", _scale_of_the_sum, 1, "the scale of the rounding is computed after the reduction"),
    Case("not_the_norm", _not_the_norm, 1, "the norm's output is not rounded to FP8"),
    Case("odd_groups", _form("group"), 1, "the hidden size is 192, not whole groups of 128", hidden_size=192),
    Case("second_user", _second_user, 1, "no RMSNorm follows whose output is rounded to FP8", op=""),
]


@pytest.fixture(scope="module")
def group():
    with fake_tp(4) as group:
        yield group


def traced(case: Case, group: Any, **config: Any) -> Any:
    inputs = (torch.ones(6, case.hidden_size, dtype=BF16), torch.ones(6, case.hidden_size, dtype=BF16))
    return trace(Module(case, group, case.hidden_size), inputs, group, config=FuseConfig(**config))


def roundings(graph_module: Any) -> int:
    return sum("quantise_fp8" in str(node.target) for node in graph_module.graph.nodes)


@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
def test_the_rounding_becomes_a_result_of_the_fused_op(case, group):
    result = traced(case, group)
    assert [site.op for site in result.report.sites] == [OP]
    assert roundings(result.after) == case.roundings
    assert_golden(result.after, GOLDEN / "quantised" / f"{case.name}.txt")


@pytest.mark.parametrize("case", LEFT_ALONE, ids=lambda case: case.name)
def test_what_is_no_rounding_of_the_norm_keeps_the_plain_fused_op(case, group):
    result = traced(case, group)
    (site,) = result.report.sites
    assert (site.op or "") == case.op
    assert roundings(result.after) == case.roundings
    (site,) = traced(case, group, rules=[FUSE_QUANTISED_NORM]).report.sites
    assert case.reason in site.outcome()


def test_without_the_rule_the_norm_is_fused_and_rounded_behind(group):
    result = traced(FUSED[0], group, disabled_rules={OP})
    assert [site.op for site in result.report.sites] == [PLAIN]
    assert roundings(result.after) == 1


def run_cases(group: Any) -> dict[str, tuple[bool, bool]]:
    """For each case: whether the compiled module gives the eager one's results bit for bit, and all ranks the same."""
    found = {}
    with torch.no_grad():
        for case in FUSED:
            module = Module(case, group).requires_grad_(False)
            compiled = graphfuse.compile(module, group)
            equal = alike = True
            for length in (1, 7):
                common = torch.Generator().manual_seed(length)
                own = torch.Generator().manual_seed(100 * length + dist.get_rank(group))
                residual = torch.randn(length, HIDDEN, generator=common).to(BF16)
                x = torch.randn(length, HIDDEN, generator=own).to(BF16)
                for a, b in zip(compiled(x, residual), module(x, residual), strict=True):
                    # The bias of a row-parallel linear is added to a partial sum, which rounds elsewhere.
                    same = torch.equal(a, b) or (case.name == "biased" and near(a, b))
                    equal = equal and same
                    others = [torch.empty_like(a) for _ in range(dist.get_world_size(group))]
                    dist.all_gather(others, a.contiguous(), group=group)
                    alike = alike and all(torch.equal(a, other) for other in others)
            found[case.name] = (equal and [site.op for site in compiled.report.sites] == [OP], alike)
    return found


def near(a: Tensor, b: Tensor) -> bool:
    error, size = (a - b).double().pow(2).mean().sqrt(), b.double().pow(2).mean().sqrt()
    return bool(error < 0.02 * size)


@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_results_are_those_of_the_eager_module_on_every_rank(ranks, tp):
    for found in ranks.run(tp, run_cases, timeout=120.0):
        assert found == {case.name: (True, True) for case in FUSED}
