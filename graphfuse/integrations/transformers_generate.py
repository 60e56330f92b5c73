"""`generate` of a compiled model of transformers: decoding runs the rewritten graph.

transformers compiles the decode step by itself when the cache is static, with the backend that a `CompileConfig` names.
Here that is the compiled model's own: its group, its `FuseConfig`, its report. On GPUs the step is captured in CUDA
graphs (the mode "reduce-overhead"). The prompt's forward runs as the model is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from graphfuse.backend import Session


def settings_for(model: Any, session: Session, given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `model.generate`: those given, and a static cache and the session as its compiler.

    A `compile_config`, a cache or its kind, and `disable_compile`, whether given here or in the generation config, are
    the caller's choice and stay.
    """
    config = given.get("generation_config") or model.generation_config
    if any(given.get(name) is not None for name in ("past_key_values", "cache", "assistant_model")):
        return given

    def chosen(name: str) -> Any:
        value = given.get(name)
        return getattr(config, name, None) if value is None else value

    if chosen("compile_config") or chosen("disable_compile") or chosen("use_cache") is False:
        return given
    kind = chosen("cache_implementation") or "static"
    if "static" not in kind:
        return given
    added = {"cache_implementation": kind, "compile_config": _compile_config(session, model.device)}
    if given.get("generation_config") is None:
        return {**given, **added}
    own = type(config).from_dict(config.to_dict())  # a given config and single settings exclude each other
    for name, value in added.items():
        setattr(own, name, value)
    return {**given, "generation_config": own}


_CONFIGS: weakref.WeakKeyDictionary[Session, Any] = weakref.WeakKeyDictionary()
"""One for each session: transformers compiles anew when it gets another."""


def _compile_config(session: Session, device: torch.device) -> Any:
    from transformers import CompileConfig

    if session not in _CONFIGS:
        mode = "reduce-overhead" if device.type == "cuda" else "default"
        config: Any = CompileConfig(backend=_backend_of(session), fullgraph=True, mode=mode)
        config._compile_all_devices = True  # otherwise only on GPUs
        _CONFIGS[session] = config
    return _CONFIGS[session]


def _backend_of(session: Session) -> Callable:
    reference = weakref.ref(session)  # Dynamo never forgets a backend

    def backend(module: GraphModule, inputs: Sequence[Any], **_options: object) -> Callable:
        current = reference()
        assert current is not None, "a decode step outlives its model"
        return current(module, inputs)

    return backend
