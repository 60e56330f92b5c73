"""`graphfuse.compile`: trace a model once, rewrite its graph, run it, and say what happened to every reduction."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import exc as dynamo_exc
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from graphfuse import gate
from graphfuse.backend import Captured, Session
from graphfuse.config import FuseConfig
from graphfuse.errors import ConfigError, GradientsEnabledError, GraphBreakError, GraphfuseError, GroupError
from graphfuse.regions import (
    RegionsUnsupported,
    marked_regions,
    repeated_layer_classes,
    without_forward_guards,
)
from graphfuse.report import Report
from graphfuse.tokens import Marking, TokenDims

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
            all-reduces, or through DTensor tensor parallelism. It is not changed.
        tp_group: the process group, or a one-dimensional device mesh, that the partial sums are reduced over. None:
            the model is compiled, and nothing is fused.
        example_inputs: positional (a sequence, or one tensor) or keyword arguments (a mapping) of one forward, which is
            run at once to trace the model. Without them the first call traces. Every rank must trace.
        config: settings; see `FuseConfig`.

    Returns:
        A module with the model's forward signature and attributes, and `.report`, `.close()`.

    Raises:
        GroupError: `tp_group` is no group this process is in, or a mesh of several dimensions.
        GraphBreakError: the model cannot be traced as one graph (when it is traced).
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}. Pass an nn.Module, for instance from graphfuse.load.")
    if getattr(model, "config", None) is not None and getattr(model.config, "use_kernels", False):
        raise ConfigError("The model was loaded with use_kernels=True, whose norms cannot be traced. Load it without.")
    if config is not None and not isinstance(config, FuseConfig):
        raise ConfigError(f"config is a {type(config).__name__}. Pass a graphfuse.FuseConfig.")
    compiled = CompiledModel(model, resolve_group(tp_group), config or FuseConfig())
    if example_inputs is not None:
        compiled.trace(example_inputs)
    return compiled


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


class CompiledModel(nn.Module):
    """A model whose calls run the rewritten graph. Made by `graphfuse.compile`; attributes are the model's own."""

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
        self._orig_mod = model
        self._settings = (group, config, facts, capture)
        self._session = self._new_session()
        self._marking = Marking.UNBACKED
        self._token_dims = TokenDims()
        self._compiled: Callable | None = None
        self._closed = False
        self.__signature__ = inspect.signature(model.forward)

    @property
    def report(self) -> Report:
        """What became of every reduction. Says "not traced yet" before the first call."""
        return self._session.report

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
        self._refuse_gradients([*args, *kwargs.values()])
        with torch.no_grad():
            if self._compiled is None:
                return self._first_call(args, kwargs)
            self._token_dims.mark(_named(args, kwargs), self._marking)
            return self._run(self._compiled, args, kwargs)

    def close(self) -> None:
        """Give the workspaces back to the pool. The model cannot be called afterwards."""
        self._session.close()
        self._compiled, self._closed = None, True

    def __enter__(self) -> CompiledModel:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)

    # --- tracing ---------------------------------------------------------------------------------------------------

    def _first_call(self, args: tuple, kwargs: dict) -> Any:
        """Trace in the cheapest way that the model allows: layers as regions and sizes unbacked; flat; with dynamic
        sizes. Each step down is noted in the report with its reason."""
        arguments = _named(args, kwargs)
        attempts = [(True, Marking.UNBACKED), (False, Marking.UNBACKED), (False, Marking.DYNAMIC)]
        if not repeated_layer_classes(self._orig_mod):
            attempts = attempts[1:]
        notes: list[str] = []
        for number, (as_regions, marking) in enumerate(attempts):
            if number:
                self._session.close()
                self._session = self._new_session()
            self._token_dims.unmark(arguments)
            self._token_dims.mark(arguments, marking)
            options: dict[str, Any] | None = {"guard_filter_fn": without_forward_guards} if as_regions else None
            compiled = torch.compile(_own_code(self._orig_mod), backend=self._session, fullgraph=True, options=options)
            try:
                if as_regions:
                    with marked_regions(self._orig_mod):
                        result = self._run(compiled, args, kwargs)
                else:
                    result = self._run(compiled, args, kwargs)
            except _Retry as retry:
                if number + 1 == len(attempts):
                    raise GraphBreakError(_break_text(retry.reason)) from retry.reason
                what = "layers were traced flat" if as_regions else "batch and length are not one graph"
                notes.append(f"{what}: {_first_line(retry.reason)}")
                log.info("%s", notes[-1])
                continue
            self._compiled, self._marking = compiled, marking
            for note in notes:
                self.report.note(note)
            return result
        raise AssertionError("no attempt was made")

    def _run(self, compiled: Callable, args: tuple, kwargs: dict) -> Any:
        try:
            return compiled(*args, **kwargs)
        except Captured:
            return None
        except dynamo_exc.BackendCompilerFailed as error:
            inner = error.inner_exception
            if isinstance(inner, GraphfuseError):
                raise inner from None
            if isinstance(inner, (RegionsUnsupported, *_TRACING_ERRORS)) and self._compiled is None:
                raise _Retry(inner) from error
            raise
        except _TRACING_ERRORS as error:
            if self._compiled is None:
                raise _Retry(error) from error
            raise GraphBreakError(_break_text(error)) from error

    def _new_session(self) -> Session:
        group, config, facts, capture = self._settings
        return Session(group, config, facts=facts, capture=capture)

    def _refuse_gradients(self, arguments: Sequence[object]) -> None:
        if not torch.is_grad_enabled():
            return
        wants = any(isinstance(a, Tensor) and a.requires_grad for a in arguments)
        if wants or any(p.requires_grad for p in self._orig_mod.parameters()):
            raise GradientsEnabledError(
                "Gradients are on, and a compiled model is for inference. "
                "Call it under torch.no_grad(), or call model.requires_grad_(False) first."
            )


def _named(args: tuple, kwargs: dict) -> dict[str, object]:
    return {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}


_TRACING_ERRORS = (dynamo_exc.TorchDynamoException, GuardOnDataDependentSymNode)


class _Retry(Exception):
    """Tracing failed in a way that another attempt may avoid."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _own_code(model: nn.Module) -> Callable:
    """A function that calls the model, with a code object of its own: Dynamo counts recompilations per code object,
    and two models of one class must not use up each other's."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    forward.__code__ = forward.__code__.replace(co_name="graphfuse_forward")
    return forward


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _break_text(error: BaseException) -> str:
    """Where tracing stopped, and what to do, from Dynamo's own message."""
    frames = [line.strip() for line in str(error).splitlines() if line.strip().startswith("File ")]
    where = f" at {frames[-1].removeprefix('File ')}" if frames else ""
    return (
        f"The model cannot be traced as one graph{where}: {_first_line(error)} "
        "Rewrite that line with tensor operations, or move it out of forward; "
        "torch._dynamo.explain(model)(*inputs) lists every such place."
    )
