"""Who runs a rewritten graph: Inductor, or Python line by line."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.utils import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor.virtualized import V
from torch.fx import GraphModule

from graphfuse.errors import ConfigError

log = logging.getLogger(__name__)
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def resolve_executor(executor: str, device: torch.device) -> str:
    """ "auto" is Inductor on GPUs, and eager on the CPU, where a deep model must answer in seconds."""
    if executor != "auto":
        return executor
    return "inductor" if device.type == "cuda" else "eager"


def check_mode(mode: str | None) -> str | None:
    """A `torch.compile` mode, or `ConfigError`."""
    if mode is not None and mode not in MODES:
        raise ConfigError(f"mode={mode!r} is not known. Use one of {', '.join(MODES)}.")
    return None if mode == "default" else mode


def run_eagerly(module: GraphModule, inputs: Sequence[Any]) -> Callable:
    """The graph's own Python code, op by op."""
    return make_boxed_func(module.forward)


def compile_with_inductor(module: GraphModule, inputs: Sequence[Any], mode: str | None = None) -> Callable:
    """Inductor's inference path from its joint-graph passes on. Its FX graph cache sees the rewritten graph, so that
    a warm start skips code generation while the passes before it still ran."""
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner

    fake_mode = detect_fake_mode(list(inputs))
    with V.set_fake_mode(fake_mode), _mode_options(mode):
        _recursive_joint_graph_passes(module)
        from torch._inductor.cudagraph_utils import BoxedDeviceIndex
        from torch._inductor.utils import BoxedBool

        return compile_fx_inner(
            module,
            inputs,
            static_input_idxs=_static_inputs(),
            cudagraphs=BoxedBool(inductor_config.triton.cudagraphs),
            is_inference=True,
            boxed_forward_device_index=BoxedDeviceIndex(None),
        )


def _static_inputs() -> list[int]:
    """Inputs whose address never changes (parameters and buffers), as AOTAutograd recorded them."""
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return list(metadata.static_input_indices or ()) if metadata is not None else []


@contextlib.contextmanager
def _mode_options(mode: str | None) -> Iterator[None]:
    options = torch._inductor.list_mode_options(mode) if mode else {}
    with inductor_config.patch(options) if options else contextlib.nullcontext():
        yield
