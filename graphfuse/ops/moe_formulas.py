"""Tell which of the gated activations of `graphfuse::moe_experts` a function computes, however it is written.

It is computed, in float64 on a grid of gates and ups, and compared with the formulas. Legend: N points of the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from graphfuse.ops.moe_reference import ACTIVATIONS


@dataclass(frozen=True)
class Formula:
    name: str
    """A key of `ACTIVATIONS`."""

    limit: float | None
    """To which gate is clamped from above, and up on both sides."""

    swapped: bool = False
    """What the function takes for the gate is the up of the formula."""


def identify(compute: Callable[[Tensor, Tensor], Tensor], limits: Collection[float] = ()) -> Formula | None:
    """The formula of a function of (gate, up), `[N]` each; None if it is another one or cannot be computed alone.

    Args:
        limits: numbers to which it may clamp.
    """
    limits = sorted({abs(float(limit)) for limit in limits})
    with unset_fake_temporarily(), torch.no_grad():
        gate, up = _grid(limits)
        try:
            got = compute(gate, up)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return None
        for swapped in (False, True):
            for formula, wanted in _known(limits, *((up, gate) if swapped else (gate, up)), swapped):
                if got.dtype == wanted.dtype and got.shape == wanted.shape and _close(got, wanted):
                    return formula
    return None


def _known(limits: list[float], gate: Tensor, up: Tensor, swapped: bool) -> Iterator[tuple[Formula, Tensor]]:
    for limit in (None, *limits):
        a = gate if limit is None else gate.clamp(max=limit)
        b = up if limit is None else up.clamp(min=-limit, max=limit)
        for name, formula in ACTIVATIONS.items():
            yield Formula(name, limit, swapped), formula(a, b)


def _grid(limits: list[float]) -> tuple[Tensor, Tensor]:
    """Pairs of values, small and large, on both sides of every limit."""
    points = [0.0, *torch.linspace(-9.1, 9.3, 47, dtype=torch.float64, device="cpu").tolist()]
    points += [-400.5, -31.7, 29.3, 400.5]
    points += [sign * factor * limit for limit in limits for sign in (-1, 1) for factor in (0.5, 0.999, 1.001, 2)]
    values = torch.tensor(points, dtype=torch.float64, device="cpu")
    return values.repeat_interleave(len(points)), values.repeat(len(points))


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)
