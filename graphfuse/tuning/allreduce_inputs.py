"""Tensors that the measured reductions work on: several sets in turn, so that they are not all in L2, refilled because
reductions in place let them grow.

x [T, H] differs by rank; residual [T, H] and weight [H] are the same on every rank, as in a model. Each tensor starts
its own memory: a compiled function is compiled again for a view with another storage offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

EPS = 1e-6
MAX_BUFFERS = 8
BUFFER_BYTES = 128 << 20
CHECKED_ROWS = 256


@dataclass(frozen=True)
class Shape:
    """One point of a measurement: [T, H] of a dtype."""

    num_tokens: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.hidden_size * self.dtype.itemsize

    @property
    def num_buffers(self) -> int:
        """Sets of tensors in turn: more than the L2 holds, where that is not too much memory."""
        return max(1, min(MAX_BUFFERS, BUFFER_BYTES // self.num_bytes))


class Inputs:
    """The tensors of one point."""

    def __init__(self, shape: Shape, group: ProcessGroup, device: torch.device) -> None:
        self.shape = shape
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        own = torch.Generator(device).manual_seed(1 + rank)
        common = torch.Generator(device).manual_seed(0)
        rows_per_rank = -(-shape.num_tokens // world_size)
        self.padded_tokens = rows_per_rank * world_size
        """A multiple of the ranks: x is padded with zeros to it for the forms that give each rank its own rows."""
        own_rows = slice(rank * rows_per_rank, (rank + 1) * rows_per_rank)
        size = (self.padded_tokens, shape.hidden_size)
        self.source, self.padded_x, self.residual, self.own_residual = [], [], [], []
        for _ in range(shape.num_buffers):
            source = torch.randn(size, generator=own, device=device, dtype=shape.dtype)
            source[shape.num_tokens :] = 0
            residual = torch.randn(size, generator=common, device=device, dtype=shape.dtype)
            self.source.append(source)
            self.padded_x.append(source.clone())
            self.own_residual.append(residual[own_rows].clone())
            self.residual.append(residual[: shape.num_tokens])
        self.x = [x[: shape.num_tokens] for x in self.padded_x]
        self.weight = torch.rand(shape.hidden_size, generator=common, device=device, dtype=shape.dtype)
        self._expected = self._expect(group)

    def refill(self) -> None:
        """Reductions in place multiply x at every call; without this it would overflow."""
        for x, source in zip(self.padded_x, self.source, strict=True):
            x.copy_(source)

    def refill_into(self, others: list[Tensor]) -> None:
        """The same for x that stands in other memory."""
        for x, source in zip(others, self.source, strict=True):
            x.copy_(source[: self.shape.num_tokens])

    def mistake(self, normed: Tensor, summed: Tensor | None) -> str | None:
        """What is wrong with the results of the first set of tensors, if anything. A fast kernel must also be right."""
        limit = 1e-3 if self.shape.dtype == torch.float32 else 2e-2
        rows, *expected = self._expected
        for name, actual, wanted in zip(("normed value", "residual"), (normed, summed), expected, strict=True):
            if actual is None:
                continue
            if actual.shape != (self.shape.num_tokens, self.shape.hidden_size):
                return f"its {name} has the shape {list(actual.shape)}"
            error = (torch.linalg.vector_norm(actual[rows].float() - wanted) / torch.linalg.vector_norm(wanted)).item()
            if not error <= limit:  # NaN too
                return f"its {name} is wrong by {error:.1e}"
        return None

    def _expect(self, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        """Some rows from the first to the last, and the normed value and residual there in float32."""
        count = min(self.shape.num_tokens, CHECKED_ROWS)
        rows = torch.linspace(0, self.shape.num_tokens - 1, count, device=self.weight.device).round().long()
        total = self.source[0][rows].float()
        dist.all_reduce(total, group=group)
        return rows, *add_norm(total, self.residual[0][rows].float(), self.weight.float())


class SymmetricBuffers:
    """x in torch symmetric memory, for torch's own kernels over it: made once for all points of a run."""

    def __init__(self, shapes: Iterable[Shape], device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        shapes = list(shapes)
        self._buffers: list[Tensor] = []
        self._handles: list[Any] = []
        for index in range(max(shape.num_buffers for shape in shapes)):
            numel = max(s.num_tokens * s.hidden_size for s in shapes if s.num_buffers > index)
            self._buffers.append(symmetric_memory.empty(numel, dtype=shapes[0].dtype, device=device))

    def connect(self, group: ProcessGroup) -> None:
        """Map the peers' buffers: collective, when every rank has its own, since a rank that fails alone would leave
        the others waiting."""
        import torch.distributed._symmetric_memory as symmetric_memory

        self._handles = [symmetric_memory.rendezvous(buffer, group.group_name) for buffer in self._buffers]

    def x(self, shape: Shape) -> list[Tensor]:
        """One tensor a set, [T, H]."""
        numel, size = shape.num_tokens * shape.hidden_size, (shape.num_tokens, shape.hidden_size)
        return [buffer[:numel].view(size) for buffer in self._buffers[: shape.num_buffers]]


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What a Llama layer does after its all-reduce: (normed, residual + x)."""
    summed = residual + x
    f = summed.float()
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * f.to(summed.dtype), summed


def compiled_add_norm(hidden_size: int, max_tokens: int, dtype: torch.dtype, device: torch.device) -> Callable:
    """`add_norm` through Inductor: one graph for one token, one for all other counts; the hidden size is a constant.
    Compiled at the largest count, for which Inductor then chooses its tiles. On the CPU it stays eager."""
    if device.type == "cpu":
        return add_norm
    torch._dynamo.reset()  # another hidden size must not become a dynamic one
    compiled = torch.compile(add_norm)
    x, residual = (torch.zeros(max_tokens, hidden_size, dtype=dtype, device=device) for _ in range(2))
    if max_tokens > 1:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(residual, 0)
    compiled(x, residual, torch.ones(hidden_size, dtype=dtype, device=device))
    return compiled
