"""From what a caller gives to requests: prompts encoded, parameters checked, seeds drawn; the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from graphfuse.agreement import is_shared, require
from graphfuse.comm.control import control_channel
from graphfuse.errors import GenerationError
from graphfuse.generation.job import Job, Request
from graphfuse.generation.sampling import SamplingParams
from graphfuse.generation.tokenize import Prompt, PromptEncoder


class Requests:
    """Makes the requests of one LLM."""

    def __init__(
        self, encoder: PromptEncoder, eos: frozenset[int], group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._encoder, self._eos, self._group = encoder, eos, group
        self._seeds = _agreed_seeds(group, device)
        self._guides: Any = None
        self._num_jobs = 0

    def of_prompts(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        """Raises `GenerationError` if one of them cannot be used, `GroupError` if the ranks were given others."""
        with self._seeds_kept_on_error():
            requests = self._of_prompts(prompts, params)
            _require_same(self._group, requests)
            return requests

    def of_jobs(self, jobs: Sequence[Job]) -> tuple[list[tuple[Any, Request]], list[tuple[Any, GenerationError]]]:
        """The requests of the jobs that can be used, and the errors of the others, each with the job's key. Raises
        `GroupError` if the ranks were given others."""
        requests: list[tuple[Any, Request]] = []
        refused: list[tuple[Any, GenerationError]] = []
        for job in jobs:
            if not isinstance(job, Job):
                raise GenerationError(f"A job is of type {type(job).__name__}. Give graphfuse.Job(key, prompt, ...).")
            try:
                _check_params(job.params)
                token_ids = self._encoder.encode(job.prompt)
                self.guide(job.params)
            except GenerationError as error:
                refused.append((job.key, error))
                continue
            self._num_jobs += 1
            samples = self._samples(self._num_jobs, token_ids, job.params, job.params.seed)
            requests += [(job.key, request) for request in samples]
        _require_same(self._group, [request for _, request in requests])
        return requests, refused

    def guide(self, params: SamplingParams) -> Any:
        """What holds a completion to its JSON schema; None without one. Raises `GenerationError` for one it cannot."""
        if params.json_schema is None:
            return None
        if self._guides is None:
            from graphfuse.generation.guided import GuideCompiler

            self._guides = GuideCompiler(self._encoder.tokenizer, self._encoder.vocab_size, self._eos)
        return self._guides.guide(params.json_schema)

    def _of_prompts(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise GenerationError(f"prompts is of type {type(prompts).__name__}. Give a list, if only of one prompt.")
        if prompts and isinstance(prompts[0], dict | int):
            raise GenerationError("prompts looks like a single prompt. Put it into a list: generate([prompt], …).")
        encoded = [self._encoder.encode(prompt, f"Prompt {i}") for i, prompt in enumerate(prompts)]
        if params is None or isinstance(params, SamplingParams):
            shared = params or SamplingParams()
            seeds = [None if shared.seed is None else (shared.seed + i) % 2**63 for i in range(len(encoded))]
            each: list[SamplingParams] = [shared] * len(encoded)
        else:
            if isinstance(params, str | Mapping) or not isinstance(params, Sequence):
                _check_params(params)
            each = list(params)
            for param in each:
                _check_params(param)
            seeds = [param.seed for param in each]
        if len(each) != len(encoded):
            raise GenerationError(
                f"There are {len(encoded)} prompts but {len(each)} SamplingParams. Give one for all, or one for each."
            )
        for param in {id(param): param for param in each}.values():
            self.guide(param)  # a schema that is refused is to be said before anything runs
        return [
            request
            for i, (token_ids, param, seed) in enumerate(zip(encoded, each, seeds, strict=True))
            for request in self._samples(i, token_ids, param, seed)
        ]

    def _samples(self, index: int, token_ids: list[int], params: SamplingParams, seed: int | None) -> list[Request]:
        """The requests of one prompt. Its second seed is not `seed` + 1, which is the next prompt's."""
        first = int(torch.randint(2**62, (), generator=self._seeds)) if seed is None else seed
        seeds = [first, *(random.Random(f"{first}/{i}").getrandbits(62) for i in range(1, params.n))]
        return [Request(index, token_ids, params, each, i) for i, each in enumerate(seeds)]

    @contextmanager
    def _seeds_kept_on_error(self) -> Iterator[None]:
        """Ranks that were refused may have drawn different numbers of seeds, and go on in step."""
        state = self._seeds.get_state()
        try:
            yield
        except BaseException:
            self._seeds.set_state(state)
            raise


def _check_params(params: Any) -> None:
    if not isinstance(params, SamplingParams):
        raise GenerationError(f"Parameters are of type {type(params).__name__}. Give graphfuse.SamplingParams(...).")


def _require_same(group: dist.ProcessGroup | None, requests: Sequence[Request]) -> None:
    """Compare what the ranks were given to generate: other prompts are other token counts, in a call that only one of
    them waits in. A message of 64 characters."""
    if is_shared(group):
        fields = {
            "the number of prompts": len(requests),
            "the number of tokens of each": [len(request.prompt_token_ids) for request in requests],
            "the token ids": [request.prompt_token_ids for request in requests],
            "the sampling parameters": [str(request.params) for request in requests],
            "the seeds": [request.seed for request in requests],
        }
        require(control_channel(group), "what they were given to generate", fields)


def _agreed_seeds(group: dist.ProcessGroup | None, device: torch.device) -> torch.Generator:
    """A source of seeds that starts at a random place, the same on each rank: agreed on once, here."""
    # The global generator is left alone: `torch.manual_seed` of the user's program must not fix, nor see, our seeds.
    fresh = torch.Generator()
    fresh.seed()
    seed = torch.randint(2**62, (), generator=fresh).to(device)
    if group is not None and dist.get_world_size(group) > 1:
        dist.broadcast(seed, group=group, group_src=0)
    return torch.Generator().manual_seed(int(seed))
