"""`LLM`: a checkpoint as a text generator.

The same program runs on each rank of a tensor-parallel group and gets the same completions there: every rank schedules
the same steps, computes the same logits and samples from them with the same random numbers, so nothing is sent around
after a step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
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
from graphfuse.generation.completion import Completion, GenerationStats
from graphfuse.generation.engine import Engine
from graphfuse.generation.job import Job, Request
from graphfuse.generation.memory import tokens_that_fit
from graphfuse.generation.pages import PagePool
from graphfuse.generation.runner import Runner
from graphfuse.generation.sampling import SamplingParams
from graphfuse.generation.scheduler import Scheduler
from graphfuse.generation.sequence import OnText
from graphfuse.generation.sequence import Sequence as Running
from graphfuse.generation.tokenize import Prompt, PromptEncoder, eos_token_ids, load_tokenizer
from graphfuse.report import Report
from graphfuse.weights.load import load, local_folder

OnCompletion = Callable[[int, Completion], None]
"""Called with the index of a prompt and its completion."""


@dataclass
class Progress:
    """What is going on inside `LLM.generate` and `LLM.complete`."""

    num_running: int = 0
    num_waiting: int = 0
    cache_used: float = 0.0
    """Share of the cache's pages that running sequences hold, 0 to 1."""


