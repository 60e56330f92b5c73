"""One step on the device: the parts of a step become inputs, the model runs, and the next tokens are sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphfuse.generation.completion import TokenLogprob
from graphfuse.generation.decode_graphs import DecodeGraphs
from graphfuse.generation.inputs import HostInputs, Inputs, spans_of, to_device
from graphfuse.generation.sampler import Sampled, Sampler, Uniforms
from graphfuse.generation.scheduler import Part
from graphfuse.generation.sequence import Sequence as Running


class Launched:
    """A step that is under way."""

    def __init__(self, parts: Sequence[Part], sampled: Sampled) -> None:
        self.parts = parts
        self.rows = {id(part.sequence): row for row, part in enumerate(parts) if part.samples}
        self.tokens = sampled.tokens
        found = (sampled.tokens, sampled.logprob, sampled.top_ids, sampled.top_logprobs)
        self._sampled = Sampled(*map(_to_host, found))
        self._done = None
        if sampled.tokens.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def read(self) -> Iterator[tuple[Running, int, TokenLogprob | None]]:
        """Each sequence that sampled, its token and how likely that was, if asked. Waits for the device."""
        if self._done is not None:
            self._done.synchronize()
        sampled = self._sampled
        tokens = sampled.tokens.tolist()
        logprob = [] if sampled.logprob is None else sampled.logprob.tolist()
        top_ids = [] if sampled.top_ids is None else sampled.top_ids.tolist()
        top_logprobs = [] if sampled.top_logprobs is None else sampled.top_logprobs.tolist()
        for row, part in enumerate(self.parts):
            if not part.samples:
                continue
            likely, asked = None, part.sequence.request.params.logprobs
            if asked is not None:
                top = list(zip(top_ids[row][:asked], top_logprobs[row][:asked], strict=True)) if asked else []
                likely = TokenLogprob(tokens[row], logprob[row], top)
            yield part.sequence, tokens[row], likely


class Runner:
    """The model with its paged caches, and the state of the sampler."""

    def __init__(
        self,
        model: Any,
        caches: list[tuple[Tensor, Tensor]],
        *,
        page_size: int,
        max_batch_size: int,
        max_length: int,
        vocab_size: int,
        eos: frozenset[int],
        device: torch.device,
        graphs: bool,
    ) -> None:
        """`graphs`: on a GPU, steps in which every sequence has one token are captured in CUDA graphs."""
        self._model, self._caches, self._device = model, caches, device
        self._page_size, self._vocab_size, self._eos = page_size, vocab_size, eos
        self._sampler = Sampler(max_batch_size + 1, vocab_size, device)
        # Each slot's pages, and whose they are: pages are only ever added to a sequence, or all given back.
        self._pages = np.zeros((max_batch_size + 1, -(-max_length // page_size)), dtype=np.int64)
        self._owners: list[list[int] | None] = [None] * (max_batch_size + 1)
        self._num_pages = [0] * (max_batch_size + 1)
        on_gpu = device.type == "cuda"
        self._graphs = DecodeGraphs(self._forward, max_batch_size, device) if graphs and on_gpu else None

    def launch(self, parts: Sequence[Part], previous: Launched | None) -> Launched:
        """Start a step. `previous` is the one under way, if there is one: what it samples may be this one's input."""
        with current_device(self._device):
            for part in parts:
                self._note_pages(part.sequence)
            inputs, sampled = self._inputs(parts, previous), None if previous is None else previous.tokens
            if len(inputs.input_ids) == len(parts) and self._graphs is not None:
                logits = self._graphs(inputs, sampled)
            else:
                logits = self._forward(inputs.on(self._device, sampled))
            return Launched(parts, self._sample(parts, logits))

    def warm_up(self) -> None:
        """Trace the model by a step of padding: two sequences, five tokens, so that these are not taken for one."""
        tokens = torch.zeros(5, dtype=torch.int64, device=self._device)
        spans = spans_of([[1, 0], [4, 0]])
        last = torch.tensor([0, 4], device=self._device)
        pages = torch.zeros(2, max(2, -(-4 // self._page_size)), dtype=torch.int64, device=self._device)
        at = torch.tensor([0, 0, 1, 2, 3], device=self._device) % self._page_size
        with current_device(self._device):
            self._forward(Inputs(tokens, at, last, tokens.clone(), pages, tokens[:2].clone(), spans))

    def close(self) -> None:
        """Free the caches, and the CUDA graphs that write to them."""
        self._caches, self._graphs = [], None

    @torch.no_grad()  # not inference_mode: Dynamo cannot trace with inference tensors as inputs
    def _forward(self, inputs: Inputs) -> Tensor:
        return self._model(**inputs.arguments(self._caches))

    def _note_pages(self, sequence: Running) -> None:
        slot, pages = sequence.slot, sequence.pages
        if self._owners[slot] is not pages:
            self._owners[slot], self._num_pages[slot] = pages, 0
            self._sampler.begin(slot, sequence.request.params, sequence.token_ids, self._eos)
            if not sequence.request.params.greedy:
                sequence.uniforms = Uniforms(sequence.request.seed, sequence.num_generated)
        have = self._num_pages[slot]
        if have < len(pages):
            self._pages[slot, have : len(pages)] = pages[have:]
            self._num_pages[slot] = len(pages)

    def _inputs(self, parts: Sequence[Part], previous: Launched | None) -> HostInputs:
        slots = np.array([part.sequence.slot for part in parts], dtype=np.int64)
        spans = np.array([(part.length, part.before) for part in parts], dtype=np.int64)
        ids: list[int] = []
        targets, sources = [], []  # tokens that are under way: where they go, and which row samples them
        for part in parts:
            end = part.before + part.length
            known = part.sequence.token_ids[part.before : end]
            ids += known
            if len(known) < part.length:
                assert previous is not None, "a token is under way"
                targets.append(len(ids))
                sources.append(previous.rows[id(part.sequence)])
                ids.append(0)
        lengths, before = spans[:, 0], spans[:, 1]
        rows, ends = np.repeat(np.arange(len(parts)), lengths), np.cumsum(lengths)
        positions = np.arange(len(ids)) + np.repeat(before - (ends - lengths), lengths)
        pages = self._pages[slots, : max(self._num_pages[slot] for slot in slots)]
        entries = pages[rows, positions // self._page_size] * self._page_size + positions % self._page_size
        token_ids, to, of = (np.array(each, dtype=np.int64) for each in (ids, targets, sources))
        return HostInputs(token_ids, positions, ends - 1, entries, pages, slots, spans, to, of)

    def _sample(self, parts: Sequence[Part], logits: Tensor) -> Sampled:
        """Parts that do not end a sequence get a token too, which nobody reads."""
        slots = [part.sequence.slot if part.samples else 0 for part in parts]
        steps = [part.sequence.length - 1 - part.sequence.num_prompt if part.samples else 0 for part in parts]
        drawn = [
            part.sequence.uniforms.next() if part.samples and part.sequence.uniforms is not None else 0.0
            for part in parts
        ]
        uniforms = None
        if any(part.samples and not part.sequence.request.params.greedy for part in parts):
            uniforms = to_device(torch.tensor(drawn, dtype=torch.float64), self._device)
        return self._sampler(logits, slots, steps, uniforms, self._bitmask(parts))

    def _bitmask(self, parts: Sequence[Part]) -> Tensor | None:
        """Which tokens may follow, a bit each, if a grammar guides some of the sequences."""
        guided = [(row, part.sequence) for row, part in enumerate(parts) if part.samples and part.sequence.guide]
        if not guided:
            return None
        mask = torch.full((len(parts), -(-self._vocab_size // 32)), -1, dtype=torch.int32)
        for row, sequence in guided:
            sequence.guide.fill(mask[row])
        return to_device(mask, self._device)


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """While open, a GPU is the current one: kernels and events go to that, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _to_host(tensor: Any) -> Any:
    """A copy that the host may read once the device has come so far; of None, None."""
    if tensor is None or not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
