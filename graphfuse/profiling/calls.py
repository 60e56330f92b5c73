"""The calls of a model that are profiled: a prefill of a batch, then steps of one token for each sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup

from graphfuse.generation.inputs import Inputs
from graphfuse.generation.runner import Runner
from graphfuse.models.causal_lm import CausalLM
from graphfuse.profiling.labels import SAMPLER
from graphfuse.weights.load import load
from graphfuse.weights.random_weights import random_model

PREFILL, STEP = "prefill", "step"
PHASES = (PREFILL, STEP)
PAGE_SIZE = 16


class Calls:
    """Calls of a model on random tokens with greedy sampling: a prefill of `input_len` tokens for each of `batch`
    sequences, and steps of the one behind them.

    graphfuse's own models are called as its engine calls them: ragged, with paged caches. transformers' are called
    without a cache: a step sees its own token only.
    """

    def __init__(self, model: nn.Module, original: nn.Module, batch: int, input_len: int, device: torch.device) -> None:
        """`model` is what `original` was compiled to."""
        config: Any = original.config
        vocab = config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocab, (batch, input_len), generator=generator).to(device)
        self._model = model
        self._token = ids[:, -1].clone()
        self._arguments: dict[str, dict[str, Any]] = {
            PREFILL: {"input_ids": ids, "use_cache": False},
            STEP: {"input_ids": self._token[:, None], "use_cache": False},
        }
        if isinstance(original, CausalLM):
            num_pages = -(-(input_len + 1) // PAGE_SIZE)
            pages = 1 + torch.arange(batch * num_pages, device=device).view(batch, num_pages)
            caches: Any = original.new_paged_caches(1 + batch * num_pages, PAGE_SIZE, 1 + batch)
            runner = Runner(
                model,
                caches,
                page_size=PAGE_SIZE,
                max_batch_size=1,
                max_length=PAGE_SIZE,
                vocab_size=vocab,
                eos=frozenset(),
                device=device,
                graphs=False,
            )
            runner.warm_up()  # traces the model, with sizes that are all different
            self._arguments = {
                PREFILL: _ragged(ids.flatten(), pages, 0).arguments(caches),
                STEP: _ragged(self._token, pages, input_len).arguments(caches),
            }

    def run(self, phase: str) -> None:
        """One call of a phase. What it samples is the next step's input."""
        result = self._model(**self._arguments[phase])
        logits = result if isinstance(result, Tensor) else result.logits[:, -1]  # [B, V]
        with record_function(SAMPLER.text):
            self._token.copy_(logits.argmax(-1))


def _ragged(ids: Tensor, pages: Tensor, before: int) -> Inputs:
    """Arguments of a call of as many tokens for each sequence, of which the caches have `before`. ids: `[T]`."""
    batch = pages.shape[0]
    length = len(ids) // batch
    positions = torch.arange(before, before + length, device=ids.device).repeat(batch)
    rows = torch.arange(batch, device=ids.device)
    entries = pages[rows.repeat_interleave(length), positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    spans = torch.tensor([[length, before]] * batch)
    torch._dynamo.mark_static(spans, 1)
    return Inputs(ids, positions, (rows + 1) * length - 1, entries, pages, rows + 1, spans)


def model_for(
    path: str, group: ProcessGroup | None, dtype: torch.dtype | None, device: torch.device, *, random_weights: bool
) -> nn.Module:
    """A checkpoint's model. With `random_weights` only its config is read, and it is graphfuse's own definition.

    Raises `CheckpointError` or `UnsupportedModelError`."""
    if random_weights:
        return random_model(path, group, dtype, device)
    return load(path, group, dtype=dtype, device=device).requires_grad_(False)


def config_name(path: str) -> str:
    """What to call the model of a folder or hub id."""
    folder = Path(path)
    return folder.resolve().name if folder.is_dir() else path
