"""A warm compile cache saves Inductor's work and changes nothing else: the passes run again, the report is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, torch, graphfuse
from torch._dynamo.utils import counters
from graphfuse.testing import fake_tp
from tests.conftest import Model, ids

with fake_tp(2) as group:
    torch.manual_seed(0)
    model = Model(6, group)
    outputs = {}
    for executor in ("inductor", "eager"):
        compiled = graphfuse.compile(model, group, config=graphfuse.FuseConfig(executor=executor))
        outputs[executor] = [compiled(ids(*shape)) for shape in ((2, 5), (1, 1))]
        torch.testing.assert_close(outputs[executor], [model(ids(*shape)) for shape in ((2, 5), (1, 1))])
        if executor == "inductor":
            report = compiled.report.to_json()
found = {name: counters["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")}
print(json.dumps([report, found]))
"""


def start(folder) -> tuple[dict, dict]:
    """A fresh process that compiles a model of six layers with Inductor and checks its values."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)},
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
