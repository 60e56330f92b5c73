"""`graphfuse.compile`: trace a model once, rewrite its graph, run it, and say what happened to every reduction."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import exc as dynamo_exc
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from graphfuse import gate
from graphfuse.agreement import require_alike
from graphfuse.backend import Captured, Session
from graphfuse.comm.watch import Watch
from graphfuse.comm.watching import in_call, watch
from graphfuse.config import FuseConfig
from graphfuse.errors import ConfigError, GradientsEnabledError, GraphBreakError, GraphfuseError, GroupError
from graphfuse.input_placements import InputPlacements
from graphfuse.integrations.transformers_tp import describe, is_transformers_model, require_traceable, shard_if_whole
from graphfuse.region_marks import marked_regions, repeated_layer_classes
from graphfuse.report import Report
from graphfuse.tokens import Marking, TokenDims, is_empty
from graphfuse.tracing_errors import TRACING_ERRORS, break_text, model_may_have_raised, summary

log = logging.getLogger(__name__)


def compile(
    model: nn.Module,
    tp_group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    example_inputs: Sequence[Any] | Mapping[str, Any] | Tensor | None = None,
    config: FuseConfig | None = None,
) -> CompiledModel:
    """Compile a tensor-parallel model with fused reductions.

    Args:
        model: any `nn.Module` whose forward sums partial results over the group: with functional or in-place
            all-reduces, or through DTensor tensor parallelism. It is not changed, except that a model of transformers
            which is whole on every rank is sharded in place, by its own plan.
        tp_group: the process group, or a one-dimensional device mesh, that the partial sums are reduced over. None:
            the model is compiled, and nothing is fused.
        example_inputs: positional (a sequence, or one tensor) or keyword arguments (a mapping) of one forward, which is
            run at once to trace the model. Without them the first call traces. Every rank must trace.
        config: settings; see `FuseConfig`.

    Returns:
        A module with the model's forward signature and attributes, and `.report`, `.close()`.

    Raises:
        GroupError: `tp_group` is no group this process is in, or a mesh of several dimensions.
        UnsupportedModelError: a model of transformers that is whole and cannot be sharded, with the reason.
        GraphBreakError: the model cannot be traced as one graph (when it is traced).
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}. Pass an nn.Module, for instance from graphfuse.load.")
    if isinstance(model, CompiledModel):
        raise ConfigError("The model is compiled already. Compile the original one; each call makes a new one.")
    require_traceable(model)
    group, config = resolve_group(tp_group), checked_config(config)
    if group is not None:
        shard_if_whole(model, group, tp_group if isinstance(tp_group, DeviceMesh) else None)
    compiled = CompiledModel(model, group, config)
    if example_inputs is not None:
        compiled.trace(example_inputs)
    return compiled


def checked_config(config: FuseConfig | None) -> FuseConfig:
    """The config, or the default one. Raises `ConfigError` for anything else."""
    if config is not None and not isinstance(config, FuseConfig):
        raise ConfigError(f"config is a {type(config).__name__}. Pass a graphfuse.FuseConfig.")
    return config or FuseConfig()


