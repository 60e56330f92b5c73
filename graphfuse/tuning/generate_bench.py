"""Measure generation: engines over the same weights, fused and unfused, each load on each of them in turn.

    weights ─► an engine for each variant: its cold start ─► for each batch size: warm up, then rounds ─► offline load
            ─► each batch size once more under the profiler, which may slow down whatever comes after it

Every rank of the group runs this; they decide nothing by their own clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from graphfuse.agreement import is_shared
from graphfuse.comm.control import control_channel
from graphfuse.comm.table import SizeTable, find_table
from graphfuse.config import FuseConfig
from graphfuse.executors import resolve_executor
from graphfuse.generation.build import Built, Sizes, build_engine
from graphfuse.generation.memory import tokens_that_fit
from graphfuse.passes import default_rules
from graphfuse.passes.merge_reductions import NAME as MERGE
from graphfuse.probe import load_nvml, nccl_version, uuid_of, version_of
from graphfuse.tuning.generate_load import (
    BatchRun,
    first_token,
    random_prompts,
    run_batch,
    run_offline,
    warm_up,
)
from graphfuse.tuning.generate_meters import attention_names, energy_meter
from graphfuse.tuning.generate_plan import PAGE_SIZE, UNFUSED, OfflineLoad, Plan, Workload
from graphfuse.tuning.generate_result import ColdStart, Offline, Result, Row
from graphfuse.tuning.generate_roofline import Footprint, Roofline, reduction_us


def reduction_rules() -> frozenset[str]:
    """The rules that fuse or merge reductions; without them a model is the same but unfused."""
    return frozenset(rule.name for rule in default_rules() if rule.reduces or rule.name == MERGE)


def measure(
    model: Any,
    group: ProcessGroup | None,
    plan: Plan,
    config: FuseConfig,
    *,
    name: str,
    weights: str,
    load_s: float,
    say: Callable[[str], object] = lambda text: None,
    each: Callable[[Result], object] = lambda result: None,
) -> Result:
    """Run the plan. Collective.

    Args:
        model: one of graphfuse's own, on this rank's device.
        name, weights, load_s: what the model is called, where its weights are from, and seconds that they took.
        say: told what is going on.
        each: given the result so far after every part.

    Raises:
        ConfigError: there is no room, or the model has fewer positions than the plan needs.
        GenerationError: logits are not finite.
    """
    bench = _Bench(model, group, plan, config, name, weights, load_s, say)
    try:
        for _ in bench.run():
            each(bench.result)
    finally:
        bench.close()
    return bench.result


class _Bench:
    def __init__(
        self,
        model: Any,
        group: ProcessGroup | None,
        plan: Plan,
        config: FuseConfig,
        name: str,
        weights: str,
        load_s: float,
        say: Callable[[str], object],
    ) -> None:
        self._began = time.perf_counter() - load_s
        self._model, self._group, self._plan, self._config = model, group, plan, config
        self._load_s, self._say = load_s, say
        self._device = next(model.parameters()).device
        self._footprint = Footprint.of(model)
        self._vocab_size = int(model.config.vocab_size)
        self._engines: dict[str, Built] = {}
        on_gpu = self._device.type == "cuda"
        properties = torch.cuda.get_device_properties(self._device) if on_gpu else None
        self._joules = energy_meter(uuid_of(properties), load_nvml()) if on_gpu else None
        dtype = str(model.dtype).removeprefix("torch.")
        num_ranks = group.size() if is_shared(group) else 1
        gpu = properties.name if properties is not None else None
        self._table: SizeTable | None = find_table(gpu, num_ranks, dtype)
        self.result = Result(
            device_name=gpu or "CPU",
            ranks=num_ranks,
            model=name,
            dtype=dtype,
            executor=resolve_executor(config.executor, self._device),
            weights=weights,
            input_len=plan.input_len,
            output_len=plan.output_len,
            max_step_tokens=plan.max_step_tokens,
            bandwidth_tb_s=plan.bandwidth,
            attention=attention_names(model, self._device),
            versions={
                "torch": str(torch.__version__),
                **{package: version_of(package) for package in ("triton", "flashinfer-python")},
                "nccl": nccl_version() if on_gpu else None,
            },
        )

    def run(self) -> Iterator[None]:
        """Yields whenever the result has grown."""
        self._start_engines()
        yield
        for workload in self._plan.workloads:
            if self._is_over(f"batch {workload.batch}"):
                return
            self._batch(workload)
            yield
        if self._plan.offline is not None and not self._is_over("the offline load"):
            self._offline(self._plan.offline)
            yield
        if self._device.type == "cuda":
            for workload in self._plan.workloads:
                if self._is_over(f"the look at what the GPU does at batch {workload.batch}"):
                    return
                self._profile(workload)
                yield

    def close(self) -> None:
        """Also frees CUDA graphs: NCCL waits for those that hold its calls when a group is destroyed."""
        for built in self._engines.values():
            built.engine.close()
            if built.compiled is not None:
                built.compiled.close()

    # --- start -------------------------------------------------------------------------------------------------------

    def _start_engines(self) -> None:
        plan = self._plan
        start = time.perf_counter()
        num_engines = len(plan.variants)
        fit = tokens_that_fit(
            self._model,
            self._group,
            num_states=num_engines * (plan.max_batch_size + 1),
            max_step_tokens=min(plan.max_step_tokens, plan.max_batch_size * plan.max_length),
            max_length=plan.max_length,
            device=self._device,
        )
        cache_tokens = plan.cache_tokens(fit // num_engines)
        sizes = Sizes(plan.max_batch_size, plan.max_length, cache_tokens, PAGE_SIZE, plan.max_step_tokens)
        for variant in plan.variants:
            self._say(f"{variant}: engine with a cache of {cache_tokens} tokens")
            config = self._config
            if variant == UNFUSED:
                config = replace(config, disabled_rules=config.disabled_rules | reduction_rules())
            built = build_engine(self._model, self._group, config, sizes, eos=frozenset())
            built_at = time.perf_counter()
            self._engines[variant] = built
            built.engine.begin()
            prepared_at = time.perf_counter()
            length = min(plan.input_len, plan.max_step_tokens)
            (prompt,) = random_prompts(1, length, self._vocab_size, seed=0)
            to_first, next_step = first_token(built.engine, prompt, self._device)
            assert built.compiled is not None
            report = built.compiled.report
            self.result.all_reduces[variant] = report.totals
            self.result.cold_start[variant] = cold = ColdStart(
                load_s=self._load_s,
                build_s=built_at - start,
                **{f"{stage}_s": report.seconds.get(stage, 0.0) for stage in ("trace", "passes", "compile")},
                prepare_s=prepared_at - built_at,
                first_token_s=to_first,
                graph_capture_s=next_step if self._device.type == "cuda" else None,
            )
            self._say(f"{variant}: {report.headline()}; first token after {cold.total_s:.1f} s")
            start = time.perf_counter()

    # --- loads -------------------------------------------------------------------------------------------------------

    def _batch(self, workload: Workload) -> None:
        first_steps = {
            variant: warm_up(self._engines[variant].engine, workload, self._vocab_size, self._device)
            for variant in self._plan.variants
        }
        runs: dict[str, list[BatchRun]] = {variant: [] for variant in self._plan.variants}
        joules: dict[str, list[float | None]] = {variant: [] for variant in self._plan.variants}
        for number in self._rounds(f"batch {workload.batch}"):
            seed = 1000 * workload.batch + number + 10
            prompts = random_prompts(workload.batch, workload.input_len, self._vocab_size, seed)
            for variant in self._in_turn(number):
                engine = self._engines[variant].engine
                run = run_batch(engine, prompts, workload, device=self._device, joules=self._joules)
                runs[variant].append(run)
                joules[variant].append(self._sum(run.joules))
        for variant in self._plan.variants:
            floor = self._roofline(variant, workload.batch, runs[variant][0].context)
            row = Row.of(variant, workload, runs[variant], joules[variant], floor, first_steps[variant])
            self.result.rows.append(row)
            self._say(f"batch {row.batch}, {variant}: {row.tpot_ms:.3f} ms a step, {row.tokens_per_s:,.0f} tokens/s")

    def _offline(self, load: OfflineLoad) -> None:
        seconds: dict[str, list[float]] = {variant: [] for variant in self._plan.variants}
        for number in self._rounds("the offline load", warm_ups=1):
            prompts = random_prompts(load.prompts, load.input_len, self._vocab_size, seed=number + 10)
            for variant in self._in_turn(number):
                took = run_offline(self._engines[variant].engine, prompts, load.output_len, self._device)
                if number >= 0:
                    seconds[variant].append(took)
        for variant in self._plan.variants:
            if not seconds[variant]:
                continue
            found = Offline(variant, load.prompts, load.input_len, load.output_len, seconds[variant])
            self.result.offline.append(found)
            self._say(f"offline, {variant}: {found.total_tokens_per_s:,.0f} tokens/s in and out")

    def _profile(self, workload: Workload) -> None:
        """Adds what the GPU does to the rows of a batch size."""
        short = replace(workload, output_len=2)
        prompts = random_prompts(workload.batch, workload.input_len, self._vocab_size, seed=3)
        for variant in self._plan.variants:
            engine = self._engines[variant].engine
            busy = run_batch(engine, prompts, short, device=self._device, profile=True).busy
            rows = self.result.rows
            self.result.rows = [
                row.with_busy(busy) if (row.batch, row.variant) == (workload.batch, variant) else row for row in rows
            ]

    def _rounds(self, what: str, warm_ups: int = 0) -> Iterator[int]:
        """Numbers of rounds from 0, of those that only warm up negative. At least one is not."""
        for number in range(-warm_ups, self._plan.repeats):
            if number > 0 and self._is_over(f"round {number + 1} of {what}"):
                return
            yield number

    def _in_turn(self, number: int) -> tuple[str, ...]:
        """Who comes first changes, so that a clock that falls is not held against one of them."""
        return self._plan.variants if number % 2 == 0 else self._plan.variants[::-1]

    def _roofline(self, variant: str, batch: int, context: float) -> Roofline:
        totals = self.result.all_reduces[variant]
        hidden_size, itemsize = int(self._model.config.hidden_size), self._model.dtype.itemsize
        return Roofline(
            self._footprint.weight_bytes(batch),
            self._footprint.cache_bytes(batch, context),
            self._plan.bandwidth,
            totals["all_reduce"] - totals["merged"],
            reduction_us(self._table, hidden_size, batch, itemsize),
        )

    # --- what the ranks agree on -------------------------------------------------------------------------------------

    def _is_over(self, what: str) -> bool:
        limit = self._plan.time_limit
        if limit is None:
            return False
        over = self._exchange(time.perf_counter() - self._began > limit)[0]
        if over:
            self.result.notes.append(f"The time limit of {limit:g} s ended the measurement before {what}.")
            self._say(self.result.notes[-1])
        return over

    def _sum(self, value: float | None) -> float | None:
        values = self._exchange(value)
        return None if None in values else sum(values)

    def _exchange(self, value: Any) -> list[Any]:
        if not is_shared(self._group):
            return [value]
        return control_channel(self._group).exchange(value, subject="a measurement")
