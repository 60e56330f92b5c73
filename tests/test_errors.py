"""Every error class is raised, says what is wrong and what to do, and can be caught as the Python error it is like."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed._functional_collectives as fc
from torch import Tensor, nn

import graphfuse
from graphfuse import FuseConfig, SamplingParams, errors
from graphfuse.facts import Facts
from graphfuse.models import registry
from graphfuse.passes import default_rules
from graphfuse.testing import assert_fused, fake_tp, trace

H = 16


class Model(nn.Module):
    def __init__(self, group=None) -> None:
        super().__init__()
        self.norm, self.group = nn.RMSNorm(H), group
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + (x if self.group is None else fc.all_reduce(x * 2, "sum", self.group)))


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print(x)
        return x


X = torch.ones(3, H)


def unknown_setting(_folder: Path) -> None:
    FuseConfig(executor="magic")


def unknown_rule(_folder: Path) -> None:
    graphfuse.compile(Model(), config=FuseConfig(disabled_rules={"all_reduce_layer_norm"}))


def gradients(_folder: Path) -> None:
    graphfuse.compile(nn.Linear(H, H), example_inputs=X)


def graph_break(_folder: Path) -> None:
    graphfuse.compile(Breaking(), example_inputs=X)


def required(_folder: Path) -> None:
    with fake_tp(2) as group:
        config = FuseConfig(fusion="require", disabled_rules={rule.name for rule in default_rules()})
        trace(Model(group), X, group, config=config)


def bad_rule(_folder: Path) -> None:
    """A rule of a user whose rewrite loses the reduction."""

    def lose(graph, site, _context) -> None:
        (wait,) = site.anchor.users
        wait.replace_all_uses_with(site.anchor.args[0])
        graph.erase_node(wait)
        graph.erase_node(site.anchor)

    (rule,) = (rule for rule in default_rules() if rule.name == "all_reduce_add_rms_norm")
    with fake_tp(2) as group:
        trace(Model(group), X, group, rules=[replace(rule, name="lossy", rewrite=lose)])


def failing_rule(_folder: Path) -> None:
    """A rule of a user with a mistake in it."""

    def fail(_node, _context):
        raise KeyError("gamma")

    (rule,) = (rule for rule in default_rules() if rule.name == "all_reduce_add_rms_norm")
    with fake_tp(2) as group:
        trace(Model(group), X, group, rules=[replace(rule, name="mistaken", match=fail)])


def no_group(_folder: Path) -> None:
    graphfuse.compile(Model(), 2)


def bad_argument(_folder: Path) -> None:
    x = torch.ones(2, H)
    with fake_tp(2) as group:
        torch.ops.graphfuse.all_reduce_add_rms_norm(x, x[:1], None, 1e-5, 0.0, True, False, group.group_name)


def forced_backend(_folder: Path) -> None:
    with fake_tp(2) as group:
        trace(Model(group), X, group, config=FuseConfig(allreduce="flashinfer"))


def no_checkpoint(folder: Path) -> None:
    graphfuse.load(folder)


def unsupported_model(_folder: Path) -> None:
    from transformers import BertConfig

    registry.resolve(BertConfig())


def damaged_facts(folder: Path) -> None:
    (folder / "facts.json").write_text("[]")
    Facts.from_json(folder / "facts.json")


def bad_sampling(_folder: Path) -> None:
    SamplingParams(max_tokens=0)


def other_graph(_folder: Path) -> None:
    with fake_tp(2) as group:
        assert_fused(Model(group), X, group, fused=7)


TRIGGERS: dict[type[errors.GraphfuseError], tuple[Callable[[Path], None], str, str]] = {
    errors.ConfigError: (unknown_setting, "executor='magic' is not known.", "Use one of 'auto', 'inductor', 'eager'."),
    errors.UnknownRuleError: (
        unknown_rule,
        "disabled_rules names 'all_reduce_layer_norm', which no rule has.",
        "Known: match_grouped_experts, merge_reductions, all_reduce_",
    ),
    errors.GradientsEnabledError: (gradients, "Gradients are on", "Call it under torch.no_grad()"),
    errors.GraphBreakError: (graph_break, "cannot be traced as one graph: ", "move it out of forward."),
    errors.FusionRequiredError: (required, "1 residual-stream reductions were declined", "use fusion='auto'"),
    errors.ReductionProofError: (bad_rule, "is no longer reduced", "GRAPHFUSE_FUEL"),
    errors.RuleError: (
        failing_rule,
        "The rule 'mistaken' fails where it reads",
        "leave it out with disabled_rules={'mistaken'}.",
    ),
    errors.GroupError: (no_group, "tp_group is a int.", "Pass a ProcessGroup or a one-dimensional DeviceMesh."),
    errors.ArgumentError: (
        bad_argument,
        "residual is [1, 16] float32 on cpu, x is [2, 16]",
        "Both must have one shape, dtype and device.",
    ),
    errors.BackendUnavailableError: (
        forced_backend,
        "The comm backend flashinfer cannot run here: ",
        'Use allreduce="auto"',
    ),
    errors.CheckpointError: (no_checkpoint, "config.json", "."),
    errors.UnsupportedModelError: (
        unsupported_model,
        "There is no model definition for 'bert'",
        'Load the model with implementation="transformers".',
    ),
    errors.SchemaError: (damaged_facts, "holds a list, not a JSON object.", "Check the file."),
    errors.GenerationError: (bad_sampling, "max_tokens=0 is not a positive number.", "Ask for at least 1 token."),
    errors.TraceMismatchError: (other_graph, "1 reductions are fused, expected 7", "graphfuse: 1 all-reduces: 1 fused"),
}
"""For each class: what raises it, and a part of the message that says what is wrong, and one that says what to do."""


def classes() -> list[type[errors.GraphfuseError]]:
    found = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]
    return [c for c in found if c is not errors.GraphfuseError]


def test_every_error_class_has_a_trigger():
    assert set(TRIGGERS) == set(classes())


@pytest.mark.parametrize("cls", TRIGGERS, ids=lambda cls: cls.__name__)
def test_an_error_is_raised_with_what_is_wrong_and_what_to_do(cls, tmp_path):
    trigger, wrong, remedy = TRIGGERS[cls]
    with pytest.raises(cls) as raised:
        trigger(tmp_path)
    assert type(raised.value) is cls
    message = str(raised.value)
    assert wrong in message
    assert remedy in message
    assert message[0].isupper() or re.match(r"[\w/]+", message)
    assert "Traceback" not in message


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_an_error_is_one_of_ours_and_one_of_pythons(cls):
    assert issubclass(cls, errors.GraphfuseError)
    assert issubclass(cls, (ValueError, RuntimeError, AssertionError))
    assert cls.__doc__
