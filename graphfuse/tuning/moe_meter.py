"""Times pairs of tiles on one GPU, as a layer's whole call on realistic tokens.

    prepare: capture the calls of all candidates, compiling nothing ─► their kernels ─► compilers       returns at once
    measure: wait for the kernels ─► check a call against the reference ─► record ─► rounds, all candidates in turn

A recording holds calls on uniform and on skewed routings, as many of either, so that its time is the mean of the two.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graphfuse.errors import BackendUnavailableError, brief
from graphfuse.tuning.measured import median
from graphfuse.tuning.moe_bench import MAX_ERROR, Expected, Inputs
from graphfuse.tuning.moe_compile import Compilers, Kernel, collect
from graphfuse.tuning.moe_inputs import ROUTINGS, make_routing, make_tokens, make_weights, num_sets
from graphfuse.tuning.moe_journal import OK, Trial
from graphfuse.tuning.moe_share import BrokenGpu
from graphfuse.tuning.moe_tiles import Tiles
from graphfuse.tuning.moe_timing import Recording, record, replay_rounds

if TYPE_CHECKING:
    from graphfuse.tuning.moe_shapes import Workload


class GpuMeter:
    """One GPU with the weights of a layer, and the processes that compile for it."""

    def __init__(self, workload: Workload, gpu: int, num_compilers: int) -> None:
        """Raises `BackendUnavailableError` if the kernels cannot run a layer of this form."""
        from graphfuse.ops import moe_triton  # here, since Triton is published for Linux only

        torch.cuda.set_device(gpu)
        self._device = torch.device("cuda", gpu)
        self._workload = workload
        self._layer = make_weights(workload.shape, device=self._device, form=workload.form)
        self._run = moe_triton.run
        sample = torch.empty(1, workload.shape.hidden_size, dtype=self._layer.dtype, device=self._device)
        layer = self._layer
        if reason := moe_triton.can_run(sample, layer.weights, layer.dtype, layer.activation):
            raise BackendUnavailableError(f"There is nothing to tune for {workload.title}: {reason}")
        self._compilers = Compilers(num_compilers)
        self._inputs: dict[int, list[Inputs]] = {}
        self._kernels: dict[tuple[int, Tiles], list[Kernel]] = {}
        self._checked: dict[tuple[int, Tiles], str] = {}
        self._expected: dict[int, Expected] = {}

    @torch.no_grad()
    def prepare(self, num_tokens: int, candidates: Sequence[Tiles]) -> None:
        """Begin to compile what these need."""
        new = [tiles for tiles in dict.fromkeys(candidates) if (num_tokens, tiles) not in self._kernels]
        if not new:
            return
        inputs = self._inputs_of(num_tokens)[0]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            with torch.cuda.graph(torch.cuda.CUDAGraph()):  # never replayed: nothing of it runs
                for tiles in new:
                    try:
                        found = collect(lambda tiles=tiles: self._call(tiles, inputs))  # type: ignore[misc]
                    except Exception:  # shows again, with its reason, when the candidate is run
                        found = []
                    self._kernels[num_tokens, tiles] = found
        for tiles in new:
            self._compilers.submit(self._kernels[num_tokens, tiles])

    @torch.no_grad()
    def measure(self, num_tokens: int, candidates: Sequence[Tiles], rounds: int) -> list[Trial]:
        """A trial of each candidate, in their order."""
        self.prepare(num_tokens, candidates)
        outcomes = self._compilers.wait(kernel for tiles in candidates for kernel in self._kernels[num_tokens, tiles])
        inputs = self._inputs_of(num_tokens)
        pool = torch.cuda.graph_pool_handle()
        recordings: dict[str, Recording] = {}
        status: dict[Tiles, str] = {}
        for number, tiles in enumerate(candidates):
            failures = [outcomes[kernel] for kernel in self._kernels[num_tokens, tiles] if outcomes[kernel]]
            status[tiles] = failures[0] if failures else self._check(num_tokens, tiles, inputs[0])
            if status[tiles] == OK:
                calls = [lambda tiles=tiles, i=i: self._call(tiles, i) for i in inputs]
                try:
                    recordings[str(number)] = record(calls, pool)
                except Exception as failure:  # more calls than one may not fit the GPU's memory
                    status[tiles] = _text(failure)
        times = {name: median(each) for name, each in replay_rounds(recordings, rounds=rounds).items()}
        return [
            Trial(num_tokens, tiles, rounds, times.get(str(number), math.inf), status[tiles])
            for number, tiles in enumerate(candidates)
        ]

    def close(self) -> None:
        self._compilers.close()

    def _call(self, tiles: Tiles, inputs: Inputs) -> Tensor:
        layer, (tokens, ids, shares) = self._layer, inputs
        return self._run(
            tokens, layer.weights, ids, shares, layer.activation, layer.activation_limit, layer.tokens_scale,
            layer.intermediate_scale, layer.dynamic, layer.dtype, tiles,
        )  # fmt: skip

    def _check(self, num_tokens: int, tiles: Tiles, inputs: Inputs) -> str:
        """`OK`, or what is wrong with the candidate."""
        key = num_tokens, tiles
        if key not in self._checked:
            if num_tokens not in self._expected:  # the reference takes longer than most candidates
                self._expected = {num_tokens: Expected.of(self._layer, inputs)}
            self._checked[key] = self._checked_now(tiles, inputs, self._expected[num_tokens])
        return self._checked[key]

    def _checked_now(self, tiles: Tiles, inputs: Inputs, expected: Expected) -> str:
        try:
            error = expected.error(self._call(tiles, inputs))
        except Exception as failure:
            try:
                torch.cuda.synchronize()
            except Exception as broken:
                raise BrokenGpu(tiles, _text(failure)) from broken
            return _text(failure)
        if not error <= MAX_ERROR[self._layer.weights.gate_up.dtype]:  # NaN too
            return f"its result is wrong by {error:.1e}"
        return OK

    def _inputs_of(self, num_tokens: int) -> list[Inputs]:
        """Inputs of one call after the other: uniform and skewed routings in turn."""
        if num_tokens not in self._inputs:
            while len(self._inputs) > 1:  # this number of tokens, and the next one, which is compiled for meanwhile
                self._inputs.pop(next(iter(self._inputs)))
            shape, sets = self._workload.shape, num_sets(num_tokens)
            tokens = make_tokens(num_tokens, shape, sets=sets, device=self._device)
            by_routing = [
                make_routing(num_tokens, shape, routing=routing, sets=sets, seed=seed, device=self._device)
                for seed, routing in enumerate(ROUTINGS)
            ]
            self._inputs[num_tokens] = [
                (x, ids, shares) for x, *routed in zip(tokens, *by_routing, strict=True) for ids, shares in routed
            ]
        return self._inputs[num_tokens]


def _text(failure: Exception) -> str:
    return f"{type(failure).__name__}: {brief(failure, 300)}"


def num_compilers(num_gpus: int) -> int:
    """Processes that compile for each of the GPUs of this host: one core is left to each GPU's tuner."""
    return max(1, (os.cpu_count() or 1) // num_gpus - 1)
