"""The Dynamo backend: a traced graph comes in, is rewritten, and goes to an executor.

    Dynamo graph ─► seal regions ─► AOTAutograd, inference ─► inline ─► passes ─► outline ─► Inductor, or eager

`graphfuse.compile` makes a `Session` for its model. `torch.compile(model, backend="graphfuse")` and transformers'
`CompileConfig(backend="graphfuse")` come through `graphfuse_backend`, which makes one per graph; its report is
`graphfuse.last_report()`. Passes run at every start, in front of every cache, so the report is always whole.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import detect_fake_mode
from torch._guards import TracingContext, tracing
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from graphfuse import gate, regions
from graphfuse.agreement import has_collectives, require_same_graph
from graphfuse.comm.lost_peer import is_idle
from graphfuse.config import FuseConfig
from graphfuse.errors import ConfigError, FusionRequiredError, GroupError, brief
from graphfuse.executors import check_mode, compile_with_inductor, resolve_executor, run_eagerly
from graphfuse.inlining import inline
from graphfuse.input_placements import InputPlacements, Source, name_inputs
from graphfuse.module_paths import annotate_paths
from graphfuse.ops import attention as _attention  # noqa: F401  (registers the op)
from graphfuse.passes import default_rules
from graphfuse.passes.driver import run_passes, select_rules
from graphfuse.passes.dump import Dump
from graphfuse.passes.graph_reading import argument, parameters
from graphfuse.passes.groups import Groups
from graphfuse.passes.outline import outline
from graphfuse.passes.reductions import reductions
from graphfuse.passes.rule import Context, Rule
from graphfuse.passes.verify_placements import check, known_placements
from graphfuse.region_marks import forget_forward_guards
from graphfuse.report import DECLINED, Report, SiteReport

log = logging.getLogger(__name__)


class Session:
    """What stays the same for all graphs of one model: group, config, gate decisions, report, workspaces.

    Args:
        group: the tensor-parallel group, or None.
        config: settings.
        mode: a `torch.compile` mode for Inductor.
        facts: facts about the host; gathered from the group when None.
        infer_group: take the group that the graph's reductions share, when `group` is None.
        capture: called with each rewritten graph (tests and `explain` read it); nothing is executed then.
        inputs: how the model's parameters and arguments are divided over the ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        config: FuseConfig,
        *,
        mode: str | None = None,
        infer_group: bool = False,
        facts: gate.Facts | None = None,
        capture: Callable[[GraphModule, GraphModule], None] | None = None,
        inputs: InputPlacements | None = None,
    ) -> None:
        self.group = group
        self.config = config
        self.mode = check_mode(mode)
        self.rules: list[Rule] = list(default_rules() if config.rules is None else config.rules)
        self.active_rules = select_rules(self.rules, config)
        self.report = Report()
        self.lowering = False
        """Whether the graph being compiled has been traced: what fails now has nothing to do with tracing."""
        self._infer_group = infer_group
        self._first_is_shared = not infer_group  # every rank traces a model as a whole, but parts of it as they come
        self._facts = facts
        self._capture = capture
        self._inputs = inputs or InputPlacements(None)
        self._verifies = config.verify_placements or (config.verify_placements is None and capture is not None)
        self._decisions: dict[tuple[torch.dtype, int], gate.Decision] = {}
        self._workspaces: list[tuple[dist.ProcessGroup, torch.dtype, int]] = []

    # --- Dynamo calls this -----------------------------------------------------------------------------------------

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable:
        started = time.perf_counter()
        self.lowering = False
        sources = self._inputs.sources(module, Groups.of(self.group))
        sealed = regions.seal(module)
        forget_forward_guards()
        try:
            regions.trace_bodies(sealed, _capture_body)
            if sealed.regions:
                log.info("%d distinct regions", len(sealed.regions))

            def lower(top: GraphModule, top_inputs: Sequence[Any]) -> Callable:
                flat = inline(top) if sealed.keys else top
                self._spent("trace", time.perf_counter() - started)
                self.lowering = True
                return self._lower(flat, top_inputs, sources)

            # No AOTAutograd cache: on a hit it would answer without running the passes.
            return aot_autograd(
                fw_compiler=lower,
                inference_compiler=lower,
                decompositions=select_decomp_table(),
                keep_inference_input_mutations=True,
            )(module, inputs)
        finally:
            sealed.close()

    # --- one flat ATen graph ---------------------------------------------------------------------------------------

    def _lower(self, module: GraphModule, inputs: Sequence[Any], sources: list[Source]) -> Callable:
        annotate_paths(module)
        device = _device_of(inputs)
        if self.group is None and self._infer_group:
            self.group = _shared_group(module, self.report)
        if self._capture is None and not self.report.num_graphs and (self._first_is_shared or has_collectives(module)):
            require_same_graph(self.group, module)
        context = Context(
            Groups.of(self.group),
            lambda dtype, size: self._decide(dtype, size, device),
            facts=lambda: self._gathered(device),
            moe_config_dir=None if self.config.moe_config_dir is None else os.fspath(self.config.moe_config_dir),
        )
        name_inputs(module.graph, sources)
        before = _copy(module) if self._capture else None
        self._verify(module, context, "The traced model is wrong on several ranks, before any rewriting", _MEND_MODEL)
        result = run_passes(
            module,
            self.active_rules,
            context,
            self.config,
            fuel=_fuel(),
            dump=Dump(self.config.dump or os.environ.get("GRAPHFUSE_DUMP"), prefix=f"graph{self.report.num_graphs}_"),
        )
        self._spent("passes", result.seconds)
        self._verify(module, context, "Rewriting made the model wrong on several ranks", _FIND_RULE)
        self.report.rules = result.rules
        self._prepare_workspaces(result.sites, device)
        sites = [dataclasses.replace(s, backends=self._served(s)) for s in result.sites]
        self.report.add_graph(sites, result.experts)
        self.report.gate = self._gate_summary()
        if self.config.fusion == "require":
            self._require(self.report)
        if self._capture is not None:
            assert before is not None
            self._capture(before, module)
            return _stop
        return self._execute(module, inputs, device)

    def _execute(self, module: GraphModule, inputs: Sequence[Any], device: torch.device) -> Callable:
        started = time.perf_counter()
        executor = resolve_executor(self.config.executor, device)
        if executor == "eager":
            if self.mode is not None:
                self.report.note(f"mode={self.mode!r} is for Inductor; the eager executor ignores it")
            return self._eagerly(module, inputs)
        if self.mode is not None and _writes_caches(module):
            # CUDA-graph trees copy an input whose address may change; what an op writes would stay in the copy.
            self.report.note(f"mode={self.mode!r} is ignored: its CUDA graphs would lose what is written to caches")
            self.mode = None
        repeats = outline(module)
        if repeats:
            log.info("outlined %s", repeats)
        compiled = self._by_inductor(module, inputs)
        self._spent("compile", time.perf_counter() - started)
        return compiled

    def _eagerly(self, module: GraphModule, inputs: Sequence[Any]) -> Callable:
        return run_eagerly(module, inputs)

    def _by_inductor(self, module: GraphModule, inputs: Sequence[Any]) -> Callable:
        return compile_with_inductor(module, inputs, self.mode)

    def _verify(self, module: GraphModule, context: Context, what: str, advice: str) -> None:
        """The proof of placements, in front of the passes and behind them."""
        if not self._verifies or context.groups.size < 2:
            return
        reducing = frozenset().union(*(rule.reduces for rule in self.active_rules))
        found = check(module.graph, known_placements(module.graph), context.groups, reducing)
        self.report.placements = found.to_json()
        self._spent("placements", found.seconds)
        found.require_no_faults(what, advice)

    def _spent(self, stage: str, seconds: float) -> None:
        self.report.seconds[stage] = self.report.seconds.get(stage, 0.0) + seconds

    # --- the gate and the workspaces -------------------------------------------------------------------------------

    def _decide(self, dtype: torch.dtype, hidden_size: int, device: torch.device) -> gate.Decision:
        key = (dtype, hidden_size)
        if key not in self._decisions:
            self._decisions[key] = gate.decide(
                self._gathered(device), dtype=dtype, hidden_size=hidden_size, allreduce=self.config.allreduce
            )
        return self._decisions[key]

    def _gathered(self, device: torch.device) -> gate.Facts:
        if self._facts is None:
            self._facts = gate.gather_facts(self.group, device)
        return self._facts

    def _prepare_workspaces(self, sites: Sequence[SiteReport], device: torch.device) -> None:
        """Make the comm backends of the sites just found ready, on every rank or on none."""
        if self._capture is not None or self.group is None:
            return
        from graphfuse.comm import pool

        for dtype, hidden_size in dict.fromkeys(site.served_as for site in sites if site.served_as):
            held, decision = (self.group, dtype, hidden_size), self._decisions[dtype, hidden_size]
            if held not in self._workspaces:
                self._decisions[dtype, hidden_size] = pool.prepare(
                    self.group, decision, dtype=dtype, hidden_size=hidden_size, device=device
                )
                self._workspaces.append(held)

    def _served(self, site: SiteReport) -> tuple[dict, ...]:
        """The size ranges in force, now that the workspaces were made, or were not."""
        return tuple(self._decisions[site.served_as].to_json()["ranges"]) if site.served_as else ()

    def _gate_summary(self) -> dict[str, Any]:
        decisions = [
            {"dtype": str(dtype).removeprefix("torch."), "hidden_size": size, **decision.to_json()}
            for (dtype, size), decision in self._decisions.items()
        ]
        reasons = list(dict.fromkeys(reason for d in self._decisions.values() for reason in d.reasons))
        return {"facts": self._facts.to_json() if self._facts else {}, "decisions": decisions, "reasons": reasons}

    def _require(self, report: Report) -> None:
        left = [site for site in report.sites if site.status == DECLINED and site.residual]
        if left:
            lines = "\n".join(f"  {site.module or '(top)'}: {site.outcome()}" for site in left)
            raise FusionRequiredError(
                f"fusion='require', but {len(left)} residual-stream reductions were declined:\n{lines}\n"
                "Remove the reasons, or use fusion='auto' to run them unfused."
            )

    def abandon(self) -> None:
        """`close` after an error. Workspaces that the GPU is still at work in stay: freeing them would wait for it."""
        if not torch.cuda.is_initialized() or is_idle(torch.cuda.current_stream()):
            self.close()

    def close(self) -> None:
        """Give the workspaces back to the pool."""
        if self._workspaces:
            from graphfuse.comm import pool

            for group, dtype, hidden_size in self._workspaces:
                pool.release(group, dtype=dtype, hidden_size=hidden_size)
            self._workspaces.clear()


