"""`LLM`: a checkpoint as a text generator.

The same program runs on each rank of a tensor-parallel group and gets the same completions there: every rank computes
the same logits and samples from them with the same random numbers, so nothing is sent around after a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graphfuse.agreement import is_shared, require, require_alike
from graphfuse.comm.control import control_channel
from graphfuse.comm.watching import in_call, watch
from graphfuse.compiler import checked_config, resolve_group
from graphfuse.compiler import compile as compile_model
from graphfuse.config import FuseConfig
from graphfuse.errors import ConfigError, GenerationError
from graphfuse.generation.batch import OnText, Request, generate_batch
from graphfuse.generation.cache import StaticCache
from graphfuse.generation.completion import Completion, GenerationStats
from graphfuse.generation.sampling import SamplingParams
from graphfuse.generation.tokenize import Prompt, PromptEncoder, eos_token_ids, load_tokenizer
from graphfuse.report import Report
from graphfuse.weights.load import load, local_folder

OnCompletion = Callable[[int, Completion], None]
"""Called with the index of a prompt and its completion."""


class LLM:
    """A model, its tokenizer and its KV cache.

        llm = graphfuse.LLM("path/to/checkpoint", tp_group)
        [completion] = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))

    `report` tells what became of the model's reductions; `stats` the speed of the last `generate`.
    """

    def __init__(
        self,
        path: str | Path,
        tp_group: Any = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        config: FuseConfig | None = None,
        max_batch_size: int = 32,
        max_length: int | None = None,
        compile: bool = True,
    ) -> None:
        """Load this rank's part of the checkpoint at `path` and compile it.

        `tp_group` is a process group or a one-dimensional device mesh, `None` for one process. `dtype` and `device`
        default to the checkpoint's and to this rank's GPU, or the CPU. Up to `max_batch_size` prompts run at once, in
        a context of `max_length` tokens, prompt included. By default the cache is as long as the prompts need, up to
        the length that the model was made for; a given `max_length` allocates all of it at once.

        Raises `CheckpointError`, `UnsupportedModelError`, `GroupError` or `ConfigError`.
        """
        if max_batch_size < 1 or (max_length is not None and max_length < 2):
            raise ConfigError(
                f"max_batch_size={max_batch_size}, max_length={max_length} leaves no room for a token to continue from "
                "and one to generate. Use at least 1 and 2."
            )
        self._config = checked_config(config)
        self._group = resolve_group(tp_group)
        self._watch = watch(self._group) if self._config.watch else None
        with in_call(self._watch, "start of the LLM"):
            self._start(path, dtype, device, max_batch_size, max_length, compile)

    def _start(
        self,
        path: str | Path,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        max_batch_size: int,
        max_length: int | None,
        compile: bool,
    ) -> None:
        folder = local_folder(path)
        self.tokenizer = load_tokenizer(folder)
        # Only our own definitions take positions and static caches as arguments.
        model: Any = load(folder, self._group, dtype=dtype, device=device, implementation="graphfuse")
        text_config = model.config.get_text_config()
        limit = int(text_config.max_position_embeddings)
        if max_length is not None and max_length > limit:
            raise ConfigError(f"max_length={max_length} exceeds the model's {limit} positions. Use at most {limit}.")
        self.device = next(model.parameters()).device
        self._eos = eos_token_ids(folder, model.config, self.tokenizer)
        sizes = {"max_batch_size": max_batch_size, "max_length": max_length, "compile": compile}
        require_alike(self._group, self._config, model, {}, **sizes, device=self.device.type)
        self._seeds = _agreed_seeds(model.tp_group, self.device)
        self._compiled = compile_model(model, self._group, config=self._config) if compile else None
        self.model = model if self._compiled is None else self._compiled
        self._cache = StaticCache(self.model, max_batch_size=max_batch_size, max_length=max_length, limit=limit)
        self._encoder = PromptEncoder(
            self.tokenizer, vocab_size=text_config.vocab_size, max_length=self._cache.max_length
        )
        self.stats = GenerationStats()

    @property
    def report(self) -> Report | None:
        """What became of each reduction; `None` with `compile=False`."""
        return None if self._compiled is None else self._compiled.report

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts may be conversations."""
        return self._encoder.has_chat_template

    def encode(self, prompt: Prompt, name: str = "The prompt") -> list[int]:
        """The token ids that `generate` would use. Raises `GenerationError`, beginning with `name`, for an empty or too
        long prompt, one that is neither text, messages nor token ids, or messages that the chat template refuses."""
        return self._encoder.encode(prompt, name)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_text: OnText | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        """Complete each prompt: text as it is, a conversation through the chat template, or token ids.

        One `params` serves all prompts, prompt i with `seed + i`, so that equal prompts get different answers; a list
        gives each prompt its own. Call it on every rank with the same arguments; the result is the same on each. The
        callbacks may differ: `on_text(i, text)` gets the text as it comes (several prompts of a batch interleave),
        `on_completion(i, completion)` the results in the order of the prompts, a batch at a time.

        Raises `GenerationError` before anything runs if a prompt or a parameter cannot be used, and `GroupError` if the
        ranks were given different ones, or one of them is gone or fails.
        """
        with in_call(self._watch, "start of a generation"), self._seeds_kept_on_error():
            requests = self._requests(prompts, params)
            _require_same(self._group, requests)
        self.stats = GenerationStats()
        completions: list[Completion] = []
        if not requests:
            return completions
        self._make_ready(requests)
        size = self._cache.max_batch_size
        for first in range(0, len(requests), size):
            batch = requests[first : first + size]
            done = generate_batch(
                self.model,
                self._cache,
                batch,
                decode=self._decode,
                eos=self._eos,
                device=self.device,
                stats=self.stats,
                on_text=on_text,
                watch=self._watch,
            )
            completions += done
            if on_completion is not None:
                for request, completion in zip(batch, done, strict=True):
                    on_completion(request.index, completion)
        return completions

    def close(self) -> None:
        """Give the workspaces of the fused all-reduces back. The LLM cannot be used afterwards."""
        if self._compiled is not None:
            self._compiled.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise GenerationError(f"prompts is of type {type(prompts).__name__}. Give a list, if only of one prompt.")
        if prompts and isinstance(prompts[0], dict | int):
            raise GenerationError("prompts looks like a single prompt. Put it into a list: generate([prompt], …).")
        encoded = [self.encode(prompt, f"Prompt {i}") for i, prompt in enumerate(prompts)]
        if params is None or isinstance(params, SamplingParams):
            shared = params or SamplingParams()
            seeds = [None if shared.seed is None else (shared.seed + i) % 2**63 for i in range(len(encoded))]
            each: Sequence[SamplingParams] = [shared] * len(encoded)
        else:
            each, seeds = params, [p.seed for p in params]
        if len(each) != len(encoded):
            raise GenerationError(
                f"There are {len(encoded)} prompts but {len(each)} SamplingParams. Give one for all, or one for each."
            )
        return [
            Request(i, token_ids, param, self._new_seed() if seed is None else seed)
            for i, (token_ids, param, seed) in enumerate(zip(encoded, each, seeds, strict=True))
        ]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _new_seed(self) -> int:
        return int(torch.randint(2**62, (), generator=self._seeds))

    @contextmanager
    def _seeds_kept_on_error(self) -> Iterator[None]:
        """Ranks that were refused may have drawn different numbers of seeds, and go on in step."""
        state = self._seeds.get_state()
        try:
            yield
        except BaseException:
            self._seeds.set_state(state)
            raise

    @torch.no_grad()
    def _make_ready(self, requests: Sequence[Request]) -> None:
        """Make the cache and trace the model on one token, so that compiling does not count as prefill."""
        needed = max(len(r.prompt_token_ids) + r.params.max_tokens for r in requests)
        batch_size = min(len(requests), self._cache.max_batch_size)
        start = time.perf_counter()
        with in_call(self._watch, "preparation"):
            made = self._cache.reserve(batch_size, min(needed, self._cache.max_length))
            if not made:
                return
            # What this writes into the cache is overwritten by the first prefill.
            token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            self.model(token, torch.zeros_like(token), self._cache.tensors, torch.zeros_like(token[0]))
            self.stats.start_up_seconds = time.perf_counter() - start


