"""Our own fused all-reduce: Triton kernels over symmetric memory, without multicast, as a comm backend.

`one_shot` pushes rows to every peer, `two_shot` to their owner; see graphfuse/kernels. Both take any number of tokens:
a message larger than the buffer goes through it in pieces, one launch each. Buffers are made once per hidden size and
variant, stay within BUFFER_BYTES on each GPU for a hidden size, and serve every reduction of every model on the group.

Kernels are launched as programmatic dependents where the GPU can (Hopper on): the launch itself overlaps the end of the
kernel before, and nothing is read or written until that kernel has ended (`griddepcontrol.wait` comes first).

With GRAPHFUSE_COMM_TIMEOUT (seconds) set, a rank that waits longer for a peer's row gives up with a `GroupError`
instead of waiting for ever. That is for finding errors: each eager call then synchronises.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from graphfuse.comm.call import FusedCall
from graphfuse.comm.control import ControlChannel
from graphfuse.comm.symmetric_memory import SymmetricBuffer, allocate
from graphfuse.comm.timeout import TIMEOUT_VARIABLE, comm_timeout
from graphfuse.comm.workspace import ANY_SIZE, WorkspaceRequest
from graphfuse.errors import GroupError
from graphfuse.kernels import norm_epilogue

if norm_epilogue.available():
    import triton
    import triton.language as tl

    from graphfuse.kernels.one_shot_all_reduce import one_shot_all_reduce
    from graphfuse.kernels.self_marking import SLOTS, STRIDE_ELEMENTS
    from graphfuse.kernels.two_shot_all_reduce import two_shot_all_reduce

BUFFER_BYTES = 256 << 20
# Beyond this many rows a launch is long enough that the gap to the next one does not count.
MOST_ROWS = 8192
# The type of a row's slot, one beside the buffer for each row.
SLOT_NUMBER = torch.int32
# A load of a waiting row and the check take half a microsecond.
SPINS_PER_SECOND = 2_000_000
# Polls are counted in 32 bits: no time-out is longer than 18 minutes.
MOST_SPINS = (1 << 31) - 1


@dataclass(frozen=True)
class Rows:
    """The buffer of one hidden size and variant."""

    buffer: SymmetricBuffer
    slots: torch.Tensor
    """[rows] int32: the slot of each row's next call."""
    stride: int

    @property
    def count(self) -> int:
        return self.slots.shape[0]


