"""Measure the experts of MoE layers on one GPU: each shape at each number of tokens, each candidate beside the others.

    weights of a shape ─► config ─► begin to compile all kernels ─► for each number of tokens:
        wait for its kernels ─► inputs ─► check some rows against the reference ─► time the candidates in turn ─► a row

A candidate that fails, or is wrong, is absent with the reason; the rest goes on.
"""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from graphfuse.ops import moe_reference
from graphfuse.ops.moe import moe_experts
from graphfuse.tuning.measured import median, spread
from graphfuse.tuning.moe_alternatives import Forward, flashinfer, grouped_mm
from graphfuse.tuning.moe_compile import Compilers, Kernel, collect
from graphfuse.tuning.moe_files import find_table
from graphfuse.tuning.moe_floor import floor_us
from graphfuse.tuning.moe_inputs import Layer, experts_touched, make_routing, make_tokens, make_weights, num_sets
from graphfuse.tuning.moe_result import FLASHINFER, GROUPED, HEURISTIC, TUNED, BenchedShape, Row
from graphfuse.tuning.moe_shapes import Workload, workloads_of_model
from graphfuse.tuning.moe_table import MoeTable
from graphfuse.tuning.moe_timing import ROUNDS, Recording, check_gpu, new_pool, record, replay_rounds

CHECKED_ROWS = 16
# Rounding between the products differs; FP8 turns some of that into whole steps of its three mantissa bits.
MAX_ERROR = {torch.bfloat16: 2e-2, torch.float8_e4m3fn: 6e-2}

BENCHED = (
    ("qwen3-30b-a3b", 2, "bf16"),
    ("qwen3-next-80b-a3b", 2, "bf16"),
    ("mistral-small-4-119b", 2, "bf16"),
    ("mistral-small-4-119b", 2, "fp8"),
    ("glm-4.5-air", 2, "bf16"),
    ("deepseek-v3", 8, "fp8_block"),
    ("deepseek-v3", 2, "fp8_block"),
    ("gpt-oss-120b", 2, "bf16"),
)
"""(model, ranks, dtype) of what is measured unless other shapes are asked for."""

Inputs = tuple[Tensor, Tensor, Tensor]
"""Tokens `[T, H]`, ids `[T, K]`, weights `[T, K]`."""


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    shapes: tuple[tuple[str, Workload], ...]
    """By name."""

    tokens: tuple[int, ...]
    routing: str = "uniform"
    config_dir: str | os.PathLike[str] | None = None
    """Configs of the user, looked at before the shipped ones."""

    rounds: int = ROUNDS


def benched_shapes() -> dict[str, Workload]:
    """The shapes of `BENCHED`, by name."""
    return {f"{model}-tp{tp}-{dtype}": workloads_of_model(model, tp, [dtype])[0] for model, tp, dtype in BENCHED}


@dataclass
class Measured:
    """What a run found."""

    shapes: list[BenchedShape] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


@torch.no_grad()
def measure(
    plan: Plan,
    *,
    begin: Callable[[BenchedShape], object] = lambda shape: None,
    each: Callable[[Row], object] = lambda row: None,
) -> Measured:
    """Run the plan on the current GPU.

    Args:
        begin: called with every shape before its first number of tokens.
        each: called with every row when it is measured.

    Raises:
        BackendUnavailableError: there is no GPU.
        SchemaError: a config that serves a shape does not follow the schema.
    """
    check_gpu()
    measured = Measured()
    compilers = Compilers(os.cpu_count() or 1)
    try:
        for name, workload in plan.shapes:
            bench = Bench(name, workload, plan, compilers)
            begin(bench.shape)
            for tokens in plan.tokens:
                row = bench.row(tokens)
                measured.rows.append(row)
                each(row)
            measured.shapes.append(bench.shape)
            del bench
            gc.collect()
            torch.cuda.empty_cache()
    finally:
        compilers.close()
    return measured


def current_gpu() -> tuple[torch.device, str]:
    """The device that is measured, and its name."""
    device = torch.device("cuda", torch.cuda.current_device())
    return device, torch.cuda.get_device_name(device)


