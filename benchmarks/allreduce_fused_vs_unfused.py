"""Fused all-reduce + add + RMSNorm, as dispatch chooses it, against NCCL and an Inductor-compiled add and norm.

    torchrun --standalone --nproc-per-node 2 benchmarks/allreduce_fused_vs_unfused.py --output result.json

Times are microseconds a call in CUDA-graph replays of 20 calls, median of 7, maximum over ranks, all in one run, in
bfloat16, several buffers in turn. Columns: see COLUMNS below. `make_allreduce_table.py` makes a size table of the
result. Takes two minutes on 2 H200.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from graphfuse.comm import dispatch, pool, reference
from graphfuse.comm.call import FusedCall
from graphfuse.comm.table import REFERENCE_ONLY, SizeRange
from graphfuse.gate import Decision, decide, gather_facts

HIDDEN_SIZES = (2048, 4096, 7168)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FLASHINFER_TOKENS = 2048  # FlashInfer is measured up to here, whatever the table says
DTYPE = torch.bfloat16
ITERATIONS, REPEATS, EPS = 20, 7, 1e-6
COLUMNS = {
    "nccl+norm": "unfused: NCCL all-reduce in place, then add and norm compiled by Inductor",
    "fused": "graphfuse: dispatch with the size table in force",
    "backend": "what served `fused`",
    "fi1": "FlashInfer one-shot as graphfuse launches it, without PDL",
    "reference": "the reference backend alone, reducing in place as it may after a matrix product",
}

Body = Callable[[int], object]


class Buffers:
    """Inputs in turn, so that they are not all in L2; x is the same size on each rank and random."""

    def __init__(self, num_tokens: int, hidden_size: int, device: torch.device) -> None:
        num_bytes = num_tokens * hidden_size * DTYPE.itemsize
        self.count = max(1, min(8, (128 << 20) // num_bytes))
        shape = (self.count, num_tokens, hidden_size)
        self.source = torch.randn(shape, device=device, dtype=DTYPE)
        self.x = self.source.clone()
        self.residual = torch.randn(shape, device=device, dtype=DTYPE)
        self.weight = torch.rand(hidden_size, device=device, dtype=DTYPE)

    def refill(self) -> None:
        """In-place reductions double x at every call; without this it would overflow."""
        self.x.copy_(self.source)


def microseconds(body: Body, before: Callable[[], None], device: torch.device) -> float:
    """Time of one call of `body(iteration)` in graph replays: median over replays, maximum over ranks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for iteration in range(3):
            body(iteration)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for iteration in range(ITERATIONS):
            body(iteration)
    times = []
    for _ in range(REPEATS):
        before()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / ITERATIONS)
    slowest = torch.tensor([sorted(times)[REPEATS // 2]], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return round(slowest.item(), 2)


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a Llama layer does after its all-reduce."""
    summed = residual + x
    f = summed.float()
    f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * f.to(summed.dtype), summed


def measure(group: dist.ProcessGroup, hidden_size: int, device: torch.device) -> list[dict]:
    """The rows of one hidden size."""
    facts = gather_facts(group, device)
    table = decide(facts, dtype=DTYPE, hidden_size=hidden_size)
    assert table.allowed, table.reasons
    row_bytes = hidden_size * DTYPE.itemsize
    wide = Decision(True, (SizeRange(FLASHINFER_TOKENS * row_bytes, "flashinfer", "oneshot"), *REFERENCE_ONLY))
    torch._dynamo.reset()  # hidden size stays a constant of each compiled norm; only the tokens are dynamic
    compiled = torch.compile(add_norm)
    rows: list[dict] = [{"tokens": tokens, "hidden": hidden_size} for tokens in TOKENS]
    buffers = {tokens: Buffers(tokens, hidden_size, device) for tokens in TOKENS}

    def dispatched(call: FusedCall) -> object:
        return dispatch.run(call, group.group_name)

    def fused(tokens: int, serve: Callable[[FusedCall], object] = dispatched) -> float:
        data = buffers[tokens]

        def body(iteration: int) -> object:
            index = iteration % data.count
            call = FusedCall(data.x[index], data.residual[index], data.weight, EPS, 0.0, True, x_is_dead=True)
            return serve(call)

        return microseconds(body, data.refill, device)

    def unfused(tokens: int) -> float:
        data = buffers[tokens]

        def body(iteration: int) -> object:
            index = iteration % data.count
            dist.all_reduce(data.x[index], group=group)
            return compiled(data.x[index], data.residual[index], data.weight)

        x, residual = data.x[0], data.residual[0]
        if tokens > 1:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(residual, 0)
        compiled(x, residual, data.weight)  # compiles, before the capture
        return microseconds(body, data.refill, device)

    # FlashInfer beyond the table first: its workspace is then wide enough for the table's own calls.
    pool.prepare(group, wide, dtype=DTYPE, hidden_size=hidden_size)
    for row in rows:
        if row["tokens"] <= FLASHINFER_TOKENS:
            row["fi1"] = fused(row["tokens"])
    pool.release(group, dtype=DTYPE, hidden_size=hidden_size)

    outcome = pool.prepare(group, table, dtype=DTYPE, hidden_size=hidden_size)
    assert outcome == table, outcome.reasons
    for row in reversed(rows):  # the largest first: the norm is compiled with dynamic tokens from the start
        tokens = row["tokens"]
        row["nccl+norm"] = unfused(tokens)
        row["fused"] = fused(tokens)
        chosen = dispatch.choose(outcome.ranges, tokens * row_bytes)
        assert chosen is not None
        row["backend"] = chosen.backend
    pool.release(group, dtype=DTYPE, hidden_size=hidden_size)

    for row in rows:
        row["reference"] = fused(row["tokens"], lambda call: reference.run(call, group))
    return rows


def summarise(rows: list[dict]) -> dict:
    """Speed-ups over unfused: geometric mean by backend, and the worst point."""
    ratios = {(row["hidden"], row["tokens"]): row["nccl+norm"] / row["fused"] for row in rows}
    by_backend: dict[str, list[float]] = {}
    for row in rows:
        by_backend.setdefault(row["backend"], []).append(ratios[row["hidden"], row["tokens"]])
    worst = min(ratios, key=lambda point: ratios[point])
    return {
        "speedup": {b: round(math.exp(sum(map(math.log, r)) / len(r)), 3) for b, r in by_backend.items()},
        "worst": {"hidden": worst[0], "tokens": worst[1], "speedup": round(ratios[worst], 3)},
    }


def show(rows: list[dict], summary: dict) -> None:
    columns = ["tokens", "hidden", "nccl+norm", "fused", "backend", "fi1", "reference"]
    print(" ".join(f"{column:>11}" for column in [*columns, "speedup"]))
    for row in rows:
        cells = [row.get(column, "") for column in columns] + [f"{row['nccl+norm'] / row['fused']:.2f}x"]
        print(" ".join(f"{cell!s:>11}" for cell in cells))
    print(json.dumps(summary), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(dist.get_rank())
    facts = gather_facts(group, device)
    rows = [row for hidden_size in HIDDEN_SIZES for row in measure(group, hidden_size, device)]
    if dist.get_rank() == 0:
        summary = summarise(rows)
        show(rows, summary)
        result = {
            "what": f"all-reduce + residual add + RMSNorm, TP{facts.world_size}, bf16, microseconds per call in "
            f"CUDA-graph replays of {ITERATIONS} calls, median of {REPEATS}, maximum over ranks",
            "host": f"{facts.world_size}x {facts.gpu}, multicast forbidden by {facts.multicast_forbidden_by}",
            "versions": {
                "torch": facts.torch,
                "triton": facts.triton,
                "flashinfer-python": facts.flashinfer,
                "nccl": facts.nccl,
            },
            "date": datetime.date.today().isoformat(),
            "columns": COLUMNS,
            "summary": summary,
            "rows": rows,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
