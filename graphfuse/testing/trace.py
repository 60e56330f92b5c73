"""The graph of a model before and after the passes, without GPU, weights or other processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import GraphModule

from graphfuse.compiler import CompiledModel, resolve_group
from graphfuse.config import FuseConfig
from graphfuse.errors import TraceMismatchError
from graphfuse.gate import Facts
from graphfuse.passes.rule import Rule
from graphfuse.report import FUSED, Report


@dataclass(frozen=True)
class Trace:
    """What `trace` gives: both graphs, flat (regions inlined), and the report."""

    before: GraphModule
    after: GraphModule
    report: Report


def trace(
    model_or_factory: nn.Module | Callable[[], nn.Module],
    example_inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    group: dist.ProcessGroup | None,
    *,
    rules: Sequence[Rule] | None = None,
    config: FuseConfig | None = None,
    facts: Facts | None = None,
) -> Trace:
    """Trace and rewrite a model, and run nothing.

    Args:
        model_or_factory: a module, traced as it is, or a function that builds one. A factory is called with the default
            device "meta", so a model of any size takes no memory; example inputs are moved there too. Its model is
            traced in evaluation mode.
        example_inputs: as for `graphfuse.compile`.
        group: the group to compile for, from `fake_tp`.
        rules: only these rules, in this order; None means the config's.
        config: settings; `FuseConfig()` when None.
        facts: facts about a made-up host for the gate; None means this one.

    Raises:
        TraceMismatchError: the model traced into several graphs or none.
    """
    config = config or FuseConfig()
    if rules is not None:
        config = dataclasses.replace(config, rules=tuple(rules))
    if isinstance(model_or_factory, nn.Module):
        model = model_or_factory
    else:
        with torch.device("meta"):
            model = model_or_factory().eval()
        example_inputs = _to_meta(example_inputs)
    graphs: list[tuple[GraphModule, GraphModule]] = []
    compiled = CompiledModel(
        model, resolve_group(group), config, facts=facts, capture=lambda before, after: graphs.append((before, after))
    )
    with torch.no_grad():
        compiled.trace(example_inputs)
    compiled.close()
    if len(graphs) != 1:
        raise TraceMismatchError(f"The model traced into {len(graphs)} graphs. Give inputs that one graph serves.")
    return Trace(*graphs[0], compiled.report)


def assert_fused(
    model_or_factory: nn.Module | Callable[[], nn.Module],
    inputs: Sequence[Any] | Mapping[str, Any] | Tensor,
    group: dist.ProcessGroup | None,
    *,
    fused: int,
    declined: Mapping[str, str] | None = None,
    config: FuseConfig | None = None,
    facts: Facts | None = None,
) -> Report:
    """Check what becomes of a model's reductions.

    Args:
        fused: how many are fused.
        declined: the module paths of declined ones, and a part of the reason for those in that module.

    Returns:
        The report.

    Raises:
        TraceMismatchError: it came out otherwise; the message shows the report.
    """
    report = trace(model_or_factory, inputs, group, config=config, facts=facts).report
    faults = []
    if report.totals["fused"] != fused:
        faults.append(f"{report.totals['fused']} reductions are fused, expected {fused}")
    expected = dict(declined or {})
    left = [site for site in report.sites if site.status != FUSED]
    for site in left:
        place, reason = site.module or "(top)", expected.get(site.module)
        if reason is None:
            faults.append(f"{place} is {site.status}, unexpectedly: {site.outcome()}")
        elif reason not in site.outcome():
            faults.append(f"{place}: the reason is {site.outcome()!r}, expected {reason!r} in it")
    missing = expected.keys() - {site.module for site in left}
    faults += [f"{module or '(top)'} is not among the declined ones" for module in sorted(missing)]
    if faults:
        raise TraceMismatchError("; ".join(faults) + f"\n{report}")
    return report


def _to_meta(inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return inputs.to("meta")
    if isinstance(inputs, Mapping):
        return {key: _to_meta(value) for key, value in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(_to_meta(value) for value in inputs)
    return inputs
