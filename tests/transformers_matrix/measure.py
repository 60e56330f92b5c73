"""What graphfuse makes of one architecture at TP 2: computed on gloo ranks, against the whole model in eager mode, or
only traced, in a fake group. Both proofs run in either."""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

import graphfuse
from graphfuse.integrations.transformers_tp import shard_if_whole
from graphfuse.report import DECLINED, Report
from graphfuse.report_experts import LOWERED
from graphfuse.testing import fake_tp, trace
from tests.transformers_matrix import tiny

TP = 2
SHAPES = ((2, 7), (3, 4))
LIMIT = 1e-4
"""How far a logit, of a standard deviation of about 1, may be from the eager model's."""


CONFIG = graphfuse.FuseConfig(verify_placements=True)


@dataclass
class Outcome:
    """What became of an architecture. `error` says why nothing did."""

    error: str = ""
    all_reduces: int = 0
    fused: int = 0
    merged: int = 0
    declined: dict[str, int] = field(default_factory=dict)
    """How many were left alone, by reason."""
    experts: int = 0
    lowered: int = 0
    unknown: int = 0
    """Values that the proof of placements could not follow."""
    num_graphs: int = 0
    """For batches of two sizes."""
    difference: float | None = None
    """The largest of any logit from the whole model's in eager mode, in standard deviations of the logits."""


def traced(model_type: str) -> Outcome:
    """In bfloat16, on "meta", in a fake group: the graph alone."""
    ids = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    with fake_tp(TP) as group:
        try:
            model = tiny.build(model_type, torch.bfloat16, "meta")
            shard_if_whole(model, group)
            return of_report(trace(model, {"input_ids": ids, "use_cache": False}, group).report)
        except Exception as error:
            return Outcome(error=one_line(error))
        finally:
            torch._dynamo.reset()


def computed(group: dist.ProcessGroup, model_type: str) -> Outcome:
    """In float32, on this rank of a group."""
    try:
        whole, sharded = (tiny.build(model_type, torch.float32) for _ in range(2))
        compiled = graphfuse.compile(sharded, group, config=CONFIG)
    except Exception as error:
        return Outcome(error=one_line(error))
    with torch.no_grad():
        try:
            difference = apart(compiled, whole)
        except Exception as error:
            return Outcome(error=theirs(sharded, whole) or one_line(error))
        finally:
            torch._dynamo.reset()
        if not difference < LIMIT and (text := theirs(sharded, whole)):
            return Outcome(error=text)
    outcome = of_report(compiled.report)
    outcome.difference = difference
    return outcome


def theirs(sharded: nn.Module, whole: nn.Module) -> str:
    """What is wrong with transformers' own sharded model in eager mode; empty if it is the whole one's equal."""
    try:
        difference = apart(sharded, whole)
    except Exception as error:
        return f"transformers' own sharded model fails in eager mode: {one_line(error)}"
    wrong = f"transformers' own sharded model differs from the whole one in eager mode too: by {difference:.1g}"
    return "" if difference < LIMIT else wrong


def apart(model: nn.Module, whole: nn.Module) -> float:
    """The largest difference of any logit, in standard deviations; infinite if there is a NaN."""
    differences = []
    for seed, shape in enumerate(SHAPES):
        ids = torch.randint(3, tiny.VOCAB, shape, generator=torch.Generator().manual_seed(seed))
        expected, got = (each(ids, use_cache=False).logits for each in (whole, model))
        differences.append(((got - expected).abs().max() / expected.std()).item())
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def of_report(report: Report) -> Outcome:
    totals = report.totals
    reasons = Counter(without_names(site.outcome()) for site in report.sites if site.status == DECLINED)
    return Outcome(
        all_reduces=totals["all_reduce"],
        fused=totals["fused"],
        merged=totals["merged"],
        declined=dict(reasons),
        experts=len(report.moe),
        lowered=sum(layer.status == LOWERED for layer in report.moe),
        unknown=report.placements.get("unknown", 0),
        num_graphs=report.num_graphs,
    )


def without_names(reason: str) -> str:
    """A reason without the names that nodes have in one graph: `it feeds mul (mul_12), add (add_3)`."""
    return re.sub(r" \([a-z_]\w*\)", "", reason)


def one_line(error: BaseException) -> str:
    """Its name and what it says; files by their place in their package."""
    said = re.sub(r"/\S*/site-packages/", "", str(error))
    return textwrap.shorten(f"{type(error).__name__}: {said}", 400, placeholder=" …")