class Bench:
    """One shape with its weights and candidates."""

    def __init__(self, name: str, workload: Workload, plan: Plan, compilers: Compilers) -> None:
        self._workload, self._plan, self._compilers = workload, plan, compilers
        shape = workload.shape
        self._device, device_name = current_gpu()
        self._layer = make_weights(shape, device=self._device, form=workload.form)
        found = find_table(shape, device_name, folder=plan.config_dir)
        self._table, self._untuned = found.table, MoeTable(shape, limits=found.table.limits)
        self.shape = BenchedShape(
            name, shape.num_experts, shape.intermediate_size, shape.hidden_size, shape.top_k, workload.form,
            found.source, tuple(found.notes),
        )  # fmt: skip
        self._forwards: dict[str, Forward] = {}
        for candidate, made in {
            TUNED: ours(self._layer, self._table),
            HEURISTIC: ours(self._layer, self._untuned),
            GROUPED: grouped_mm(self._layer),
            FLASHINFER: flashinfer(self._layer, max(plan.tokens)),
        }.items():
            if isinstance(made, str):
                self._miss(candidate, made)
            else:
                self._forwards[candidate] = made
        self._kernels = {num_tokens: self._begin_to_compile(num_tokens) for num_tokens in plan.tokens}

    def row(self, num_tokens: int) -> Row:
        """Check and time the candidates at a number of tokens."""
        self._compilers.wait(self._kernels[num_tokens])
        inputs = self._inputs(num_tokens, num_sets(num_tokens))
        expected = Expected.of(self._layer, inputs[0])
        same = self._table.tiles(num_tokens) == self._untuned.tiles(num_tokens)
        pool = new_pool()
        recordings: dict[str, Recording] = {}
        errors: dict[str, float] = {}
        for name, forward in self._forwards.items():
            if same and name == TUNED:  # the same launches: timed once, as the heuristic
                continue
            prepared = self._prepare(forward, inputs, expected, pool)
            if isinstance(prepared, str):
                self._miss(name, f"At {num_tokens} tokens: {prepared}")
            else:
                recordings[name], errors[name] = prepared
        times = replay_rounds(recordings, rounds=self._plan.rounds)
        if same and HEURISTIC in times:
            times, errors = {TUNED: times[HEURISTIC], **times}, {TUNED: errors[HEURISTIC], **errors}
        touched = experts_touched([(ids, shares) for _, ids, shares in inputs])
        return Row(
            shape=self.shape.name,
            tokens=num_tokens,
            us={name: round(median(each), 2) for name, each in times.items()},
            spread={name: round(spread(each), 4) for name, each in times.items()},
            error={name: round(error, 5) for name, error in errors.items()},
            experts_touched=round(touched, 2),
            floor_us=round(floor_us(self._workload.shape, num_tokens, touched, self._workload.form), 2),
            tuned_by=self._table.source if self._table.tuned(num_tokens) else HEURISTIC,
        )

    def _miss(self, candidate: str, reason: str) -> None:
        absent = {candidate: reason, **self.shape.absent}
        self.shape = replace(self.shape, absent=absent)

    def _inputs(self, num_tokens: int, sets: int) -> list[Inputs]:
        shape = self._workload.shape
        tokens = make_tokens(num_tokens, shape, sets=sets, device=self._device)
        routing = make_routing(num_tokens, shape, routing=self._plan.routing, sets=sets, device=self._device)
        return [(x, ids, shares) for x, (ids, shares) in zip(tokens, routing, strict=True)]

    def _prepare(
        self, forward: Forward, inputs: Sequence[Inputs], expected: Expected, pool: object
    ) -> tuple[Recording, float] | str:
        """The candidate ready to be timed with its error, or why it cannot be."""
        try:
            error = expected.error(forward(*inputs[0]))
            if not error <= MAX_ERROR[self._layer.weights.gate_up.dtype]:  # NaN too
                return f"its result is wrong by {error:.1e}"
            return record([lambda i=i: forward(*i) for i in inputs], pool), error  # type: ignore[misc]
        except Exception as error:  # whatever it was, the others go on
            return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"

    def _begin_to_compile(self, num_tokens: int) -> list[Kernel]:
        """What fails here fails again, with its reason, when the candidate is run."""
        inputs = self._inputs(num_tokens, 1)[0]
        ours = [self._forwards[name] for name in (TUNED, HEURISTIC) if name in self._forwards]
        kernels = kernels_of([lambda forward=forward: forward(*inputs) for forward in ours])  # type: ignore[misc]
        self._compilers.submit(kernels)
        return kernels


def kernels_of(calls: Sequence[Callable[[], object]]) -> list[Kernel]:
    """The kernels that calls would have to compile. Nothing is launched: a capture is thrown away."""
    kernels: list[Kernel] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            for call in calls:
                with contextlib.suppress(Exception):
                    kernels += collect(call)
    return kernels


def ours(layer: Layer, table: MoeTable) -> Forward | str:
    """The layer by graphfuse's op, as a lowered model calls it, or why its Triton kernels cannot run."""
    from graphfuse.ops import moe_triton  # here, since Triton is published for Linux only

    weights, kernel = layer.weights, table.to_text()
    sample = torch.empty(1, table.shape.hidden_size, dtype=layer.dtype, device=weights.gate_up.device)
    reason = moe_triton.can_run(sample, weights, layer.dtype, layer.activation)
    if reason is not None:
        return reason

    def forward(tokens: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return moe_experts(
            tokens, weights.gate_up, weights.down, ids, shares, weights.num_experts, 0, weights.gate_up_bias,
            weights.down_bias, "interleaved" if weights.interleaved else "concatenated", weights.transposed,
            layer.activation, layer.activation_limit, weights.gate_up_scale, weights.down_scale, layer.tokens_scale,
            layer.intermediate_scale, weights.block_shape, None, layer.dynamic, kernel,
        )  # fmt: skip

    return forward


@dataclass(frozen=True)
class Expected:
    """Some rows of a result, from the first to the last, by the plain reference."""

    rows: Tensor
    values: Tensor

    @classmethod
    def of(cls, layer: Layer, inputs: Inputs) -> Expected:
        tokens, ids, shares = inputs
        count = min(tokens.shape[0], CHECKED_ROWS)
        rows = torch.linspace(0, tokens.shape[0] - 1, count, device=tokens.device).round().long()
        values = moe_reference.run(
            tokens[rows], layer.weights, ids[rows].long(), shares[rows], layer.activation, layer.activation_limit,
            layer.tokens_scale, layer.intermediate_scale, layer.dynamic, layer.dtype,
        )  # fmt: skip
        return cls(rows, values.float())

    def error(self, out: Tensor) -> float:
        """The distance of a result, as a share of the norm."""
        return ((out[self.rows].float() - self.values).norm() / self.values.norm()).item()