def _require_same(group: dist.ProcessGroup | None, requests: Sequence[Request]) -> None:
    """Compare what the ranks were given to generate: other prompts are other token counts, in a call that only one of
    them waits in. Once a generation, a message of 64 characters."""
    if is_shared(group):
        fields = {
            "the number of prompts": len(requests),
            "the number of tokens of each": [len(request.prompt_token_ids) for request in requests],
            "the token ids": [request.prompt_token_ids for request in requests],
            "the sampling parameters": [str(request.params) for request in requests],
            "the seeds": [request.seed for request in requests],
        }
        require(control_channel(group), "what they were given to generate", fields)


def _agreed_seeds(tp_group: dist.ProcessGroup | None, device: torch.device) -> torch.Generator:
    """A source of seeds that starts at a random place, the same on each rank: agreed on once, here."""
    seed = torch.randint(2**62, (), generator=_fresh_generator()).to(device)
    if tp_group is not None and dist.get_world_size(tp_group) > 1:
        dist.broadcast(seed, group=tp_group, group_src=0)
    return torch.Generator().manual_seed(int(seed))


def _fresh_generator() -> torch.Generator:
    # The global generator is left alone: `torch.manual_seed` of the user's program must not fix, nor see, our seeds.
    generator = torch.Generator()
    generator.seed()
    return generator