def resolve_group(tp_group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group behind a `tp_group` argument, or `GroupError`."""
    if tp_group is None:
        return None
    if isinstance(tp_group, DeviceMesh):
        if tp_group.ndim != 1:
            raise GroupError(
                f"tp_group is a mesh of {tp_group.ndim} dimensions. Pass the tensor-parallel one, as in mesh['tp']."
            )
        return tp_group.get_group()
    if tp_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise GroupError("This rank is not in tp_group. Call graphfuse.compile on the ranks of the group only.")
    if not isinstance(tp_group, dist.ProcessGroup):
        raise GroupError(
            f"tp_group is a {type(tp_group).__name__}. Pass a ProcessGroup or a one-dimensional DeviceMesh."
        )
    return tp_group


_TABLES = (
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Where an `nn.Module` keeps what it consists of, and how that is saved and loaded."""


class CompiledModel(nn.Module):
    """A model whose calls run the rewritten graph. Made by `graphfuse.compile`; attributes are the model's own."""

    _session_type: ClassVar[type[Session]] = Session

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        config: FuseConfig,
        *,
        facts: gate.Facts | None = None,
        capture: Callable[[Any, Any], None] | None = None,
    ) -> None:
        super().__init__()
        # Not a submodule: it would put its name in front of every parameter's. Its tables are this module's tables.
        self.__dict__["_orig_mod"] = model
        self.__dict__.update({table: model.__dict__[table] for table in _TABLES})
        self.training = model.training
        self._settings = (group, config, facts, capture)
        self._session = self._new_session()
        self._decoding: Session | None = None
        self._prompts: Any = None
        self._attempts = _attempts(model)
        unlike = repeated_layer_classes(model, alike=False) and not repeated_layer_classes(model)
        self._notes = ["layers were traced flat: they hold objects or forwards that are not equal."] if unlike else []
        self._token_dims = TokenDims()
        self._compiled: Callable | None = None
        self._closed = False
        self._begun = self._agreed = False
        self._watch: Watch | None = None
        self.__signature__ = inspect.signature(model.forward)

    @property
    def report(self) -> Report:
        """What became of every reduction. Says "not traced yet" before the first call. Until forward is called, of what
        `generate` compiled."""
        if self._decoding is None or self._session.report.traced:
            return self._session.report
        return self._decoding.report.joined(self._prompts.compiled.report)

    def trace(self, example_inputs: Sequence[Any] | Mapping[str, Any] | Tensor) -> None:
        """Trace the model by one forward on these inputs."""
        if isinstance(example_inputs, Mapping):
            self(**example_inputs)
        elif isinstance(example_inputs, Tensor):
            self(example_inputs)
        else:
            self(*example_inputs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._closed:
            raise ConfigError("This compiled model is closed. Call graphfuse.compile again.")
        self._refuse_gradients(args, kwargs)
        if not self._begun:
            self._begin()
        try:
            with torch.no_grad(), in_call(self._watch, "forward", (*args, *kwargs.values())):
                return self._forward(args, kwargs)
        except GroupError:  # the ranks have parted: what was made together is given back
            self._session.abandon()
            self._compiled = None
            raise

    def _forward(self, args: tuple, kwargs: dict) -> Any:
        if is_empty(_named(args, kwargs).values()):
            return self._orig_mod(*args, **kwargs)  # no tokens, no work: nothing to be compiled for
        if self._compiled is not None:
            try:
                return self._run(self._compiled, self._attempts[0].marking, args, kwargs)
            except _TracingFailed as failure:
                self._step_down(failure.reason, args, kwargs)
        return self._trace(args, kwargs)

    def close(self) -> None:
        """Give the workspaces back to the pool. The model cannot be called afterwards."""
        self._session.close()
        if self._decoding is not None:
            self._decoding.close()
            self._prompts.compiled.close()
        self._compiled, self._closed = None, True

    def __enter__(self) -> CompiledModel:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__["_orig_mod"]
            own = is_transformers_model(model) and name == "generate"
            return self._generate if own else getattr(model, name)

    def train(self, mode: bool = True) -> CompiledModel:
        self._orig_mod.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable, recurse: bool = True) -> CompiledModel:
        self._orig_mod._apply(fn, recurse)
        return self

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, with a static cache, and prompts and steps compiled here, unless told otherwise."""
        from graphfuse.integrations.transformers_generate import experts_on_our_op, settings_for

        if self._closed:
            raise ConfigError("This compiled model is closed. Call graphfuse.compile again.")
        if not self._begun:
            self._begin()
        if self._decoding is None:
            self._prepare_generation()
        assert self._decoding is not None
        model = self._orig_mod
        settings = settings_for(model, self._decoding, kwargs)
        try:
            with in_call(self._watch, "generate", (*args, *kwargs.values())):
                if settings is kwargs:
                    return model.generate(*args, **kwargs)
                with experts_on_our_op(model):
                    return self._prompts.shell().generate(*args, **settings)
        except GroupError:
            self._decoding.abandon()
            self._prompts.compiled._session.abandon()
            self._decoding = self._prompts = None
            raise

    def _prepare_generation(self) -> None:
        from graphfuse.integrations.transformers_generate import Prompts

        group, config, facts, capture = self._settings
        self._decoding = self._new_session(mode="reduce-overhead" if self.device.type == "cuda" else None)
        prompts = CompiledModel(self._orig_mod, group, config, facts=facts, capture=capture)
        self._prompts = Prompts(self._orig_mod, prompts)

    # --- tracing ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        group, config, _, capture = self._settings
        if capture is None and config.watch:
            self._watch = watch(group)
        self._begun = True

    def _trace(self, args: tuple, kwargs: dict) -> Any:
        """Trace in the cheapest way that the model allows, and run it. Workspaces of a failure are given back."""
        self.__signature__.bind(*args, **kwargs)  # a wrong call is a TypeError of the model's, not of tracing
        group, config, _, capture = self._settings
        if capture is None and not self._agreed:
            require_alike(group, config, self._orig_mod, _named(args, kwargs))
            self._agreed = True
        try:
            return self._trace_and_run(args, kwargs)
        except BaseException:
            self._session.abandon()
            raise

    def _trace_and_run(self, args: tuple, kwargs: dict) -> Any:
        while True:
            self._session.close()
            self._session = self._new_session()
            attempt = self._attempts[0]
            backend = _weakly(self._session)
            compiled = torch.compile(_own_code(self._orig_mod), backend=backend, fullgraph=True)
            try:
                with _collector_paused(), marked_regions(self._orig_mod) if attempt.regions else _NOTHING:
                    result = self._run(compiled, attempt.marking, args, kwargs)
            except _TracingFailed as failure:
                self._step_down(failure.reason, args, kwargs)
                continue
            self._compiled = compiled
            for note in self._notes:
                self.report.note(note)
            return result

    def _step_down(self, reason: BaseException, args: tuple, kwargs: dict) -> None:
        """Go on with the next way to trace, which is noted in the report; raise when there is none."""
        self._compiled = None
        if self._watch is not None:
            self._watch.insist()
        if len(self._attempts) == 1 or model_may_have_raised(reason):
            self._attempts, self._notes = _attempts(self._orig_mod), []
            if model_may_have_raised(reason) is not False:
                self._orig_mod(*args, **kwargs)  # its own error explains more than any of ours
            raise GraphBreakError(break_text(reason)) from reason
        given_up = self._attempts.pop(0)
        self._notes.append(f"{given_up.without}: {summary(reason)}")
        log.info("%s", self._notes[-1])

    def _run(self, compiled: Callable, marking: Marking, args: tuple, kwargs: dict) -> Any:
        try:
            with self._token_dims.marked(_named(args, kwargs), marking):
                return compiled(*args, **kwargs)
        except Captured:
            return None
        except dynamo_exc.BackendCompilerFailed as error:
            inner = error.inner_exception
            if isinstance(inner, GraphfuseError):
                raise inner from None
            depends_on_sizes = "GuardOnDataDependentSymNode" in f"{type(inner).__name__} {inner}"
            if self._session.lowering and not depends_on_sizes:
                raise  # the graph was traced: another way to trace it would not help
            raise _TracingFailed(inner) from error
        except TRACING_ERRORS as error:
            raise _TracingFailed(error) from error
        except (AssertionError, RuntimeError) as error:
            if not any(text in str(error) for text in _SIZES_DIFFER):
                raise
            # Unbacked sizes were taken to be equal, and these inputs' are not: one of them is broadcast.
            raise _TracingFailed(error) from error

    def _new_session(self, mode: str | None = None) -> Session:
        group, config, facts, capture = self._settings
        inputs = InputPlacements(self._orig_mod)
        session = self._session_type(group, config, mode=mode, facts=facts, capture=capture, inputs=inputs)
        session.report.model = describe(self._orig_mod)
        weakref.finalize(self, session.close).atexit = False
        return session

    def _refuse_gradients(self, args: tuple, kwargs: dict) -> None:
        if not torch.is_grad_enabled():
            return
        wants = any(isinstance(a, Tensor) and a.requires_grad for a in tree_leaves((args, kwargs)))
        if wants or any(p.requires_grad for p in self._orig_mod.parameters()):
            raise GradientsEnabledError(
                "Gradients are on, and a compiled model is for inference. "
                "Call it under torch.no_grad(), or call model.requires_grad_(False) first."
            )


def _named(args: tuple, kwargs: dict) -> dict[str, object]:
    """Arguments by name; what is in a dictionary under both names: transformers has masks by kinds of layers."""
    named = {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}
    parts = {f"{name}[{key!r}]": v for name, a in named.items() if isinstance(a, dict) for key, v in a.items()}
    return named | parts


@dataclass(frozen=True)
class _Attempt:
    """A way to trace a model."""

    regions: bool
    marking: Marking

    @property
    def without(self) -> str:
        """What is lost when it does not work."""
        if self.regions:
            return "layers were traced flat"
        unbacked = self.marking is Marking.UNBACKED
        return "batch and length are not one graph" if unbacked else "there may be more than four graphs"


def _attempts(model: nn.Module) -> list[_Attempt]:
    """The ways to trace a model, best first: layers as regions and sizes unbacked; flat; with dynamic sizes."""
    regions = [_Attempt(True, Marking.UNBACKED)] if repeated_layer_classes(model) else []
    return [*regions, *(_Attempt(False, marking) for marking in Marking)]


_SIZES_DIFFER = ("Guard failed on the same frame", "Runtime assertion failed for expression")
"""What torch says when sizes that a graph was traced for are not those of a call."""


class _TracingFailed(Exception):
    """Dynamo or AOTAutograd could not trace the model; another attempt may."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _weakly(session: Session) -> Callable:
    """A session as Dynamo may have it: Dynamo never forgets a backend, and must not keep the session's group alive."""
    reference = weakref.ref(session)

    def backend(module: GraphModule, inputs: Sequence[Any], **_options: object) -> Callable:
        session = reference()
        assert session is not None, "a compiled model outlives its session"
        return session(module, inputs)

    return backend


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Tracing makes many objects that live to its end: collections among them cost a tenth of the time, and find
    nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_NUMBERS = itertools.count()


def _own_code(model: nn.Module) -> Callable:
    """A function that calls the model, with a code object and a name of its own. Dynamo counts recompilations per code
    object, and learns by file, line and name which sizes vary: two models must not share either."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    forward.__code__ = forward.__code__.replace(co_name=f"graphfuse_forward_{next(_NUMBERS)}")
    return forward