class LLM:
    """A model, its tokenizer and its paged cache.

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
        cache_tokens: int | None = None,
        page_size: int = 16,
        max_step_tokens: int = 2048,
        compile: bool = True,
    ) -> None:
        """Load this rank's part of the checkpoint at `path` and compile it.

        Args:
            path: a checkpoint folder or a hub id.
            tp_group: a process group or a one-dimensional device mesh; None for one process.
            dtype, device: the checkpoint's and this rank's GPU, or the CPU, if None.
            config: settings; see `FuseConfig`.
            max_batch_size: how many completions run at once at most.
            max_length: the longest text in tokens, prompt included; as long as the model was made for if None.
            cache_tokens: for how many tokens of all running texts together there is a cache. None measures how many
                fit: on a GPU all that is left, on the CPU at most 1 GiB a rank. No text can be longer.
            page_size: tokens of a page of the cache, a power of two. Prompts share whole pages only.
            max_step_tokens: how many tokens a step computes at most. Longer prompts are computed in chunks, among the
                tokens of the completions that run already.
            compile: False runs the model as it is written.

        Raises `CheckpointError`, `UnsupportedModelError`, `GroupError` or `ConfigError`.
        """
        sizes = {
            "max_batch_size": max_batch_size,
            "max_length": max_length,
            "cache_tokens": cache_tokens,
            "page_size": page_size,
            "max_step_tokens": max_step_tokens,
        }
        _check_sizes(sizes)
        self._config = checked_config(config)
        self._group = resolve_group(tp_group)
        self._watch = watch(self._group) if self._config.watch else None
        with in_call(self._watch, "start of the LLM"):
            self._start(path, dtype, device, sizes, compile)

    def _start(
        self,
        path: str | Path,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        sizes: dict[str, Any],
        compile: bool,
    ) -> None:
        folder = local_folder(path)
        self.tokenizer = load_tokenizer(folder)
        # Only our own definitions take paged caches as arguments.
        model: Any = load(folder, self._group, dtype=dtype, device=device, implementation="graphfuse")
        text_config = model.config.get_text_config()
        limit, max_length = int(text_config.max_position_embeddings), sizes["max_length"]
        if max_length is not None and max_length > limit:
            raise ConfigError(f"max_length={max_length} exceeds the model's {limit} positions. Use at most {limit}.")
        self.device = next(model.parameters()).device
        self._eos = eos_token_ids(folder, model.config, self.tokenizer)
        require_alike(self._group, self._config, model, {}, **sizes, compile=compile, device=self.device.type)
        self._seeds = _agreed_seeds(model.tp_group, self.device)
        self._make_engine(model, sizes, limit if max_length is None else max_length, text_config.vocab_size, compile)
        self._encoder = PromptEncoder(self.tokenizer, vocab_size=text_config.vocab_size, max_length=self.max_length)
        self._guides: Any = None
        self._is_ready = False
        self._num_prompts = 0
        self.progress = Progress()

    def _make_engine(self, model: Any, sizes: dict[str, Any], max_length: int, vocab_size: int, compile: bool) -> None:
        page_size, batch_size = sizes["page_size"], sizes["max_batch_size"]
        num_tokens, step_tokens = sizes["cache_tokens"], sizes["max_step_tokens"]
        if num_tokens is None:
            fit = tokens_that_fit(
                model, self._group, num_states=batch_size + 1, max_step_tokens=min(step_tokens, max_length),
                device=self.device,
            )  # fmt: skip
            num_tokens = min(fit, batch_size * -(-max_length // page_size) * page_size)
        num_pages = num_tokens // page_size
        if num_pages < 1:
            raise ConfigError(
                f"A cache of {num_tokens} tokens has no page of {page_size}. Free memory, use more ranks, or give a "
                "larger cache_tokens."
            )
        self.cache_tokens = num_pages * page_size
        self.max_length = min(max_length, self.cache_tokens)
        pool = PagePool(num_pages + 1, page_size, share=not model.has_state)
        caches = model.new_paged_caches(num_pages + 1, page_size, batch_size + 1)
        self._compiled = compile_model(model, self._group, config=self._config) if compile else None
        self.model = model if self._compiled is None else self._compiled
        runner = Runner(
            self.model, caches, page_size=page_size, max_batch_size=batch_size, max_length=self.max_length,
            vocab_size=vocab_size, eos=self._eos, device=self.device, graphs=compile,
        )  # fmt: skip
        scheduler = Scheduler(pool, max_batch_size=batch_size, max_step_tokens=step_tokens)
        self._runner, self._engine = runner, Engine(scheduler, runner, self._watch)

    @property
    def stats(self) -> GenerationStats:
        """Tokens and seconds of the last `generate` or `complete`."""
        return self._engine.stats

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
        gives each prompt its own. With `params.n` > 1 the n completions of a prompt follow each other in the result.
        Call it on every rank with the same arguments; the result is the same on each. The callbacks may differ:
        `on_text(i, text)` gets the text as it comes (prompts interleave; with `n` > 1 that of the first completion),
        `on_completion(i, completion)` the results as they are done, in any order.

        Raises `GenerationError` before anything runs if a prompt or a parameter cannot be used, and later if logits are
        not finite; `GroupError` if the ranks were given different ones, or one of them is gone or fails.
        """
        with in_call(self._watch, "start of a generation"), self._seeds_kept_on_error():
            requests = self._requests(prompts, params)
            _require_same(self._group, requests)
        self._begin()
        done: dict[tuple[int, int], Completion] = {}
        for request in requests:
            self._add(request, on_text)
        for sequence in self._run():
            request = sequence.request
            if sequence.error is not None:
                self._engine.abandon()
                raise GenerationError(f"Prompt {request.index}: {sequence.error}")
            done[request.index, request.sample] = completion = sequence.completion()
            if on_completion is not None:
                on_completion(request.index, completion)
        return [done[request.index, request.sample] for request in requests]

    def complete(self, jobs: Iterable[Job]) -> Iterator[tuple[Any, list[Completion] | GenerationError]]:
        """Complete any number of jobs, read as there is room for them.

        Yields (key, the `params.n` completions of the job's prompt) as they are done, in any order; for a job that
        cannot be used, or whose logits are not finite, (key, its error). Call it on every rank with the same jobs, and
        take what it yields to the end. A job without a seed gets a new one.

        Raises `GroupError` if the ranks are given different jobs, or one of them is gone or fails.
        """
        self._begin()
        waiting, batch_size = iter(jobs), self._engine.scheduler.max_batch_size
        open_jobs: dict[int, tuple[Any, list[Completion | None]]] = {}
        exhausted = False
        while True:
            if not exhausted and len(self._engine.scheduler.waiting) < batch_size:
                with in_call(self._watch, "reading of jobs"):
                    taken = list(islice(waiting, batch_size))
                    exhausted = len(taken) < batch_size
                    requests, refused = self._requests_of(taken)
                    _require_same(self._group, [request for _, request in requests])
                yield from refused
                for key, request in requests:
                    open_jobs.setdefault(request.index, (key, [None] * request.params.n))
                    self._add(request, None)
            if self._engine.num_unfinished == 0:
                if exhausted:
                    return
                continue
            for sequence in self._step():
                index = sequence.request.index
                if index not in open_jobs:
                    continue  # another completion of the same prompt has failed
                key, completions = open_jobs[index]
                if sequence.error is not None:
                    del open_jobs[index]
                    yield key, GenerationError(sequence.error)
                    continue
                completions[sequence.request.sample] = sequence.completion()
                if None not in completions:
                    del open_jobs[index]
                    yield key, [completion for completion in completions if completion is not None]

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
        for param in each:
            self._guide(param)  # a schema that is refused is to be said before anything runs
        return [
            request
            for i, (token_ids, param, seed) in enumerate(zip(encoded, each, seeds, strict=True))
            for request in self._samples(i, token_ids, param, seed)
        ]

    def _samples(self, index: int, token_ids: list[int], params: SamplingParams, seed: int | None) -> list[Request]:
        """The requests of one prompt. Its second seed is not `seed` + 1, which is the next prompt's."""
        first = self._new_seed() if seed is None else seed
        seeds = [first, *(random.Random(f"{first}/{i}").getrandbits(62) for i in range(1, params.n))]
        return [Request(index, token_ids, params, each, i) for i, each in enumerate(seeds)]

    def _requests_of(self, jobs: Sequence[Job]) -> tuple[list[tuple[Any, Request]], list[tuple[Any, GenerationError]]]:
        """The requests of the jobs that can be used, and the errors of the others."""
        requests: list[tuple[Any, Request]] = []
        refused: list[tuple[Any, GenerationError]] = []
        for job in jobs:
            try:
                token_ids = self.encode(job.prompt)
                self._guide(job.params)
            except GenerationError as error:
                refused.append((job.key, error))
                continue
            self._num_prompts += 1
            requests += [(job.key, r) for r in self._samples(self._num_prompts, token_ids, job.params, job.params.seed)]
        return requests, refused

    def _guide(self, params: SamplingParams) -> Any:
        """What holds a completion to its JSON schema; None without one."""
        if params.json_schema is None:
            return None
        if self._guides is None:
            from graphfuse.generation.guided import GuideCompiler

            self._guides = GuideCompiler(self.tokenizer, self._encoder.vocab_size, self._eos)
        return self._guides.guide(params.json_schema)

    def _add(self, request: Request, on_text: OnText | None) -> None:
        guide = self._guide(request.params)
        shown = on_text if request.sample == 0 else None
        self._engine.add(Running(request, self._decode, self._eos, self.max_length, guide=guide, on_text=shown))

    def _begin(self) -> None:
        self._engine.begin()
        if not self._is_ready:
            with in_call(self._watch, "preparation"):
                self._make_ready()

    def _run(self) -> Iterator[Running]:
        while self._engine.num_unfinished:
            yield from self._step()

    def _step(self) -> list[Running]:
        try:
            finished = self._engine.step()
        except BaseException:
            self._engine.abandon()
            raise
        scheduler = self._engine.scheduler
        self.progress.num_running, self.progress.num_waiting = len(scheduler.running), len(scheduler.waiting)
        self.progress.cache_used = scheduler.pool.used
        return finished

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

    def _make_ready(self) -> None:
        """Trace the model, so that compiling does not count as prefill. Nothing but page 0 and state 0 is written."""
        start = time.perf_counter()
        self._runner.warm_up()
        self._engine.stats.start_up_seconds = time.perf_counter() - start
        self._is_ready = True


def _check_sizes(sizes: dict[str, int | None]) -> None:
    smallest = {"max_batch_size": 1, "max_length": 2, "cache_tokens": 1, "page_size": 1, "max_step_tokens": 1}
    for name, least in smallest.items():
        size = sizes[name]
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < least):
            raise ConfigError(f"{name}={size!r} is not a whole number of at least {least}. Give one.")
    page_size = sizes["page_size"] or 0
    if page_size & (page_size - 1):
        raise ConfigError(f"page_size={page_size} is not a power of two. Use 16, for instance.")


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
