"""What is measured: each way to all-reduce, add and normalise, as a function of the set of inputs in turn.

| candidate | |
|---|---|
| unfused | NCCL in place, then add and norm compiled by Inductor |
| torch/one_shot, torch/two_shot | torch's kernels, on x that stands in symmetric memory, then the same norm |
| flashinfer/oneshot, symm_mem/…, reference | graphfuse's comm backends, each in a pool of its own, at every size |
| sequence_parallel | NCCL reduce-scatter, add and norm on own rows, all-gather of normed rows; residual sharded |
| dispatched | what graphfuse runs here: `dispatch` with the ranges of `decide(facts, allreduce="auto")` |

A candidate that cannot run is absent, with a reason that all ranks agree on. No multicast anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from graphfuse.comm import dispatch, reference
from graphfuse.comm.call import FusedCall
from graphfuse.comm.control import control_channel
from graphfuse.comm.pool import Pool, process_pool
from graphfuse.comm.refusals import flashinfer_refusals, symm_mem_refusals
from graphfuse.comm.table import FLASHINFER_BUFFER_BYTES, REFERENCE_ONLY, VARIANTS, SizeRange
from graphfuse.facts import Facts
from graphfuse.gate import Decision, decide
from graphfuse.tuning.agreement import attempt
from graphfuse.tuning.allreduce_inputs import EPS, Inputs, Shape, SymmetricBuffers, compiled_add_norm

UNFUSED, DISPATCHED, SEQUENCE_PARALLEL, REFERENCE = "unfused", "dispatched", "sequence_parallel", "reference"
TORCH = ("torch/one_shot", "torch/two_shot")
ELIGIBLE = tuple(
    f"{backend}/{variant}" if variant else backend for backend in VARIANTS for variant in VARIANTS[backend]
)
"""The candidates that a size table may choose."""
TUNED = (UNFUSED, *ELIGIBLE)
BENCHED = (UNFUSED, *TORCH, *ELIGIBLE, SEQUENCE_PARALLEL, DISPATCHED)
REFUSALS = {"flashinfer": flashinfer_refusals, "symm_mem": symm_mem_refusals}

Outputs = tuple[Tensor, Tensor | None]
"""The normed value of all rows, and the residual where each rank has all of it."""


@dataclass(frozen=True)
class Candidate:
    """One way, at one size. `call(i)` works on the i-th set of inputs; `refill` makes all sets new."""

    name: str
    call: Callable[[int], Outputs]
    refill: Callable[[], None]


class Candidates:
    """The ways that can run on this group, set up for one hidden size at a time. Collective throughout."""

    def __init__(
        self, names: Sequence[str], shapes: Sequence[Shape], facts: Facts, group: ProcessGroup, device: torch.device
    ) -> None:
        self.names = tuple(names)
        self.absent: dict[str, str] = {}
        """Why a candidate is missing; the first reason, where sizes have different ones."""
        self._shapes, self._facts, self._group, self._device = tuple(shapes), facts, group, device
        self._channel = control_channel(group)
        self._pools = {name: Pool(process_pool.backends) for name in names if "/" in name and name not in TORCH}
        self._prepared: list[tuple[Pool, int]] = []
        self._symmetric: SymmetricBuffers | None = None
        self._decision: Decision | None = None
        if device.type == "cpu":
            for name in (*TORCH, SEQUENCE_PARALLEL):
                self.miss(name, "It is measured on GPUs only.")
        elif any(name in names for name in TORCH):
            self._symmetric, reason = self._make_symmetric()
            if reason:
                for name in TORCH:
                    self.miss(name, reason)

    def miss(self, name: str, reason: str) -> None:
        if name in self.names:
            self.absent.setdefault(name, reason)

    def prepare(self, hidden_size: int) -> None:
        """Compile the norm and make the workspaces for a hidden size; `release` undoes it."""
        shapes = [shape for shape in self._shapes if shape.hidden_size == hidden_size]
        dtype, most = shapes[0].dtype, max(shape.num_tokens for shape in shapes)
        self._add_norm = compiled_add_norm(hidden_size, most, dtype, self._device)
        for name, pool in self._pools.items():
            ranges, reason = self._ranges(name, hidden_size, dtype)
            if reason is None:
                outcome = self._prepare(pool, Decision(True, ranges), hidden_size, dtype)
                if outcome.ranges == REFERENCE_ONLY:
                    reason = outcome.reasons[-1]
            if reason is not None:
                self.miss(name, reason)
        if DISPATCHED in self.names:
            decision = decide(self._facts, dtype=dtype, hidden_size=hidden_size)
            self._decision = self._prepare(process_pool, decision, hidden_size, dtype) if decision.allowed else None
            if not decision.allowed:
                self.miss(DISPATCHED, " ".join(decision.reasons))

    def release(self, hidden_size: int) -> None:
        """Undo `prepare`. Recorded graphs of these candidates must be gone."""
        dtype = self._shapes[0].dtype
        for pool, prepared in self._prepared:
            if prepared == hidden_size:
                pool.release(self._group, dtype=dtype, hidden_size=hidden_size)
        self._prepared = [(pool, prepared) for pool, prepared in self._prepared if prepared != hidden_size]

    def dispatched(self, shape: Shape) -> str | None:
        """The candidate that serves this size as `dispatched`."""
        chosen = dispatch.choose(self._decision.ranges, shape.num_bytes) if self._decision else None
        return chosen.label if chosen else None

    def at(self, inputs: Inputs) -> list[Candidate]:
        """The candidates for one size, in the order of their names."""
        found = [self._candidate(name, inputs) for name in self.names]
        return [candidate for candidate in found if candidate is not None]

    def _make_symmetric(self) -> tuple[SymmetricBuffers | None, str | None]:
        made, reason = attempt(self._channel, lambda: SymmetricBuffers(self._shapes, self._device))
        if made is None:
            return None, reason
        _, reason = attempt(self._channel, lambda: made.connect(self._group))
        return (None, reason) if reason else (made, None)

    def _prepare(self, pool: Pool, decision: Decision, hidden_size: int, dtype: torch.dtype) -> Decision:
        outcome = pool.prepare(self._group, decision, dtype=dtype, hidden_size=hidden_size, device=self._device)
        self._prepared.append((pool, hidden_size))
        return outcome

    def _ranges(self, name: str, hidden_size: int, dtype: torch.dtype) -> tuple[tuple[SizeRange, ...], str | None]:
        """One backend at all sizes it takes, or why the gate refuses it."""
        backend, variant = name.split("/")
        refusals = REFUSALS[backend](self._facts, dtype=dtype, hidden_size=hidden_size)
        if refusals:
            return (), " ".join(refusals)
        if backend != "flashinfer":
            return (SizeRange(None, backend, variant),), None
        # For the largest message of the whole run: FlashInfer's workspaces are never freed, so one is made, not three.
        row_bytes = hidden_size * dtype.itemsize
        limit = (FLASHINFER_BUFFER_BYTES - 1) // self._facts.world_size
        limit = min(limit, max(shape.num_bytes for shape in self._shapes)) // row_bytes * row_bytes
        return (SizeRange(limit, backend, variant), *REFERENCE_ONLY), None

    def _candidate(self, name: str, inputs: Inputs) -> Candidate | None:
        if name in TORCH:
            return self._over_symmetric_memory(name, inputs)
        if name == UNFUSED:
            return Candidate(name, lambda i: self._unfused(inputs, i), inputs.refill)
        if name == SEQUENCE_PARALLEL:
            return self._sequence_parallel(inputs)
        if name == REFERENCE:
            return self._fused(name, inputs, lambda call: reference.run(call, self._group))
        if name == DISPATCHED:
            if self._decision is None:
                return None
            return self._fused(name, inputs, lambda call: dispatch.run(call, self._group.group_name))
        return self._by_backend(name, inputs)

    def _by_backend(self, name: str, inputs: Inputs) -> Candidate | None:
        backend, variant = name.split("/")
        shape = inputs.shape
        active = self._pools[name].active(self._group.group_name, shape.dtype, shape.hidden_size)
        workspace = active.workspaces.get(backend) if active else None
        if workspace is None:
            return None
        if shape.num_bytes > workspace.capacity or not workspace.accepts(_call(inputs, 0)):
            self.miss(name, f"It does not take {shape.num_tokens} tokens of hidden size {shape.hidden_size}.")
            return None
        return self._fused(name, inputs, lambda call: workspace.run(call, variant))

    def _fused(self, name: str, inputs: Inputs, serve: Callable[[FusedCall], tuple[Tensor, ...]]) -> Candidate:
        def call(i: int) -> Outputs:
            normed, summed = serve(_call(inputs, i))[:2]
            return normed, summed

        return Candidate(name, call, inputs.refill)

    def _unfused(self, inputs: Inputs, i: int) -> Outputs:
        dist.all_reduce(inputs.x[i], group=self._group)
        return self._add_norm(inputs.x[i], inputs.residual[i], inputs.weight)

    def _over_symmetric_memory(self, name: str, inputs: Inputs) -> Candidate | None:
        if self._symmetric is None:
            return None
        x = self._symmetric.x(inputs.shape)
        ops = torch.ops.symm_mem
        reduce = ops.one_shot_all_reduce if name == TORCH[0] else ops.two_shot_all_reduce_

        def call(i: int) -> Outputs:
            return self._add_norm(reduce(x[i], "sum", self._group.group_name), inputs.residual[i], inputs.weight)

        return Candidate(name, call, lambda: inputs.refill_into(x))

    def _sequence_parallel(self, inputs: Inputs) -> Candidate | None:
        if SEQUENCE_PARALLEL in self.absent:
            return None
        world_size = dist.get_world_size(self._group)
        if inputs.shape.num_tokens < world_size:
            return None
        rows = inputs.padded_tokens // world_size

        def call(i: int) -> Outputs:
            x = inputs.padded_x[i]
            own = x.new_empty(rows, x.shape[1])
            dist.reduce_scatter_tensor(own, x, group=self._group)
            normed, _ = self._add_norm(own, inputs.own_residual[i], inputs.weight)
            gathered = torch.empty_like(x)
            dist.all_gather_into_tensor(gathered, normed, group=self._group)
            return gathered[: inputs.shape.num_tokens], None

        return Candidate(SEQUENCE_PARALLEL, call, inputs.refill)


def _call(inputs: Inputs, i: int) -> FusedCall:
    return FusedCall(inputs.x[i], inputs.residual[i], inputs.weight, EPS, x_is_dead=True)
