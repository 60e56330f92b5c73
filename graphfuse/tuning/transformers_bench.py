"""Measure how a model of transformers generates: eager, compiled by transformers, and compiled by graphfuse.

    for each batch size: warm each variant up ─► rounds, in which the variants take turns ─► rows and ratios

All run one set of weights, with the same prompts and greedy choice; what each compiles and remembers it keeps in a
shell of its own around the model's modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import graphfuse
from graphfuse.tuning.generate_result import ratio
from graphfuse.tuning.measured import spread

EAGER, COMPILED, GRAPHFUSE = VARIANTS = ("eager", "compiled", "graphfuse")
BOUND = 1.15
"""How many times as fast as `compiled` graphfuse's decoding is to be at batch 1; at every batch at least as fast."""


@dataclass(frozen=True)
class Plan:
    """What is measured of each model."""

    batches: Sequence[int]
    prompt: int
    """Tokens of each prompt."""

    new: int
    """Tokens that each prompt gets."""

    rounds: int
    variants: Sequence[str] = VARIANTS
    time_limit: float | None = None
    """Seconds from the start of the ranks, after which nothing more is begun."""


@dataclass
class Measured:
    """A batch size of a variant: what each round took."""

    warm_up_s: float
    seconds: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)

    def row(self, model: str, batch: int, variant: str, num_new: int, same_tokens: float | None) -> dict[str, Any]:
        return {
            "model": model,
            "batch": batch,
            "variant": variant,
            "tokens_per_s": batch * num_new / median(self.seconds),
            "decode_tokens_per_s": 1e3 * batch / median(self.step_ms),
            "step_ms": median(self.step_ms),
            "step_ms_spread": spread(self.step_ms),
            "step_ms_rounds": self.step_ms,
            "first_token_ms": median(self.first_ms),
            "seconds_rounds": self.seconds,
            "warm_up_s": self.warm_up_s,
            "same_tokens_as_eager": same_tokens,
        }


class Clock:
    """A logits processor that changes nothing and notes when each token's logits were there, on the GPU's own time."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if self._on_gpu:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.mark()
        return scores

    def ms(self) -> list[float]:
        """Milliseconds to the first token, then of each step. The GPU is idle."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [a.elapsed_time(b) if self._on_gpu else 1e3 * (b - a) for a, b in pairs]


def shell_of(model: Any) -> Any:
    """Another object on the same modules and weights: what transformers compiles, and remembers, it keeps to itself."""
    shell: Any = object.__new__(type(model))
    shell.__dict__.update(model.__dict__)
    return shell


