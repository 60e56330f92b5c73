"""Dumps: the graphs of a run, and what each rule changed, in files and in the structured trace."""

from __future__ import annotations

import logging

import pytest

from graphfuse import FuseConfig
from graphfuse.errors import ConfigError
from graphfuse.passes import default_rules
from graphfuse.passes.driver import run_passes
from graphfuse.passes.dump import Dump
from graphfuse.passes.fuse_add_rms_norm import FUSE_ADD_RMS_NORM
from graphfuse.testing import fake_tp
from tests.passes.graphs import context, flat_layers

RULES = [rule.name for rule in default_rules()]
STEPS = [f"{number:03d}_{name}" for number, name in enumerate(["before", *RULES])]
REWRITES = 1 + RULES.index(FUSE_ADD_RMS_NORM.name)
"""The step of the one rule that has something to do."""


@pytest.fixture(scope="module")
def group():
    with fake_tp(4) as group:
        yield group


def run(group, dump):
    """One layer with one reduction, which becomes one fused op."""
    return run_passes(flat_layers(1, group.group_name), default_rules(), context(group), FuseConfig(), dump=dump)


def test_dumps_are_numbered_and_readable(group, tmp_path):
    run(group, Dump(str(tmp_path / "dump"), prefix="graph0_"))
    files = sorted(path.name for path in (tmp_path / "dump").glob("*.py"))
    assert files == [f"graph0_{step}.py" for step in STEPS]
    texts = [(tmp_path / "dump" / name).read_text() for name in files]
    before, after, last = texts[0], texts[REWRITES], texts[-1]
    assert "torch.ops._c10d_functional.all_reduce.default" in before
    assert "torch.ops.graphfuse.all_reduce_add_rms_norm.default" in after
    assert "all_reduce.default" not in after
    assert last == after


def test_a_dump_shows_what_each_rule_changed(group, tmp_path):
    """A diff for the one rule that rewrote something, and none for the others."""
    run(group, Dump(str(tmp_path), prefix="graph0_"))
    (diff,) = tmp_path.glob("*.diff")
    assert diff.name == f"graph0_{STEPS[REWRITES]}.diff"
    lines = diff.read_text().splitlines()
    assert lines[:2] == [f"--- graph0_{STEPS[REWRITES - 1]}.py", f"+++ graph0_{STEPS[REWRITES]}.py"]
    assert sum("_c10d_functional.all_reduce.default" in line for line in lines if line[0] == "-") == 1
    assert sum("graphfuse.all_reduce_add_rms_norm.default" in line for line in lines if line[0] == "+") == 1
    assert not [line for line in lines if line[0] == "-" and "mm.default" in line], "the product stays as it is"


def test_the_structured_trace_holds_the_graphs_and_the_diff(group, structured_trace):
    run(group, Dump(None))
    names = [name for name in structured_trace if name.startswith("graphfuse_")]
    diff = f"graphfuse_{STEPS[REWRITES]}.diff"
    graphs = [f"graphfuse_{step}" for step in STEPS]
    assert names == [*graphs[: REWRITES + 1], diff, *graphs[REWRITES + 1 :]]
    assert f"+++ {STEPS[REWRITES]}.py" in structured_trace[diff]


@pytest.fixture
def structured_trace():
    """What TORCH_TRACE would write: the text of each artifact by its name."""
    artifacts: dict[str, str] = {}

    class Keep(logging.Handler):
        def emit(self, record):
            artifact = record.metadata.get("artifact")
            if artifact:
                artifacts[artifact["name"]] = record.payload

    handler = Keep()
    trace_log = logging.getLogger("torch.__trace")
    trace_log.addHandler(handler)
    yield artifacts
    trace_log.removeHandler(handler)


def test_a_dump_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made a folder"):
        Dump(str(tmp_path / "file" / "dump"))
