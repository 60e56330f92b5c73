"""The symm_mem kernels at world sizes 2 to 8: the ranks are streams of one process, spread over the GPUs there are.

    python tests/gpu/symm_mem_worlds.py --points 200

Real kernels, real memory, the links of two GPUs if there are two, and as many ranks as a host of eight has; only its
links and its speed are not tested. At random points (tokens, hidden size, dtype, eps, world size, form, variant) the
results of every rank are compared with float64 and with the eager formula, between ranks, and between repeated calls,
bit by bit. Nearly all of the time is Triton compiling a kernel for each rank, so the points are of 42 kinds of kernel,
shared by processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from unittest import mock

import torch

from graphfuse.comm import reference
from graphfuse.comm.call import FusedCall
from graphfuse.comm.symm_mem import Rows, SymmMemWorkspace, cells_per_row, row_stride
from graphfuse.comm.symmetric_memory import SymmetricBuffer
from graphfuse.kernels.self_marking import SLOTS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HIDDEN_SIZES = (1, 17, 64, 127, 576, 1000, 2048, 2880, 4096, 5120, 7168, 8192)
PROGRAMS_PER_GPU = 128
"""One for each row in flight of each rank. They wait for each other, so that all must be on the GPU at once: on the 132
SMs of an H200 one each, since the largest fill an SM."""

KINDS = 42
REPEATS = 4


class World:
    """Workspaces of all ranks of one group in one process."""

    def __init__(self, size: int, hidden_size: int, variant: str, dtype: torch.dtype) -> None:
        self.devices = [torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(size)]
        self.streams = [torch.cuda.Stream(device) for device in self.devices]
        self.variant = variant
        word = torch.int16 if dtype.itemsize == 2 else torch.int32
        rows, stride = rows_in_flight(size) // size * size, row_stride(hidden_size)
        elements = SLOTS * cells_per_row(variant, rows, size) * stride
        self.memory = [torch.empty(elements, dtype=word, device=device) for device in self.devices]
        self.slots = [torch.zeros(rows, dtype=torch.int32, device=device) for device in self.devices]
        self.workspaces = []
        for rank, device in enumerate(self.devices):
            pointers = torch.tensor([m.data_ptr() for m in self.memory], dtype=torch.int64, device=device)
            buffer = SymmetricBuffer(self.memory[rank], pointers, self.memory)
            workspace = SymmMemWorkspace(rank, size, dtype, device)
            workspace._dependent_launch = False  # programs of the next launch would take the SMs that others need
            workspace._rows[hidden_size, variant] = Rows(buffer, self.slots[rank], stride)
            self.workspaces.append(workspace)

    def load_kernels(self, calls: list[FusedCall]) -> None:
        """Run each rank by itself, before each launch on cells that look as if all rows had arrived. To load a kernel
        or to allocate memory while another rank's kernel waits on a GPU of this process would wait for that kernel in
        turn: a deadlock that ranks in processes of their own cannot have. Afterwards kernels are loaded, and the
        streams have memory for calls that are no larger.
        """
        for device, stream, workspace, call in zip(self.devices, self.streams, self.workspaces, calls, strict=True):
            launch = workspace._launch

            def launch_alone(*args, launch=launch) -> None:
                synchronize()
                self.fill(0)
                launch(*args)

            with (
                torch.cuda.device(device),
                torch.cuda.stream(stream),
                mock.patch.object(workspace, "_launch", launch_alone),
            ):
                workspace.run(call, self.variant)
        synchronize()
        self.fill(-1)

    def fill(self, word: int) -> None:
        """Every cell: 0 has arrived, -1 has not."""
        for memory, slots in zip(self.memory, self.slots, strict=True):
            memory.fill_(word)
            slots.zero_()
        synchronize()

    def run(self, calls: list[FusedCall]) -> list[tuple[torch.Tensor, ...]]:
        """Every rank's outputs; the ranks run at once."""
        outputs = []
        for device, stream, workspace, call in zip(self.devices, self.streams, self.workspaces, calls, strict=True):
            with torch.cuda.device(device), torch.cuda.stream(stream):
                outputs.append(workspace.run(call, self.variant))
        synchronize()
        return outputs


