"""Turns measurements of fused and unfused all-reduce + add + RMSNorm into a size table under configs/allreduce/.

    python benchmarks/make_allreduce_table.py --device-name "NVIDIA H200" --world-size 2 --max-tokens 2048 \
        --link "18 NVLinks a GPU, a peer copy reaches 392 GB/s" \
        benchmarks/results/allreduce_fused_vs_unfused_h200x2.json

For each measured hidden size, FlashInfer one-shot serves messages up to the largest token count, at most --max-tokens,
up to which it beat the unfused pair at *every* measured size; the reference backend serves the rest. --max-tokens
bounds the workspace: FlashInfer keeps about 8 x ranks x tokens x hidden bytes on each GPU.
"""

from __future__ import annotations

import argparse
import json
import re
from itertools import pairwise
from pathlib import Path

UNFUSED, FLASHINFER = "nccl+norm", "fi1"
FOLDER = Path(__file__).parent.parent / "configs" / "allreduce"
ITEMSIZE = 2


def make_table(sources: list[Path], device_name: str, world_size: int, max_tokens: int, link: str) -> dict:
    """The table as plain data. Raises ValueError when FlashInfer does not pay at the smallest size of a hidden size."""
    runs = [json.loads(source.read_text()) for source in sources]
    rows = [row for run in runs for row in run["rows"] if FLASHINFER in row]
    rows.sort(key=lambda row: (row["hidden"], row["tokens"]))
    hidden_sizes = sorted({row["hidden"] for row in rows})
    classes = []
    for index, hidden in enumerate(hidden_sizes):
        tokens = paying_tokens([row for row in rows if row["hidden"] == hidden], max_tokens)
        limit = {"max_bytes": tokens * hidden * ITEMSIZE, "backend": "flashinfer", "variant": "oneshot"}
        rest = {"max_bytes": None, "backend": "reference", "variant": None}
        classes.append({"up_to": hidden if index + 1 < len(hidden_sizes) else None, "ranges": [limit, rest]})
    return {
        "schema": 1,
        "device_name": device_name,
        "world_size": world_size,
        "dtypes": ["bfloat16", "float16"],
        "hidden_sizes": classes,
        "provenance": {
            "host": runs[0]["host"],
            "link": link,
            "versions": runs[0]["versions"],
            "date": runs[0]["date"],
            "method": runs[0]["what"],
            "source": f"benchmarks/make_allreduce_table.py --max-tokens {max_tokens} "
            + " ".join(f"benchmarks/results/{source.name}" for source in sources),
            "note": "Measured in bfloat16, float16 moves the same bytes. unfused_us: NCCL all-reduce, then the add and "
            f"norm compiled by Inductor. flashinfer_us: {runs[0]['columns'][FLASHINFER]}.",
            "measured": [
                {
                    "hidden": row["hidden"],
                    "tokens": row["tokens"],
                    "unfused_us": row[UNFUSED],
                    "flashinfer_us": row[FLASHINFER],
                }
                for row in rows
            ],
        },
    }


def paying_tokens(rows: list[dict], max_tokens: int) -> int:
    """The largest token count up to which FlashInfer was faster than unfused at every one measured."""
    if any(a["tokens"] == b["tokens"] for a, b in pairwise(rows)):
        raise ValueError(f"hidden size {rows[0]['hidden']} was measured twice at one token count; give one run of each")
    paying = 0
    for row in rows:
        if row["tokens"] > max_tokens or row[FLASHINFER] >= row[UNFUSED]:
            break
        paying = row["tokens"]
    if not paying:
        raise ValueError(f"at hidden size {rows[0]['hidden']} FlashInfer never beat the unfused pair; use no table")
    return paying


def to_text(table: dict) -> str:
    """JSON with one line for each innermost object and list, so that a changed number is a changed line."""
    text = json.dumps(table, indent=2)
    flat = re.compile(r"\{[^{}\[\]]*\}|\[[^{}\[\]]*\]")
    return flat.sub(lambda match: re.sub(r"\s*\n\s*", " ", match[0]), text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, help="measurement files")
    parser.add_argument("--device-name", required=True, help="torch.cuda.get_device_name()")
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--link", required=True, help="what connects the GPUs, for the provenance")
    args = parser.parse_args()
    table = make_table(sorted(args.sources), args.device_name, args.world_size, args.max_tokens, args.link)
    file = FOLDER / f"device_name={args.device_name.replace(' ', '_')},tp={args.world_size}.json"
    file.write_text(to_text(table), encoding="utf-8")
    print(file)


if __name__ == "__main__":
    main()
