"""A warm compile cache saves Inductor's work and changes nothing else: the passes run again, the report is the one of
this start. The cache sees the rewritten graph, so what alters the graph misses it and what does not, hits."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphfuse.comm.table import FOLDER, SizeRange, SizeTable

SCRIPT = """
import json, os, sys, torch, graphfuse
from pathlib import Path
from torch._dynamo.utils import counters
from graphfuse.compiler import CompiledModel, resolve_group
from graphfuse.facts import Facts
from graphfuse.testing import fake_tp
from tests.conftest import Model, ids

options, facts = json.loads(sys.argv[1]), sys.argv[2]
with fake_tp(2) as group:
    torch.manual_seed(0)
    model = Model(6, group).to(torch.bfloat16 if facts else torch.float32)
    outputs = {}
    for executor in ("inductor", "eager"):
        config = graphfuse.FuseConfig(executor=executor, **options)
        described = Facts.from_json(Path(facts)) if facts else None
        compiled = CompiledModel(model, resolve_group(group), config, facts=described)
        outputs[executor] = [compiled(ids(*shape)) for shape in ((2, 5), (1, 1))]
        if not facts:
            torch.testing.assert_close(outputs[executor], [model(ids(*shape)) for shape in ((2, 5), (1, 1))])
        if executor == "inductor":
            report = compiled.report.to_json()
found = {name: counters["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")}
print(json.dumps([report, found]))
"""
FACTS = Path(__file__).parent.parent / "configs" / "facts" / "h200_x2.json"


def start(folder, *, facts="", tables="", **options) -> tuple[dict, dict]:
    """A fresh process that compiles a model of six layers with Inductor and checks its values."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(options), str(facts)],
        env={
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(folder),
            "GRAPHFUSE_ALLREDUCE_TABLES": str(tables),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    report, found = json.loads(done.stdout.splitlines()[-1])
    assert set(report.pop("seconds")) == {"trace", "passes", "compile"}
    for counts in report["rules"].values():
        counts.pop("seconds")
    return report, found


@pytest.mark.slow
def test_the_report_is_the_same_on_a_cold_and_on_a_warm_cache(tmp_path):
    cold, cold_counts = start(tmp_path)
    warm, warm_counts = start(tmp_path)
    assert cold_counts["fxgraph_cache_miss"] >= 1 and cold_counts["fxgraph_cache_hit"] == 0
    assert warm_counts["fxgraph_cache_hit"] >= 1 and warm_counts["fxgraph_cache_miss"] == 0
    assert warm == cold
    assert cold["totals"] == {"all_reduce": 6, "fused": 6, "merged": 0, "declined": 0}


@pytest.mark.slow
def test_another_rewriting_misses_the_cache_and_is_reported(tmp_path):
    start(tmp_path)
    report, counts = start(tmp_path, disabled_rules=["all_reduce_add_rms_norm"])
    assert counts["fxgraph_cache_miss"] >= 1 and counts["fxgraph_cache_hit"] == 0
    assert report["totals"]["declined"] > 0


@pytest.mark.slow
def test_another_size_table_hits_the_cache_and_is_the_one_in_force(tmp_path):
    """Which kernel serves a size is looked up when the op runs: the graph does not depend on it."""
    table = SizeTable.read(FOLDER / "device_name=NVIDIA_H200,tp=2.json")
    served = []
    for backend, variant in (("symm_mem", "two_shot"), ("reference", None)):
        ranges = (SizeRange(1 << 20, backend, variant), SizeRange(None, "symm_mem", "one_shot"))
        dataclasses.replace(table, classes=((None, ranges),)).write(tmp_path / backend)
        report, counts = start(tmp_path / "cache", facts=FACTS, tables=tmp_path / backend)
        served.append([site["backends"][0] for site in report["sites"]])
    assert counts["fxgraph_cache_hit"] >= 1 and counts["fxgraph_cache_miss"] == 0
    before, after = served
    assert {site["variant"] for site in before} == {"two_shot"}
    assert {site["backend"] for site in after} == {"reference"}
