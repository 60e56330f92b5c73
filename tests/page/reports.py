"""Made-up reports for the page: one with every fate in two layers, and one of 48 layers of experts that are alike."""

from __future__ import annotations

from typing import Any

import torch

from graphfuse.gate import Facts, decide
from graphfuse.report import DECLINED, FUSED, MERGED, DeclineReport, Report, SiteReport
from graphfuse.report_experts import LOWERED, ExpertsReport
from graphfuse.report_graph import Box, SmallGraph, Surroundings
from tests.hosts import H200_X2

HIDDEN = 2048
SHAPE = f"[T, {HIDDEN}]"
SECOND_USER = "the reduced value has another user: sigmoid (sigmoid_7)"
WIDE_WEIGHT = "fp32 weight with bf16 activations"
HOSTILE = "layers.1.<img src=x onerror=pwned()>.o_proj"


def graph(*labels: tuple[str, str], edges: tuple[tuple[int, int, str], ...], start: int) -> SmallGraph:
    return SmallGraph(tuple(Box(label, SHAPE, role) for label, role in labels), edges, start)


BEFORE = graph(
    ("mm", "other"), ("all_reduce", "reduction"), ("add", "add"), ("add", "add"), ("rms_norm", "norm"), ("mm", "other"),
    edges=((0, 1, ""), (1, 3, ""), (2, 3, ""), (3, 4, ""), (4, 5, "")), start=1,
)  # fmt: skip
AFTER = graph(
    ("mm", "other"), ("add", "add"), ("all_reduce_add_rms_norm", "fused"), ("mm", "other"),
    edges=((0, 2, ""), (1, 2, "residual"), (2, 3, "normed")), start=2,
)  # fmt: skip


def gate(facts: Facts = H200_X2, hidden: int = HIDDEN) -> dict[str, Any]:
    """The gate's part of a report, as a session writes it."""
    decision = decide(facts, dtype=torch.bfloat16, hidden_size=hidden)
    return {
        "facts": facts.to_json(),
        "decisions": [{"dtype": "bfloat16", "hidden_size": hidden, **decision.to_json()}],
        "reasons": list(decision.reasons),
    }


def site(module: str, norm: str | None = None, status: str = FUSED, **more: Any) -> SiteReport:
    """A reduction of some fate; `reason` declines it."""
    reason = more.pop("reason", None)
    if reason is not None:
        declines = (
            DeclineReport("merge_reductions", "what it is added to is not a reduced value", -1),
            DeclineReport("all_reduce_add_rms_norm", reason, 2),
        )
        around = Surroundings("bfloat16", SHAPE, BEFORE)
        return SiteReport(0, module, None, DECLINED, declines=declines, residual=True, surroundings=around)
    if status == MERGED:
        return SiteReport(0, module, None, MERGED, surroundings=Surroundings("bfloat16", SHAPE, BEFORE), **more)
    ranges = tuple(gate()["decisions"][0]["ranges"])
    return SiteReport(
        0, module, norm, FUSED, "all_reduce_add_rms_norm", ranges, (), True, (torch.bfloat16, HIDDEN),
        surroundings=Surroundings("bfloat16", SHAPE, BEFORE, AFTER),
    )  # fmt: skip


def experts(module: str, **more: Any) -> ExpertsReport:
    values = {"status": LOWERED, "config": "heuristic", "dtype": "bfloat16"}
    sizes = {"experts": 128, "intermediate": 384, "hidden": HIDDEN, "top_k": 8}
    return ExpertsReport(module, **{**values, **sizes, **more})


def report(sites: list[SiteReport], layers: list[ExpertsReport], **of_gate: Any) -> Report:
    made = Report(gate=gate(**of_gate), seconds={"trace": 3.2, "passes": 0.1})
    made.rules = {"all_reduce_add_rms_norm": {"matches": 3, "declines": 2, "seconds": 0.01}}
    made.add_graph(sites, layers)
    return made


def two_layers() -> Report:
    """Fused, merged and declined ones, experts lowered and not, and names that are markup."""
    made = report(
        [
            site("embed_tokens", "layers.0.input_layernorm"),
            site("layers.0.self_attn.o_proj", "layers.0.post_attention_layernorm"),
            site("layers.0.mlp.experts", status=MERGED, merged_into="layers.0.mlp.shared_expert.down_proj"),
            site("layers.0.mlp.shared_expert.down_proj", "layers.1.input_layernorm"),
            site(HOSTILE, reason=SECOND_USER),
            site("layers.1.mlp.down_proj", reason=WIDE_WEIGHT),
        ],
        [
            experts("layers.0.mlp.experts"),
            experts(
                "layers.1.mlp.experts", status=DECLINED, config=None,
                declines=(DeclineReport("lower_moe", "the Triton kernels cannot be imported (</script><b>)"),),
            ),
        ],
    )  # fmt: skip
    made.note("layers were traced flat: </script><script>pwned()</script>")
    return made


def many_layers(count: int = 48) -> Report:
    """Layers that are alike: all fused, each with experts."""
    sites = [site("embed_tokens", "layers.0.input_layernorm")]
    for i in range(count):
        after = f"layers.{i + 1}.input_layernorm" if i + 1 < count else "norm"
        sites.append(site(f"layers.{i}.self_attn.o_proj", f"layers.{i}.post_attention_layernorm"))
        sites.append(site(f"layers.{i}.mlp.experts", after))
    return report(sites, [experts(f"layers.{i}.mlp.experts") for i in range(count)])