class Bench:
    """Measures one model; `rows`, `ratios` and the rest grow meanwhile. Collective."""

    def __init__(
        self,
        name: str,
        model: Any,
        group: dist.ProcessGroup | None,
        plan: Plan,
        began: float,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._name, self._model, self._group, self._plan = name, model, group, plan
        self._began, self._say = began, say
        self._device = model.device
        self.rows: list[dict[str, Any]] = []
        self.ratios: dict[str, dict[str, dict[str, float]]] = {}
        self.reports: dict[str, Any] = {}
        self.notes: list[str] = []

    def run(self, each: Callable[[], object] = lambda: None) -> None:
        """`each` is called whenever there is more."""
        for batch in self._plan.batches:
            if self._is_over(f"batch {batch}"):
                return
            self._batch(batch)
            each()

    def _batch(self, batch: int) -> None:
        torch._dynamo.reset()  # sizes of another batch would make this one's dynamic, for both that compile
        generator = torch.Generator().manual_seed(batch)
        ids = torch.randint(1, self._model.config.vocab_size, (batch, self._plan.prompt), generator=generator)
        ids = ids.to(self._device)
        shells = {variant: shell_of(self._model) for variant in self._plan.variants}
        calls: dict[str, Callable] = {name: shell.generate for name, shell in shells.items()}
        compiled = graphfuse.compile(shells[GRAPHFUSE], self._group) if GRAPHFUSE in shells else None
        if compiled is not None:
            calls[GRAPHFUSE] = compiled.generate
        try:
            found, tokens = self._warm_up(batch, calls, ids)
            for number in range(self._plan.rounds):
                if self._is_over(f"round {number} of batch {batch}"):
                    break
                turn = number % len(found)
                for variant in [*found, *found][turn : turn + len(found)]:
                    seconds, ms, _ = self._generate(variant, calls[variant], ids)
                    found[variant].seconds.append(seconds)
                    found[variant].step_ms.append(median(ms[1:]))
                    found[variant].first_ms.append(ms[0])
            if compiled is not None:
                report = compiled.report.to_json()
                self.reports[f"{self._name}, batch {batch}"] = {k: report[k] for k in ("totals", "graphs", "notes")}
        finally:
            if compiled is not None:
                compiled.close()
        self._keep(batch, found, tokens)

    def _warm_up(
        self, batch: int, calls: dict[str, Callable], ids: Tensor
    ) -> tuple[dict[str, Measured], dict[str, Tensor]]:
        """Each variant twice: CUDA graphs are captured in the second call of a compiled step, or later."""
        found, tokens = {}, {}
        for variant, call in calls.items():
            if self._is_over(f"{variant} at batch {batch}"):
                break
            seconds, *_, tokens[variant] = self._generate(variant, call, ids)
            found[variant] = Measured(seconds)
            self._generate(variant, call, ids)
            self._say(f"{self._name}, batch {batch}: {variant} warmed up, its first call in {seconds:.1f} s")
        return found, tokens

    def _generate(self, variant: str, call: Callable, ids: Tensor) -> tuple[float, list[float], Tensor]:
        """Seconds of a whole call, the clock's milliseconds, and the new tokens."""
        settings: dict[str, Any] = {"cache_implementation": "static"} if variant == COMPILED else {}
        if variant == COMPILED and self._device.type == "cpu":
            from transformers import CompileConfig

            config: Any = CompileConfig()
            settings["compile_config"] = config
            config._compile_all_devices = True  # transformers compiles on GPUs only, unless told
        num_new = self._plan.new
        self._settle()
        began, clock = time.perf_counter(), Clock(self._device)
        found = call(
            ids, do_sample=False, max_new_tokens=num_new, min_new_tokens=num_new, logits_processor=[clock], **settings
        )
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - began, clock.ms(), found[:, ids.shape[1] :]

    def _keep(self, batch: int, found: dict[str, Measured], tokens: dict[str, Tensor]) -> None:
        found = {variant: measured for variant, measured in found.items() if measured.seconds}
        for variant, measured in found.items():
            same = (tokens[variant] == tokens[EAGER]).float().mean().item() if EAGER in tokens else None
            self.rows.append(measured.row(self._name, batch, variant, self._plan.new, same))
        ours = found.get(GRAPHFUSE)
        for other in (COMPILED, EAGER):
            if ours is None or other not in found:
                continue
            self.ratios[f"{self._name}, batch {batch}, over {other}"] = {
                "decode": ratio(found[other].step_ms, ours.step_ms),
                "whole": ratio(found[other].seconds, ours.seconds),
            }

    def lines(self) -> list[str]:
        """The result as text."""
        rows = [
            f"{row['model']}, batch {row['batch']:2}, {row['variant']:9}: {row['decode_tokens_per_s']:9.1f} tokens/s "
            f"decoding, {row['tokens_per_s']:9.1f} in all; step {row['step_ms']:.3f} ms ± "
            f"{100 * row['step_ms_spread']:.1f} %, first token {row['first_token_ms']:.1f} ms"
            for row in self.rows
        ]
        for name, found in self.ratios.items():
            bound = BOUND if "batch 1, over compiled" in name else 1.0
            kept = "" if EAGER in name else f": {'holds' if found['decode']['median'] >= bound else 'fails'} {bound}x"
            rows.append(
                f"{name}: {found['decode']['median']:.3f}x decoding, {found['whole']['median']:.3f}x in all{kept}"
            )
        return [*rows, *self.notes]

    def release(self) -> None:
        """Let go of the model."""
        torch._dynamo.reset()
        del self._model

    def _is_over(self, what: str) -> bool:
        limit = self._plan.time_limit
        if limit is None:
            return False
        over = torch.tensor(float(time.perf_counter() - self._began > limit), device=self._device)
        if self._group is not None:
            dist.all_reduce(over, dist.ReduceOp.MAX, group=self._group)
        if over.item():
            self.notes.append(f"The time limit of {limit:g} s ended the measurement of {self._name} before {what}.")
            self._say(self.notes[-1])
        return bool(over.item())

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._group is not None:
            dist.barrier(self._group)
