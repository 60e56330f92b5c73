"""An engine for a model: how large its caches are, and what it consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from graphfuse.comm.watching import watch
from graphfuse.compiler import CompiledModel
from graphfuse.compiler import compile as compile_model
from graphfuse.config import FuseConfig
from graphfuse.errors import ConfigError
from graphfuse.generation.engine import Engine
from graphfuse.generation.memory import tokens_that_fit
from graphfuse.generation.pages import PagePool
from graphfuse.generation.runner import Runner, current_device
from graphfuse.generation.scheduler import Scheduler
from graphfuse.generation.step_tokens import default_step_tokens


@dataclass(frozen=True)
class Sizes:
    """Sizes of an engine; `LLM` says what they mean. Raises `ConfigError` for what cannot be used."""

    max_batch_size: int = 32
    max_length: int | None = None
    cache_tokens: int | None = None
    page_size: int = 16
    max_step_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            least = 2 if name == "max_length" else 1
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < least):
                raise ConfigError(f"{name}={size!r} is not a whole number of at least {least}. Give one.")
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size={self.page_size} is not a power of two. Use 16, for instance.")

    def step_tokens(self, device: torch.device) -> int:
        """The most tokens of a step."""
        return default_step_tokens(device.type) if self.max_step_tokens is None else self.max_step_tokens

    def require_served_on(self, device: torch.device) -> None:
        """Raises `ConfigError` for pages that kernels cannot read."""
        if device.type == "cuda" and self.page_size < 8:
            raise ConfigError(f"page_size={self.page_size} is too small on a GPU. Use 16, or a power of two from 8.")


@dataclass(frozen=True)
class Built:
    """An engine, and what was decided for it."""

    engine: Engine
    model: Any
    """As it runs: compiled, or as it is written."""

    compiled: CompiledModel | None
    cache_tokens: int
    max_length: int
    """The longest text, prompt included: what the model was made for or was asked for, and the cache holds."""


def build_engine(
    model: Any,
    group: dist.ProcessGroup | None,
    config: FuseConfig,
    sizes: Sizes,
    *,
    eos: frozenset[int],
    compile: bool = True,
) -> Built:
    """Measure, make the caches, and compile. Collective. `model` is one of ours, on this rank's device.

    Raises:
        ConfigError: fewer positions than max_length, no memory for the cache, or pages that are too small.
    """
    text_config, device = model.config.get_text_config(), next(model.parameters()).device
    sizes.require_served_on(device)
    limit, page_size = int(text_config.max_position_embeddings), sizes.page_size
    max_step_tokens = sizes.step_tokens(device)
    max_length = limit if sizes.max_length is None else sizes.max_length
    if max_length > limit:
        raise ConfigError(f"max_length={max_length} exceeds the model's {limit} positions. Use at most {limit}.")
    num_tokens = sizes.cache_tokens
    if num_tokens is None:
        step_tokens = min(max(max_step_tokens, sizes.max_batch_size), sizes.max_batch_size * max_length)
        num_states = sizes.max_batch_size + 1
        with current_device(device):
            fit = tokens_that_fit(
                model, group, num_states=num_states, max_step_tokens=step_tokens, max_length=max_length, device=device
            )
        num_tokens = min(fit, sizes.max_batch_size * -(-max_length // page_size) * page_size)
    num_pages = num_tokens // page_size
    if num_pages < 1:
        raise ConfigError(
            f"A cache of {num_tokens} tokens has no page of {page_size}. Free memory, use more ranks, or give a larger "
            "cache_tokens."
        )
    max_length = min(max_length, num_pages * page_size)
    try:
        pool = PagePool(num_pages + 1, page_size, share=not model.has_state)
        caches = model.new_paged_caches(num_pages + 1, page_size, sizes.max_batch_size + 1)
    except (MemoryError, RuntimeError) as error:  # the latter is torch's
        raise ConfigError(
            f"There is no memory for a cache of {num_tokens} tokens and {sizes.max_batch_size} completions. Give a "
            "smaller cache_tokens or max_batch_size, or use more ranks."
        ) from error
    compiled = compile_model(model, group, config=config) if compile else None
    runs = model if compiled is None else compiled
    runner = Runner(
        runs, caches, page_size=page_size, max_batch_size=sizes.max_batch_size, max_length=max_length,
        vocab_size=text_config.vocab_size, eos=eos, device=device, graphs=compile,
    )  # fmt: skip
    scheduler = Scheduler(
        pool, max_batch_size=sizes.max_batch_size, max_step_tokens=max_step_tokens, max_length=max_length
    )
    engine = Engine(scheduler, runner, group, watch(group) if config.watch else None)
    return Built(engine, runs, compiled, num_pages * page_size, max_length)
