"""How long paged decoding takes on one GPU, beside FlashInfer's where it can run.

    python benchmarks/paged_decode.py --output result.json

A line for each model's heads on a rank, number of rows and length: microseconds of a call, and what share of 4.3 TB/s
(a copy on an H200) the caches are read with. Calls are replayed as one CUDA graph, each over caches of its own, since a
model's layers find none in the L2 cache. All rows have the same length; pages lie in any order.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphfuse.kernels.paged_decode import paged_decode
from graphfuse.kernels.paged_latent_decode import paged_latent_decode
from graphfuse.tuning.moe_timing import time_candidates

Call = Callable[[], object]

BANDWIDTH = 4.3e12
L2_BYTES = 60 << 20
MOST_CALLS = 128
PAGE_SIZE = 64
ROWS, LENGTHS = (1, 8, 32, 128), (1024, 8192)
OURS, FLASHINFER = "graphfuse", "flashinfer"


@dataclass(frozen=True)
class Heads:
    """What a rank holds of a model: key-value heads with their sizes, or (num_kv_heads 0) latents with rotary keys."""

    name: str
    num_heads: int
    num_kv_heads: int
    size: int
    rope_size: int = 0

    @property
    def numbers_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.size if self.num_kv_heads else self.size + self.rope_size


MODELS = (
    Heads("Qwen3-30B-A3B TP2", 16, 2, 128),
    Heads("Llama-3-8B TP2", 16, 4, 128),
    Heads("MLA, 64 heads", 64, 0, 512, 64),
)


@dataclass(frozen=True)
class Case:
    heads: Heads
    rows: int
    length: int

    @property
    def bytes_read(self) -> int:
        return self.rows * self.length * self.heads.numbers_per_token * 2

    @property
    def num_calls(self) -> int:
        """So many that each finds what it reads gone from the L2 cache."""
        return max(2, min(MOST_CALLS, 4 * L2_BYTES // self.bytes_read))


@dataclass(frozen=True)
class Inputs:
    """pages: [calls, R, N]"""

    queries: list[Tensor]
    caches: list[Tensor]
    pages: Tensor
    positions: Tensor


def inputs_of(case: Case, device: str) -> Inputs:
    heads = case.heads
    per_row = -(-case.length // PAGE_SIZE)
    pages = torch.randperm(case.num_calls * case.rows * per_row, device=device)
    gqa = heads.num_kv_heads > 0
    sizes = [heads.size] if gqa else [heads.size, heads.rope_size]
    entries = [(heads.num_kv_heads, heads.size)] * 2 if gqa else [(heads.size,), (heads.rope_size,)]
    return Inputs(
        [torch.randn(case.rows, heads.num_heads, n, dtype=torch.bfloat16, device=device) for n in sizes],
        [torch.randn(len(pages), PAGE_SIZE, *e, dtype=torch.bfloat16, device=device) for e in entries],
        pages.view(case.num_calls, case.rows, per_row),
        torch.full((case.rows,), case.length - 1, device=device),
    )


def our_calls(case: Case, inputs: Inputs) -> list[Call]:
    decode: Callable[..., Tensor] = paged_decode if case.heads.num_kv_heads else paged_latent_decode
    scale = case.heads.size**-0.5

    def call(pages: Tensor) -> Call:
        return lambda: decode(*inputs.queries, *inputs.caches, pages, inputs.positions, scale)

    return [call(pages) for pages in inputs.pages]


def flashinfer_calls(case: Case, inputs: Inputs) -> list[Call]:
    """Planned, and each run once. Raises whatever keeps FlashInfer from running."""
    import flashinfer

    heads, per_row = case.heads, inputs.pages.shape[2]
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=inputs.positions.device)
    starts = torch.arange(case.rows + 1, dtype=torch.int32) * per_row
    last = torch.full((case.rows,), (case.length - 1) % PAGE_SIZE + 1, dtype=torch.int32)

    def call(pages: Tensor) -> Call:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(
            starts, pages.flatten().int(), last, heads.num_heads, heads.num_kv_heads, heads.size, PAGE_SIZE,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, sm_scale=heads.size**-0.5,
        )  # fmt: skip
        return lambda: wrapper.run(inputs.queries[0], tuple(inputs.caches))

    calls = [call(pages) for pages in inputs.pages]
    for each, ours in zip(calls, our_calls(case, inputs), strict=True):
        torch.testing.assert_close(each(), ours(), atol=2e-2, rtol=2e-2)
    torch.cuda.synchronize()
    return calls


def measure(case: Case) -> dict:
    """One line of the result."""
    inputs = inputs_of(case, "cuda")
    candidates, missing = {OURS: our_calls(case, inputs)}, None
    if case.heads.num_kv_heads:
        try:
            candidates[FLASHINFER] = flashinfer_calls(case, inputs)
        except Exception as error:  # absent, not compiled, or of another interface: said in the result
            missing = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    times = time_candidates(candidates)
    share = case.bytes_read / BANDWIDTH * 1e6 / times[OURS]
    return {
        "heads": case.heads.name,
        "rows": case.rows,
        "length": case.length,
        "megabytes": round(case.bytes_read / 1e6, 2),
        "microseconds": {name: round(each, 2) for name, each in times.items()},
        "share_of_bandwidth": round(share, 3),
        **({"without_flashinfer": missing} if missing else {}),
    }


def text_of(row: dict) -> str:
    times = row["microseconds"]
    peer = times.get(FLASHINFER)
    beside = f"{peer:10.1f} {peer / times[OURS]:6.2f}x" if peer else f"{'-':>10}"
    start = f"{row['heads']:<20} {row['rows']:>4} {row['length']:>6}"
    return f"{start} {times[OURS]:10.1f} {row['share_of_bandwidth']:>7.0%} {beside}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the result, as JSON")
    output = parser.parse_args().output
    print(f"{'heads':<20} {'rows':>4} {'length':>6} {OURS + ', µs':>13} {'share':>4} {FLASHINFER + ', µs':>10}")
    rows = []
    for heads in MODELS:
        for length in LENGTHS:
            for num_rows in ROWS:
                rows.append(measure(Case(heads, num_rows, length)))
                print(text_of(rows[-1]), flush=True)
                torch.cuda.empty_cache()
    result = {
        "what": "paged decoding: microseconds a call, CUDA-graph replays, caches not in L2",
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "page_size": PAGE_SIZE,
        "rows": rows,
    }
    if output:
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