def rows_in_flight(size: int) -> int:
    ranks_on_a_gpu = -(-size // torch.cuda.device_count())
    return PROGRAMS_PER_GPU // ranks_on_a_gpu


def synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def connect() -> None:
    """Let the GPUs reach each other's memory: torch does so at the first copy between them."""
    for index in range(torch.cuda.device_count()):
        for other in range(torch.cuda.device_count()):
            torch.ones(1, device=f"cuda:{index}").to(f"cuda:{other}")
    synchronize()


@dataclass(frozen=True)
class Kind:
    """What the kernel is compiled for."""

    size: int
    dtype: torch.dtype
    hidden_size: int
    variant: str
    with_residual: bool
    with_weight: bool
    cast: bool

    @classmethod
    def draw(cls, seed: int, index: int) -> Kind:
        draw = random.Random(1000 * seed + index)
        variant, dtype = ("one_shot", "two_shot")[index // 7 % 2], DTYPES[index // 14 % 3]
        with_residual, with_weight, cast = draw.random() < 0.7, draw.random() < 0.8, draw.random() < 0.5
        return cls(2 + index % 7, dtype, draw.choice(HIDDEN_SIZES), variant, with_residual, with_weight, cast)


def make_world(kind: Kind) -> World:
    """Ranks that are ready for all points of a kind."""
    world = World(kind.size, kind.hidden_size, kind.variant, kind.dtype)

    def ones(device: torch.device, *size: int) -> torch.Tensor:
        return torch.ones(size, dtype=kind.dtype, device=device)

    calls = []
    for device in world.devices:
        x = ones(device, 3 * rows_in_flight(kind.size), kind.hidden_size)
        residual = x if kind.with_residual else None
        weight = ones(device, kind.hidden_size) if kind.with_weight else None
        calls.append(FusedCall(x, residual, weight, 1e-6, 0.0, kind.cast))
    synchronize()
    world.load_kernels(calls)
    return world


def check(kind: Kind, world: World, draw: random.Random) -> dict[str, float]:
    """One random point; returns how far the results are from float64, as shares of what the eager formula is."""
    size, dtype, hidden_size, cast = kind.size, kind.dtype, kind.hidden_size, kind.cast
    rows = rows_in_flight(size)
    tokens = draw.choice([0, 1, 1, 2, draw.randint(1, 16), draw.randint(1, rows), draw.randint(rows, 3 * rows)])
    eps, weight_bias = draw.choice([1e-5, 1e-6]), draw.choice([0.0, 1.0])
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    xs = [torch.randn(tokens, hidden_size, generator=generator).to(dtype) for _ in range(size)]
    residual = torch.randn(tokens, hidden_size, generator=generator).to(dtype) if kind.with_residual else None
    weight = (1 + 0.3 * torch.randn(hidden_size, generator=generator)).to(dtype) if kind.with_weight else None

    def on(device: torch.device, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device)

    calls = [
        FusedCall(x.to(device), on(device, residual), on(device, weight), eps, weight_bias, cast)
        for x, device in zip(xs, world.devices, strict=True)
    ]
    world.fill(-1)
    first: tuple[torch.Tensor, ...] | None = None
    for _ in range(REPEATS):
        results = [tuple(output.cpu() for output in outputs) for outputs in world.run(calls)]
        first = first or results[0]
        for outputs in results:
            assert all(torch.equal(a, b) for a, b in zip(first, outputs, strict=True)), "ranks or repeats differ"
    assert first is not None

    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    eager = reference.add_rms_norm(total.to(dtype), residual, weight, eps, weight_bias, cast)
    assert torch.equal(first[1], eager[1]), "the residual is not the eager one"
    exact = reference.add_rms_norm(
        sum(x.double() for x in xs),
        None if residual is None else residual.double(),
        None if weight is None else weight.double(),
        eps,
        weight_bias,
        cast,
    )
    if tokens == 0:
        return {}
    errors = {}
    for name, ours, theirs, truth in zip(("normed", "residual"), first, eager, exact, strict=True):
        own, eager_error = (torch.linalg.vector_norm(v.double() - truth) for v in (ours, theirs))
        floor = 1e-7 * torch.linalg.vector_norm(truth)
        assert own <= 1.02 * eager_error + floor, f"{name}: {own} from float64, the eager formula {eager_error}"
        errors[name] = float(own / (eager_error + floor))
    return errors


def run_points(job: int, args: argparse.Namespace) -> tuple[Counter[int], dict[str, float]]:
    """The points of every `jobs`-th kind of kernel: how many of each world size, and the worst errors."""
    connect()
    worlds: Counter[int] = Counter()
    worst = {"normed": 0.0, "residual": 0.0}
    for index in args.kinds[job :: args.jobs]:
        kind = Kind.draw(args.seed, index)
        world = make_world(kind)
        for point in range(index, args.points, KINDS):
            try:
                errors = check(kind, world, random.Random(args.seed * 100_000 + point))
            except AssertionError as error:
                raise AssertionError(f"point {point}, {kind}: {error}") from error
            if args.verbose:
                print(f"job {job}: point {point}, {kind}", flush=True)
            worlds[kind.size] += 1
            worst = {name: max(share, errors.get(name, 0.0)) for name, share in worst.items()}
    return worlds, worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument(
        "--kinds", type=int, nargs="+", default=list(range(KINDS)), help="only the points of these kinds"
    )
    parser.add_argument("--verbose", action="store_true", help="a line for each point that is done")
    args = parser.parse_args()
    # Streams that share a queue of the GPU wait for each other: one queue for each rank's.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    worlds: Counter[int] = Counter()
    worst: dict[str, float] = {}
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for found, errors in pool.map(run_points, range(args.jobs), [args] * args.jobs):
            worlds += found
            worst = {name: max(share, worst.get(name, 0.0)) for name, share in errors.items()}
    result = {"points": worlds.total(), "worlds": dict(sorted(worlds.items())), "error_over_eager": worst}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
