"""`LLM`: a checkpoint as a text generator.

The same program runs on each rank of a tensor-parallel group and gets the same completions there: every rank schedules
the same steps, computes the same logits and samples from them with the same random numbers, so nothing is sent around
after a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graphfuse.agreement import require_alike
from graphfuse.comm.watching import in_call, watch
from graphfuse.compiler import checked_config, resolve_group
from graphfuse.config import FuseConfig
from graphfuse.errors import GenerationError
from graphfuse.generation.build import Sizes, build_engine
from graphfuse.generation.completion import Completion, GenerationStats
from graphfuse.generation.job import Job, Request
from graphfuse.generation.requests import Requests
from graphfuse.generation.sampling import SamplingParams
from graphfuse.generation.sequence import OnText
from graphfuse.generation.sequence import Sequence as Running
from graphfuse.generation.tokenize import Prompt, PromptEncoder, eos_token_ids, load_tokenizer
from graphfuse.report import Report
from graphfuse.weights.load import load, local_folder

OnCompletion = Callable[[int, Completion], None]
"""Called with the index of a prompt and its completion."""


@dataclass(frozen=True)
class Progress:
    """What is going on inside `LLM.generate` and `LLM.complete`."""

    num_running: int
    num_waiting: int
    cache_used: float
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
        max_step_tokens: int | None = None,
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
            page_size: tokens of a page of the cache, a power of two, on a GPU from 8. Prompts share whole pages only.
            max_step_tokens: how many tokens a step computes at most, but at least one of each completion. Longer
                prompts are computed in chunks, among the tokens of the completions that run already. None: 16384 on a
                GPU, 2048 on the CPU.
            compile: False runs the model as it is written.

        Raises `CheckpointError`, `UnsupportedModelError`, `GroupError` or `ConfigError`.
        """
        sizes = Sizes(max_batch_size, max_length, cache_tokens, page_size, max_step_tokens)
        config = checked_config(config)
        group = resolve_group(tp_group)
        self._watch = watch(group) if config.watch else None
        with in_call(self._watch, "start of the LLM"):
            self._start(path, group, dtype, device, config, sizes, compile)

    def _start(
        self,
        path: str | Path,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        config: FuseConfig,
        sizes: Sizes,
        compile: bool,
    ) -> None:
        folder = local_folder(path)
        self.tokenizer = load_tokenizer(folder)
        # Only our own definitions take paged caches as arguments.
        model: Any = load(folder, group, dtype=dtype, device=device, implementation="graphfuse")
        self.device = next(model.parameters()).device
        self._eos = eos_token_ids(folder, model.config, self.tokenizer)
        require_alike(group, config, model, {}, **vars(sizes), compile=compile, device=self.device.type)
        built = build_engine(model, group, config, sizes, eos=self._eos, compile=compile)
        self.model, self._compiled, self._engine = built.model, built.compiled, built.engine
        self.cache_tokens, self.max_length = built.cache_tokens, built.max_length
        vocab_size = model.config.get_text_config().vocab_size
        self._encoder = PromptEncoder(self.tokenizer, vocab_size=vocab_size, max_length=self.max_length)
        self._requests = Requests(self._encoder, self._eos, group, self.device)

    @property
    def stats(self) -> GenerationStats:
        """Tokens and seconds of the last `generate` or `complete`."""
        return self._engine.stats

    @property
    def progress(self) -> Progress:
        """What is going on now."""
        scheduler = self._engine.scheduler
        return Progress(len(scheduler.running), len(scheduler.waiting), scheduler.pool.used)

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
        with in_call(self._watch, "start of a generation"):
            requests = self._requests.of_prompts(prompts, params)
        done: dict[tuple[int, int], Completion] = {}
        with self._engine.running():
            for request in requests:
                self._add(request, on_text)
            for sequence in self._run():
                request = sequence.request
                if sequence.error is not None:
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
        with self._engine.running():
            yield from self._complete(iter(jobs))

    def _complete(self, jobs: Iterator[Job]) -> Iterator[tuple[Any, list[Completion] | GenerationError]]:
        batch_size = self._engine.scheduler.max_batch_size
        open_jobs: dict[int, tuple[Any, list[Completion | None]]] = {}
        exhausted = False
        while True:
            if not exhausted and len(self._engine.scheduler.waiting) < batch_size:
                with in_call(self._watch, "reading of jobs"):
                    taken = list(islice(jobs, batch_size))
                    exhausted = len(taken) < batch_size
                    requests, refused = self._requests.of_jobs(taken)
                yield from refused
                for key, request in requests:
                    open_jobs.setdefault(request.index, (key, [None] * request.params.n))
                    self._add(request, None)
            if self._engine.num_unfinished == 0:
                if exhausted:
                    return
                continue
            for sequence in self._engine.step():
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
        """Free the caches, and give the workspaces of the fused all-reduces back. Nothing is generated afterwards."""
        self._engine.close()
        if self._compiled is not None:
            self._compiled.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _add(self, request: Request, on_text: OnText | None) -> None:
        guide = self._requests.guide(request.params)
        shown = on_text if request.sample == 0 else None
        self._engine.add(Running(request, self._decode, self._eos, self.max_length, guide=guide, on_text=shown))

    def _run(self) -> Iterator[Running]:
        while self._engine.num_unfinished:
            yield from self._engine.step()

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
