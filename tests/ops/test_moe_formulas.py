"""A gated activation is told by what it computes, not by how it is written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graphfuse.ops.moe_formulas import Formula, identify


def clamped(gate, up):
    return gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)


def oai(gate, up, alpha=1.702):
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


KNOWN = {
    "silu": (lambda g, u: F.silu(g) * u, (), Formula("silu", None)),
    "silu by its formula": (lambda g, u: u * g / (1 + (-g).exp()), (), Formula("silu", None)),
    "gelu": (lambda g, u: F.gelu(g) * u, (), Formula("gelu", None)),
    "gelu_tanh": (lambda g, u: F.gelu(g, approximate="tanh") * u, (), Formula("gelu_tanh", None)),
    "swapped": (lambda g, u: F.silu(u) * g, (), Formula("silu", None, swapped=True)),
    "clamped": (lambda g, u: oai(*clamped(g, u)), (7.0, 1.702), Formula("swiglu_oai", 7.0)),
    "a limit that is not used": (lambda g, u: F.silu(g) * u, (7.0,), Formula("silu", None)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_formula_is_told(name):
    compute, limits, formula = KNOWN[name]
    assert identify(compute, limits) == formula


UNKNOWN = {
    "relu": lambda g, u: F.relu(g) * u,
    "a sum": lambda g, u: F.silu(g) + u,
    "another alpha": lambda g, u: oai(g, u, 1.70201),
    "a limit that nobody names": lambda g, u: oai(*clamped(g, u)),
    "a limit on one side": lambda g, u: F.silu(g.clamp(max=7.0)) * u.clamp(max=7.0),
    "in float32": lambda g, u: (F.silu(g.float()) * u.float()).double(),
    "of another dtype": lambda g, u: (F.silu(g) * u).float(),
    "reads what is not there": lambda g, u: F.silu(g) * g.missing,
    "of another shape": lambda g, u: (F.silu(g) * u)[1:],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_anything_else_is_none(name):
    assert identify(UNKNOWN[name]) is None


def test_it_computes_under_a_default_device_and_fake_tensors():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), torch.device("meta"):
        assert identify(lambda g, u: F.silu(g) * u) == Formula("silu", None)