_MEND_MODEL = "Mend the model, or what it says of its parameters, where the arrows end."
_FIND_RULE = "Switch off the last rule you added (FuseConfig.disabled_rules) or find it with GRAPHFUSE_FUEL=n."


# --- torch.compile(model, backend="graphfuse") ----------------------------------------------------------------------

_last = threading.local()


def graphfuse_backend(
    module: GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable:
    """The backend behind `torch.compile(model, backend="graphfuse")`.

    Args:
        mode: a `torch.compile` mode; passed on to Inductor.
        options: fields of `FuseConfig`, and "tp_group": the group's name. Without it, the group that the graph's
            reductions share.
    """
    options = dict(options or {})
    name = options.pop("tp_group", None)
    group = None if name is None else group_named(name)
    session = Session(group, FuseConfig.from_options(options), mode=mode, infer_group=True)
    _last.report = session.report
    compiled = session(module, inputs)

    def run(*args: Any) -> Any:
        return compiled(*args)

    weakref.finalize(run, session.close).atexit = False  # when Dynamo drops the graph, its workspaces go
    return run


def last_report() -> Report | None:
    """The report of the graph that this thread compiled last through `backend="graphfuse"`; None before the first."""
    return getattr(_last, "report", None)


def group_named(name: object) -> dist.ProcessGroup:
    """The process group of this name, or `GroupError`."""
    if isinstance(name, dist.ProcessGroup):
        return name
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise GroupError(
            f"There is no process group called {name!r}. Pass group.group_name of an existing one."
        ) from error


class Captured(Exception):
    """A session that only captures graphs has done so; raised where a compiled graph would run."""


def _stop(*_args: object) -> Any:
    raise Captured


# --- helpers --------------------------------------------------------------------------------------------------------


def _capture_body(module: GraphModule, inputs: list[Any]) -> GraphModule:
    """One region's ATen graph, by AOTAutograd in a tracing context of its own."""
    captured: list[GraphModule] = []

    def keep(graph_module: GraphModule, _inputs: Sequence[Any]) -> Callable:
        metadata = TracingContext.get().fw_metadata
        if metadata is not None and metadata.num_mutated_inp_runtime_indices:
            raise regions.RegionsUnsupported("a layer changes the shape or memory of a tensor that it is given")
        captured.append(graph_module)
        return run_eagerly(graph_module, _inputs)

    with tracing(TracingContext(detect_fake_mode(inputs))):
        aot_autograd(
            fw_compiler=keep,
            inference_compiler=keep,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )(module, inputs)
    return captured[0]


def _shared_group(module: GraphModule, report: Report) -> dist.ProcessGroup | None:
    """The one group that all reductions of a graph run over."""
    names = {str(node.args[2]) for node in reductions(module.graph)}
    groups = {Groups.of(group).ranks: group for group in map(group_named, sorted(names))}
    if len(groups) > 1:
        report.note(
            f"reductions run over {len(groups)} groups, so none was taken for the tensor-parallel one: "
            "pass options={'tp_group': name}"
        )
        return None
    return next(iter(groups.values()), None)


def _device_of(inputs: Sequence[Any]) -> torch.device:
    devices = [t.device for t in inputs if isinstance(t, Tensor)]
    return next((d for d in devices if d.type != "cpu"), devices[0] if devices else torch.device("cpu"))


def _fuel() -> int | None:
    text = os.environ.get("GRAPHFUSE_FUEL")
    if text is None:
        return None
    if not (text.isdecimal() and text.isascii() and len(text) <= 18):  # "²" is a digit, too
        raise ConfigError(f"GRAPHFUSE_FUEL={brief(text)} is not a number of rewrites. Unset it, or give 0, 1, 2, ...")
    return int(text)


def _writes_caches(module: GraphModule) -> bool:
    """Whether some op of ours in a graph is handed a cache: such arguments are called `..._cache`."""
    ours = (node for node in module.graph.nodes if getattr(node.target, "namespace", None) == "graphfuse")
    return any(
        name.endswith("_cache") and argument(node, name) is not None
        for node in ours
        for name in parameters(node.target)[0]
    )


def _copy(module: GraphModule) -> GraphModule:
    graph = torch.fx.Graph()
    copied: Any = graph.graph_copy(module.graph, {}, return_output_node=True)
    output, old = copied
    graph.output(output).meta = dict(old.meta)
    with _use_lazy_graph_module(True):  # read, hardly ever run
        return _make_graph_module(module, graph)
