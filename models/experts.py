"""Routed experts with their intermediate dimension divided over the ranks.

Checkpoints hold experts in one of two forms, and both are read:

    published, one matrix an expert     experts.0.gate_proj.weight [I, H], experts.0.up_proj.weight, ...
    fused, all experts in one tensor    experts.gate_up_proj [E, 2I, H], experts.down_proj [E, H, I]

Legend: T tokens, H hidden, E experts, I intermediate, K choices per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor, nn

from graphfuse.models.fp8_experts import Fp8Experts
from graphfuse.models.parallel import parameter, reduce_sum, span_copies
from graphfuse.models.quantisation import Fp8Scheme
from graphfuse.models.sharding import TensorParallel, even
from graphfuse.ops.moe import moe_experts
from graphfuse.weights.plan import Copy, TensorPlan


class RoutedExperts(nn.Module):
    """The chosen experts' weighted sum, reduced over the ranks."""

    part_names: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")
    """Of the published form."""

    shard_dims: ClassVar[dict[str, int]] = {"gate_up_proj": 1, "down_proj": 2}

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        tp: TensorParallel,
        *,
        dtype,
        device,
    ) -> None:
        super().__init__()
        self.num_experts, self.activation, self.tp = num_experts, activation, tp
        self.shard = even(intermediate_size, tp, tp.inner_multiple)
        inner = self.shard.local
        self.gate_up_proj = parameter(num_experts, 2 * inner, hidden_size, dtype=dtype, device=device)
        self.down_proj = parameter(num_experts, hidden_size, inner, dtype=dtype, device=device)
        self.fp8: Fp8Experts | None = None

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return reduce_sum(self.partial(x, ids, weights), self.tp)

    def partial(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """This rank's part of the sum, for callers that have more to add before it is reduced."""
        if self.fp8 is not None:
            return self.fp8.experts(self, x, ids, weights)
        return moe_experts(
            x, self.gate_up_proj, self.down_proj, ids, weights, self.num_experts, activation=self.activation
        )

    def quantise(self, scheme: Fp8Scheme) -> None:
        self.fp8 = Fp8Experts(scheme, self.shard)
        self.fp8.convert(self)

    def checkpoint_names(self, path: str) -> list[str]:
        return [f"{path}.0.{part}" for part in self.part_names]

    def tensor_plans(self, path: str, names: frozenset[str]) -> Iterator[TensorPlan]:
        yield from self._weight_plans(path, names)
        if self.fp8 is not None:
            yield from self.fp8.scale_plans(self, path, names)

    def _weight_plans(self, path: str, names: frozenset[str]) -> Iterator[TensorPlan]:
        full, local = self.shard.full, self.shard.local
        hidden = self.down_proj.shape[1]
        gate, up = self.gate_up_proj[:, :local], self.gate_up_proj[:, local:]  # [E, i, H] each
        every = slice(None)
        if f"{path}.gate_up_proj" in names:
            copies, down = [], []
            for s in self.shard.spans:
                there, here = slice(s.source, s.source + s.length), slice(s.target, s.target + s.length)
                copies.append(Copy((every, there, every), gate[:, here]))
                shifted = slice(full + there.start, full + there.stop)
                copies.append(Copy((every, shifted, every), up[:, here]))
                down.append(Copy((every, every, there), self.down_proj[:, :, here]))
            name = f"{path}.gate_up_proj"
            yield TensorPlan(name, (self.num_experts, 2 * full, hidden), tuple(copies), self.gate_up_proj)
            name = f"{path}.down_proj"
            yield TensorPlan(name, (self.num_experts, hidden, full), tuple(down), self.down_proj)
            return
        for e in range(self.num_experts):
            for part, shape, target, dim, owner in zip(
                self.part_names,
                ((full, hidden), (full, hidden), (hidden, full)),
                (gate[e], up[e], self.down_proj[e]),
                (0, 0, 1),
                (self.gate_up_proj, self.gate_up_proj, self.down_proj),
                strict=True,
            ):
                pieces = span_copies(target, self.shard, dim)
                yield TensorPlan(f"{path}.{e}.{part}.weight", shape, pieces, owner)
