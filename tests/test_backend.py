"""`torch.compile(model, backend="graphfuse")`: found by its name, takes settings as options, reports what it did."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import graphfuse
from graphfuse.backend import Session, graphfuse_backend, group_named
from graphfuse.config import FuseConfig
from graphfuse.errors import ConfigError, GroupError
from graphfuse.testing import fake_tp

H = 16


class Model(nn.Module):
    def __init__(self, *groups: dist.ProcessGroup) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(H) for _ in groups)
        self.groups = groups
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for norm, group in zip(self.norms, self.groups, strict=True):
            x = norm(x + fc.all_reduce(x * 2, "sum", group))
        return x


@pytest.fixture
def group():
    torch._dynamo.reset()
    with fake_tp(4) as group:
        yield group


def run(model: nn.Module, **kwargs) -> Tensor:
    with torch.no_grad():
        return torch.compile(model, backend="graphfuse", fullgraph=True, **kwargs)(torch.ones(3, H))


def test_the_entry_point_is_this_backend():
    assert "graphfuse" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("graphfuse") is graphfuse_backend


def test_the_group_is_the_one_that_the_reductions_share(group):
    run(Model(group, dist.new_group([3, 2, 1, 0])))
    assert graphfuse.last_report().totals["fused"] == 2


def test_the_group_may_be_named(group):
    part = dist.new_group([0, 1])
    run(Model(group, part), options={"tp_group": part.group_name})
    report = graphfuse.last_report()
    assert [site.status for site in report.sites] == ["declined", "fused"]
    assert "it reduces over ranks [0, 1, 2, 3], the compiled group is ranks [0, 1]" in report.sites[0].outcome()


def test_several_groups_are_declined_with_the_reason(group):
    run(Model(group, dist.new_group([0, 1])))
    report = graphfuse.last_report()
    assert report.totals == {"all_reduce": 2, "fused": 0, "merged": 0, "declined": 2}
    (note,) = report.notes
    assert note.startswith("reductions run over 2 groups, so none was taken for the tensor-parallel one")
    assert "options={'tp_group': name}" in note


def test_options_are_settings(group):
    run(Model(group), options={"fusion": "off"})
    assert "fusion='off'" in graphfuse.last_report().sites[0].outcome()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modes_of_torch_are_accepted_and_ignored_aloud_by_the_eager_executor(group, mode):
    run(Model(group), mode=mode)
    notes = [] if mode == "default" else [f"mode={mode!r} is for Inductor; the eager executor ignores it"]
    assert graphfuse.last_report().notes == notes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "fastest"}, r"mode='fastest' is not known\. Use one of default, reduce-overhead, "),
        ({"options": {"fusoin": "off"}}, r"Unknown option fusoin\. Known ones: allreduce, disabled_rules, "),
        ({"options": {"a": 1, "b": 2}}, r"Unknown options a, b\. Known ones: "),
        ({"options": {"fusion": "no"}}, r"fusion='no' is not known\. Use one of 'auto', 'off', 'require'\."),
        ({"options": {"tp_group": "nope"}}, r"There is no process group called 'nope'\. Pass group\.group_name of "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_are_checked(group, settings, message):
    """Dynamo wraps what a backend raises; the message is inside."""
    with pytest.raises(BackendCompilerFailed, match=message) as raised:
        run(Model(group), **settings)
    assert isinstance(raised.value.inner_exception, (ConfigError, GroupError))


def test_a_group_is_found_by_name_or_given(group):
    assert group_named(group.group_name) is group
    assert group_named(group) is group
    with pytest.raises(GroupError, match="There is no process group called 7"):
        group_named(7)


def test_a_mode_is_checked_before_anything_is_traced():
    with pytest.raises(ConfigError, match="mode='fastest' is not known"):
        Session(None, FuseConfig(), mode="fastest")


def test_workspaces_go_when_dynamo_drops_the_graph(group, monkeypatch):
    closed = []
    monkeypatch.setattr(Session, "close", lambda self: closed.append(self.report))
    run(Model(group))
    report = graphfuse.last_report()
    gc.collect()
    assert closed == []
    torch._dynamo.reset()
    gc.collect()
    assert closed == [report]


def test_a_dropped_model_is_not_kept(group):
    model = Model(group)
    run(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("executor", ["inductor", "eager"])
def test_both_executors_give_the_values_of_the_module(group, executor):
    """On a fake group a reduction is the identity. The layers repeat, and Inductor gets them as one subgraph."""
    model = Model(*[group] * 6)
    torch.testing.assert_close(run(model, options={"executor": executor}), model(torch.ones(3, H)))
    assert graphfuse.last_report().totals["fused"] == 6
    assert ("compile" in graphfuse.last_report().seconds) == (executor == "inductor")


def test_what_the_executor_raises_is_not_called_a_tracing_error(group, monkeypatch):
    """And is not tried again in another way."""
    calls = []

    def broken(*_args: object) -> None:
        calls.append(1)
        raise OSError("no compiler on this machine")

    monkeypatch.setattr(Session, "_execute", broken)
    model = Model(group, group)
    with pytest.raises(Exception, match="no compiler on this machine") as raised:
        graphfuse.compile(model, group, example_inputs=torch.ones(3, H))
    assert isinstance(raised.value, BackendCompilerFailed)
    assert isinstance(raised.value.inner_exception, OSError)
    assert len(calls) == 1
