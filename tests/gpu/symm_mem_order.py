"""A million fused reductions in which every word says which call and row it belongs to, with ranks late at random.

    torchrun --standalone --nproc-per-node 2 tests/gpu/symm_mem_order.py --calls 1000000

Memory order between GPUs cannot be proved by a tool (racecheck sees shared memory only), so it is tested: x holds
(rank + 1) * (64 * call + row) in float32, where every sum is exact, and the sum of every row of every call is compared
with what it must be. A word read too early, from another call or from another row shows as a wrong sum. Calls, checks
and delays are in CUDA graphs, back to back, with token counts that change from call to call, for both variants.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from graphfuse.comm.call import FusedCall
from graphfuse.comm.control import control_channel
from graphfuse.comm.symm_mem import SymmMemBackend
from graphfuse.comm.workspace import WorkspaceRequest

HIDDEN = 256
MOST_TOKENS = 64
CALLS_PER_GRAPH = 500
MODULUS = 1 << 15  # 3 * 64 * MODULUS < 2**24 (2 ranks): every sum is exact in float32
VARIANTS = ("one_shot", "two_shot")


@triton.jit
def be_late(calls_ptr, count_ptr, seed, EVERY: tl.constexpr, MOST_NS: tl.constexpr):
    """One call in EVERY, drawn by (seed, call), waits up to MOST_NS."""
    number = tl.load(calls_ptr)
    draw = tl.randint(seed, number).to(tl.uint32, bitcast=True)
    if draw % EVERY == 0:
        start = tl.extra.cuda.globaltimer()
        wait = ((draw >> 8) % MOST_NS).to(tl.int64)
        while tl.extra.cuda.globaltimer() - start < wait:
            pass
        tl.store(count_ptr, tl.load(count_ptr) + 1)


@triton.jit
def write_words(x_ptr, calls_ptr, factor, HIDDEN: tl.constexpr, MODULUS: tl.constexpr):
    row = tl.program_id(0)
    word = (tl.load(calls_ptr) % MODULUS) * 64 + row
    tl.store(x_ptr + row * HIDDEN + tl.arange(0, HIDDEN), tl.full((HIDDEN,), 1.0, tl.float32) * (word * factor))


@triton.jit
def check_words(sum_ptr, calls_ptr, wrong_ptr, factor, HIDDEN: tl.constexpr, MODULUS: tl.constexpr):
    row = tl.program_id(0)
    word = (tl.load(calls_ptr) % MODULUS) * 64 + row
    found = tl.load(sum_ptr + row * HIDDEN + tl.arange(0, HIDDEN))
    wrong = tl.sum((found != (word * factor).to(tl.float32)).to(tl.int32), axis=0)
    if wrong != 0:
        tl.atomic_add(wrong_ptr, wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    channel = control_channel(group)
    backend = SymmMemBackend()
    variants = tuple((variant, None) for variant in VARIANTS)
    request = WorkspaceRequest(group, torch.float32, HIDDEN, None, device, variants)
    workspace = backend.create(request, channel)
    workspace.reserve(request, channel)

    calls = torch.zeros(1, dtype=torch.int32, device=device)
    delays = torch.zeros(1, dtype=torch.int32, device=device)
    wrong = torch.zeros(1, dtype=torch.int32, device=device)
    x = torch.zeros(MOST_TOKENS, HIDDEN, device=device)
    draw = random.Random(11)  # the same on every rank

    def call(variant: str, tokens: int) -> None:
        be_late[(1,)](calls, delays, 1000 + rank, EVERY=23, MOST_NS=20_000)
        write_words[(tokens,)](x, calls, rank + 1, HIDDEN=HIDDEN, MODULUS=MODULUS)
        total = workspace.run(FusedCall(x[:tokens], None, None, 1e-6), variant)[1]
        check_words[(tokens,)](total, calls, wrong, size * (size + 1) // 2, HIDDEN=HIDDEN, MODULUS=MODULUS)
        calls.add_(1)

    def draw_tokens() -> int:
        return draw.choice([1, 1, 2, draw.randint(1, 16), draw.randint(1, MOST_TOKENS)])

    for variant in VARIANTS:
        call(variant, 3)
    torch.cuda.synchronize()
    graphs = []
    for variant in (*VARIANTS, "one_shot"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS_PER_GRAPH):
                call(variant, draw_tokens())
        graphs.append(graph)
    for number in range(-(-args.calls // CALLS_PER_GRAPH)):
        draw.choice(graphs).replay()
        if number % 20 == 0:
            torch.cuda.synchronize()  # a hang shows near its cause
    torch.cuda.synchronize()

    found = torch.cat([wrong, delays]).to(torch.int64)
    dist.all_reduce(found)
    if rank == 0:
        print(json.dumps({"calls": int(calls), "wrong_words": int(found[0]), "delays": int(found[1])}), flush=True)
    dist.destroy_process_group()
    return 1 if found[0] else 0


if __name__ == "__main__":
    sys.exit(main())