class SymmMemWorkspace:
    """The symmetric buffers of one group and dtype."""

    quantises = True
    capacity = ANY_SIZE

    def __init__(self, rank: int, world_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rank, self._world_size = rank, world_size
        self._dtype, self._device = dtype, device
        self._rows: dict[tuple[int, str | None], Rows] = {}
        self._outgrown: list[Rows] = []  # recorded graphs may hold their addresses
        self._status = torch.zeros(1, dtype=torch.int32, device=device)
        self._spin_limit = spin_limit()
        self._dependent_launch = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)

    @property
    def num_bytes(self) -> int:
        held = [*self._rows.values(), *self._outgrown]
        return sum(rows.buffer.local.nbytes + rows.slots.nbytes for rows in held)

    def reserve(self, request: WorkspaceRequest, channel: ControlChannel) -> None:
        for variant, num_rows in plan_rows(request, self._world_size).items():
            known = self._rows.get((request.hidden_size, variant))
            if known is not None and known.count >= num_rows:
                continue
            stride = row_stride(request.hidden_size)
            elements = SLOTS * cells_per_row(variant, num_rows, self._world_size) * stride
            word = torch.int16 if self._dtype.itemsize == 2 else torch.int32
            # Before the collective: nothing after it may fail on one rank, or the ranks would remember different rows.
            slots = torch.zeros(num_rows, dtype=SLOT_NUMBER, device=self._device)
            buffer = allocate(elements, word, request.group, self._device, channel)
            if known is not None:
                self._outgrown.append(known)
            self._rows[request.hidden_size, variant] = Rows(buffer, slots, stride)

    def accepts(self, call: FusedCall) -> bool:
        return call.x.dtype == self._dtype and any(hidden_size == call.hidden_size for hidden_size, _ in self._rows)

    def run(self, call: FusedCall, variant: str | None) -> tuple[torch.Tensor, ...]:
        rows = self._rows[call.hidden_size, variant]
        num_tokens = call.x.numel() // call.hidden_size
        normed, summed = torch.empty_like(call.x), torch.empty_like(call.x)
        outputs: tuple[torch.Tensor, ...] = (normed, summed)
        if call.fp8 is not None:
            outputs += norm_epilogue.empty_fp8(call.x, call.fp8, call.scale)
        for first in range(0, num_tokens, rows.count):
            self._launch(call, variant, rows, outputs, slice(first, min(first + rows.count, num_tokens)))
        if self._spin_limit and not _capturing(call.x):
            self._check_arrival()
        return outputs

    def _launch(
        self, call: FusedCall, variant: str | None, rows: Rows, outputs: tuple[torch.Tensor, ...], piece: slice
    ) -> None:
        def part(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.view(-1, tensor.shape[-1])[piece]

        x, normed, summed = part(call.x), part(outputs[0]), part(outputs[1])
        quantised = scale = normed
        if call.fp8 is not None:
            quantised = part(outputs[2])
            scale = outputs[3] if call.fp8 == "static" else part(outputs[3])
        block_size = triton.next_power_of_2(call.hidden_size)
        kernel = two_shot_all_reduce if variant == "two_shot" else one_shot_all_reduce
        kernel[(x.shape[0],)](
            x,
            x if call.residual is None else part(call.residual),
            x if call.weight is None else call.weight,
            normed,
            summed,
            quantised,
            scale,
            rows.buffer.pointers,
            rows.slots,
            self._status,
            rows.count,
            rows.stride,
            call.hidden_size,
            call.eps,
            call.weight_bias,
            WORD=tl.int16 if self._dtype.itemsize == 2 else tl.int32,
            RANK=self._rank,
            WORLD_SIZE=self._world_size,
            HAS_RESIDUAL=call.residual is not None,
            HAS_WEIGHT=call.weight is not None,
            CAST_BEFORE_WEIGHT=call.cast_before_weight,
            FP8=norm_epilogue.FP8_FORMS[call.fp8],
            SPIN_LIMIT=self._spin_limit,
            DEPENDENT_LAUNCH=self._dependent_launch,
            MORE_TO_COME=piece.stop * call.hidden_size < call.x.numel(),
            BLOCK_SIZE=block_size,
            num_warps=norm_epilogue.num_warps(block_size),
            **({"launch_pdl": True} if self._dependent_launch else {}),
        )

    def _check_arrival(self) -> None:
        row = int(self._status.item()) - 1
        if row >= 0:
            raise GroupError(
                f"Rank {self._rank} waited longer than {TIMEOUT_VARIABLE} allows for row {row} of a peer. Look for the "
                "first error of the other ranks, and make sure that all of them make the same calls."
            )

    def close(self) -> None:
        self._rows.clear()
        self._outgrown.clear()


def row_stride(hidden_size: int) -> int:
    """Elements from one row's cell to the next."""
    return -(-hidden_size // STRIDE_ELEMENTS) * STRIDE_ELEMENTS


def cells_per_row(variant: str | None, num_rows: int, world_size: int) -> int:
    """Cells of one slot of a buffer for `num_rows` rows."""
    if variant == "two_shot":
        return (world_size - 1) * (num_rows // world_size) + num_rows
    return (world_size - 1) * num_rows


def plan_rows(request: WorkspaceRequest, world_size: int) -> dict[str | None, int]:
    """Rows for each variant of a request, so that all of them together stay within BUFFER_BYTES.

    The variants with a limit (small messages) get what they need first, up to a half when there are others.
    """
    row_bytes = request.hidden_size * request.dtype.itemsize
    cell_bytes = SLOTS * row_stride(request.hidden_size) * request.dtype.itemsize
    budget = BUFFER_BYTES
    planned: dict[str | None, int] = {}
    variants = sorted(request.variants, key=lambda variant: variant[1] or ANY_SIZE)
    for index, (variant, max_bytes) in enumerate(variants):
        share = budget // (len(variants) - index)
        unit = world_size if variant == "two_shot" else 1
        per_unit = cell_bytes * cells_per_row(variant, unit, world_size) + unit * SLOT_NUMBER.itemsize
        wanted = MOST_ROWS if max_bytes is None else min(max(max_bytes // row_bytes, 1), MOST_ROWS)
        units = max(min(-(-wanted // unit), share // per_unit), 1)
        planned[variant] = units * unit
        budget -= units * per_unit
    return planned


def planned_bytes(request: WorkspaceRequest, world_size: int) -> int:
    """GPU memory of the buffers of `plan_rows`."""
    row_bytes = SLOTS * row_stride(request.hidden_size) * request.dtype.itemsize
    planned = plan_rows(request, world_size)
    return sum(row_bytes * cells_per_row(variant, num_rows, world_size) for variant, num_rows in planned.items())


def spin_limit(environment: Callable[[str], str | None] = os.environ.get) -> int:
    """Polls of a waiting row after which it gives up; 0, without end, where GRAPHFUSE_COMM_TIMEOUT is not set."""
    seconds = comm_timeout(environment)
    return 0 if seconds is None else int(min(max(seconds * SPINS_PER_SECOND, 1), MOST_SPINS))


def _capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class SymmMemBackend:
    """Makes `SymmMemWorkspace`s."""

    keeps_workspaces = False

    def refusal(self, request: WorkspaceRequest) -> str | None:
        if not norm_epilogue.available():
            return "Triton is not installed, and the symm_mem kernels are written in it."
        if request.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return "A CUDA graph is being captured; prepare the model before capturing."
            needed = planned_bytes(request, request.group.size())
            free = torch.cuda.mem_get_info(request.device)[0]
            if free < needed:
                torch.cuda.empty_cache()
                free = torch.cuda.mem_get_info(request.device)[0]
            if free < needed:
                return f"The symmetric buffers take {needed >> 20} MiB of GPU memory, and {free >> 20} MiB are free."
        return None

    def create(self, request: WorkspaceRequest, channel: ControlChannel) -> SymmMemWorkspace:
        return SymmMemWorkspace(channel.rank, channel.size, request.dtype, request.device)
