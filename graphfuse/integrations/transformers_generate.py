"""`generate` of a compiled model of transformers: decoding runs the rewritten graph.

transformers compiles the decode step by itself when the cache is static, with the backend that a `CompileConfig` names.
Here that is the compiled model's own: its group, its `FuseConfig`, its report. On GPUs the step is captured in CUDA
graphs (the mode "reduce-overhead"). The prompt's forward is compiled apart from it, for all lengths at once: the model
that `generate` sees is a shell around the same modules, whose call with an empty static cache is that graph.

    generate(shell) ─► shell(prompt): the prompt's graph ─► shell.get_compiled_call(): the step's graph, over and over

Experts run on graphfuse's op meanwhile: on GPUs transformers would decode with "batched_mm" instead of "grouped_mm",
which gathers the weights of every token's experts.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.fx import GraphModule

from graphfuse.backend import Session
from graphfuse.errors import GraphBreakError, brief
from graphfuse.tokens import Marking, TokenDims

log = logging.getLogger(__name__)


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


@contextlib.contextmanager
def experts_on_our_op(model: Any) -> Iterator[None]:
    """While open, experts of a model that are set to "grouped_mm" run on graphfuse's op, if it knows all of them."""
    before = model.get_experts_implementation()
    if "grouped_mm" not in before.values() or not model._can_set_experts_implementation() or not _known(model):
        yield
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from graphfuse.integrations.transformers import NAME, register

    if NAME not in ALL_EXPERTS_FUNCTIONS:
        register()
    model.set_experts_implementation({part: NAME if name == "grouped_mm" else name for part, name in before.items()})
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _known(model: nn.Module) -> bool:
    from graphfuse.integrations.transformers import is_known

    experts = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
    return bool(experts) and all(map(is_known, experts))


class Prompts:
    """Runs the forwards of prompts over empty static caches.

    Args:
        model: transformers' model.
        compiled: a `CompiledModel` of it for prompts alone.
    """

    def __init__(self, model: Any, compiled: Any) -> None:
        self.compiled = compiled
        compiled._begun = True  # the watch of the model that generates sees to its calls
        compiled._token_dims = TokenDims(masks=True)
        # Layers hold caches, which are not alike; and transformers asks whether a length is 1, or fits a window.
        compiled._notes = []
        compiled._attempts = [a for a in compiled._attempts if not a.regions and a.marking is not Marking.UNBACKED]
        self._model = model
        self._gave_up = False
        own: Any = type(model)
        self._shell: Any = object.__new__(_shell_class(own))

    def shell(self) -> Any:
        """The model as `generate` shall see it: what it remembers between calls stays there."""
        self._shell.__dict__.update(self._model.__dict__, _graphfuse_prompts=self)
        return self._shell

    def run(self, args: tuple, inputs: dict[str, Any]) -> Any:
        """The forward of a prompt, or whatever else `generate` calls the model for, which runs as the model is."""
        cache: Any = inputs.get("cache")
        if self._gave_up or args or not self._make_room(cache, inputs):
            return self._model(*args, **inputs)
        for value in _tensors(inputs):
            torch._dynamo.mark_static(value, 0)  # the cache has been made for so many sequences
        try:
            return self.compiled(**inputs)
        except (GraphBreakError, TorchDynamoException) as error:
            self._gave_up = True
            self.compiled.report.note(f"prompts of generate() run as the model is: {brief(error, 300)}")
            log.warning("%s", self.compiled.report.notes[-1])
        cache.reset()
        return self._model(**inputs)

    def _make_room(self, cache: Any, inputs: dict[str, Any]) -> bool:
        """Whether this is a prompt over an empty static cache, which then has its tensors: made inside a graph, CUDA
        graphs of the steps that follow would not know them for what stays in place."""
        from transformers import StaticCache

        ids = inputs.get("input_ids")
        if type(cache) is not StaticCache or cache.is_initialized or not isinstance(ids, Tensor) or ids.shape[1] < 2:
            return False
        shape = self._model._get_static_cache_init_shape()
        if shape is None:
            return False
        heads, head_dim = shape
        model = self._model
        cache.early_initialization(
            batch_size=ids.shape[0], num_heads=heads, head_dim=head_dim, dtype=model.dtype, device=model.device
        )
        return True


def _tensors(inputs: dict[str, Any]) -> Iterator[Tensor]:
    for value in inputs.values():
        yield from (v for v in (value.values() if isinstance(value, dict) else [value]) if isinstance(v, Tensor))


@functools.lru_cache(maxsize=64)
def _shell_class(own: type) -> type:
    """A model's class that calls itself through `Prompts`. Its name and module are the class's: transformers reads
    them."""

    def __call__(self: Any, *args: Any, **inputs: Any) -> Any:
        return self._graphfuse_prompts.run(args, inputs)

    def get_compiled_call(self: Any, compile_config: Any) -> Callable:
        return self._graphfuse_prompts._model.get_compiled_call(compile_config)

    members = {"__call__": __call__, "get_compiled_call": get_compiled_call, "__module__": own.__module__}
    return type(own.__name__, (own,), {**members, "__qualname__": own.__qualname__})
