"""The worked example in CONTRIBUTING.md, executed as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.documents import ROOT, run_pytest

FILE = re.compile(r"^`([\w./]+)`:\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    """The files of the example, in a folder."""
    folder = tmp_path_factory.mktemp("contributing")
    for name, text in FILE.findall((ROOT / "CONTRIBUTING.md").read_text()):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    assert sorted(p.name for p in folder.iterdir()) == ["golden", "scale_rule.py", "test_scale_rule.py"]
    return folder


def test_its_tests_pass_with_the_golden_graph_shown(example):
    assert "2 passed" in run_pytest("test_scale_rule.py", folder=example)


def scaled_layer(group: dist.ProcessGroup, folder: Path) -> tuple[torch.Tensor, torch.Tensor, list[str | None]]:
    import graphfuse

    sys.path.insert(0, str(folder))
    from scale_rule import SCALE
    from test_scale_rule import Layer

    torch.manual_seed(dist.get_rank(group))
    layer = Layer(group).requires_grad_(False)
    inputs = torch.randn(6, 16), torch.ones(6, 64)
    config = graphfuse.FuseConfig(rules=[*graphfuse.default_rules(), SCALE])
    with graphfuse.compile(layer, group, config=config) as compiled:
        return compiled(*inputs), layer(*inputs), [site.op for site in compiled.report.sites]


def test_its_rule_does_not_change_the_result(ranks, example):
    for fused, eager, ops in ranks.run(2, scaled_layer, example):
        assert ops == ["all_reduce_scale"]
        torch.testing.assert_close(fused, eager, rtol=0, atol=0)
