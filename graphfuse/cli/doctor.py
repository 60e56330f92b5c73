"""`graphfuse doctor`: what this machine has, what the gate makes of it, and what is missing.

    collect() -> plain data, also for --json          layout(data) -> tables and sentences          render(data) prints

It looks at one process only, without a process group: the gate's answer is for a group over all GPUs of this host.
"""

from __future__ import annotations

import platform
from itertools import groupby
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from graphfuse.facts import Facts, RankFacts, combine
from graphfuse.gate import SizeRange, decide
from graphfuse.probe import load_nvml, nvml_links, probe, uuid_of, version_of

PACKAGES = ("graphfuse", "torch", "triton", "transformers", "safetensors", "flashinfer-python", "nvidia-ml-py")
# A common hidden size; the gate's answer for others differs in the number of tokens only.
HIDDEN_SIZE = 4096


def collect() -> dict[str, Any]:
    """Everything that `layout` shows, as data that JSON can hold: versions, gpus, gate and missing."""
    ranks = _ranks()
    facts = combine(ranks)
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {
            **{name: version_of(name) for name in PACKAGES},
            "torch": torch.__version__,  # says which CUDA it is built for, which the package's version may not
            "nccl": facts.nccl,
            "cuda": torch.version.cuda,
        },
        "gpus": _gpus(ranks),
        "gate": _gate(facts),
        "missing": _missing(facts),
    }


def render(data: dict[str, Any]) -> None:
    """Print what `collect` found to the terminal."""
    Console(highlight=False).print(layout(data))


def layout(data: dict[str, Any]) -> RenderableType:
    """The tables and sentences of `graphfuse doctor`, for a rich console."""
    versions = Table("package", "version", title=f"Python {data['python']}, {data['platform']}", title_justify="left")
    for name, version in data["versions"].items():
        versions.add_row(name, version or "[dim]not there[/dim]")
    parts: list[RenderableType] = [versions]
    if data["gpus"]:
        gpus = Table("GPU", "name", "SM", "memory", "NVLinks", "NVLink to", "peer access to", title="GPUs")
        for gpu in data["gpus"]:
            gpus.add_row(
                str(gpu["index"]),
                gpu["name"],
                gpu["compute_capability"],
                f"{gpu['memory_gib']:.0f} GiB",
                _or_unknown(gpu["num_nvlinks"]),
                _or_unknown(gpu["nvlink_to"]),
                _or_unknown(gpu["peer_access_to"]),
            )
        parts.append(gpus)
    gate = data["gate"]
    group = f"{len(data['gpus'])} GPUs" if len(data["gpus"]) > 1 else "one rank"
    parts.append(f"\n[bold]Fused reductions over {group}[/bold]: {gate['answer']}")
    parts += [f"  {escape(reason)}" for reason in gate["decision"]["reasons"]]
    parts.append("\n[bold]Missing[/bold]" if data["missing"] else "\nNothing is missing.")
    parts += [f"  {escape(sentence)}" for sentence in data["missing"]]
    return Group(*parts)


def _ranks() -> list[RankFacts]:
    """One rank for each visible GPU, or one on the CPU: what the group of all GPUs would see."""
    if not torch.cuda.is_available():
        return [probe(torch.device("cpu"))]
    return [probe(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def _gpus(ranks: list[RankFacts]) -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    index_of = {rank.gpu_id: index for index, rank in enumerate(ranks)}

    def indices(gpu_ids: tuple[str, ...] | None) -> list[int] | None:
        return None if gpu_ids is None else sorted(index_of[gpu_id] for gpu_id in gpu_ids if gpu_id in index_of)

    gpus = []
    for index, rank in enumerate(ranks):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "index": index,
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory_gib": properties.total_memory / 2**30,
                "num_nvlinks": nvml_links(uuid_of(properties), load_nvml()).num_nvlinks,
                "nvlink_to": indices(rank.nvlink_peers),
                "peer_access_to": indices(rank.access_peers),
            }
        )
    return gpus


def _gate(facts: Facts) -> dict[str, Any]:
    decision = decide(facts, dtype=torch.bfloat16, hidden_size=HIDDEN_SIZE)
    answer = _served_by(decision.ranges) if decision.allowed else "left as plain operations."
    return {"facts": facts.to_json(), "decision": decision.to_json(), "answer": answer}


def _served_by(ranges: tuple[SizeRange, ...]) -> str:
    """Who serves which number of tokens: neighbouring ranges of one backend, whatever its variants, are one."""
    stretches = [list(stretch)[-1] for _, stretch in groupby(ranges, key=lambda size_range: size_range.backend)]
    names = ["the reference backend" if r.backend == "reference" else r.backend for r in stretches]
    if len(stretches) == 1:
        return f"by {names[0]}."
    row_bytes = HIDDEN_SIZE * torch.bfloat16.itemsize
    tokens = [(r.max_bytes or 0) // row_bytes for r in stretches]
    parts = [f"by {name} up to {count} tokens" for name, count in zip(names[:-1], tokens[:-1], strict=True)]
    parts[0] += f" of hidden size {HIDDEN_SIZE}"
    return ", ".join([*parts, f"by {names[-1]} above."])


def _missing(facts: Facts) -> list[str]:
    """What could be installed or changed to run faster, with how."""
    missing = []
    if not torch.cuda.is_available():
        built_for = "this torch is a CPU build" if torch.version.cuda is None else "torch sees none"
        missing.append(f"No GPU: {built_for}, so models run on the CPU by the reference backend.")
        return missing
    if facts.triton is None:
        missing.append("Triton is not installed: pip install triton brings graphfuse's own kernels.")
    if version_of("nvidia-ml-py") is None:
        missing.append("nvidia-ml-py is not installed, so NVLink is unknown: pip install nvidia-ml-py.")
    if facts.flashinfer is None:
        missing.append('FlashInfer is not installed: pip install "graphfuse[cuda]" brings its fused all-reduce.')
    return missing


def _or_unknown(value: Any) -> str:
    if value is None:
        return "unknown"
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
