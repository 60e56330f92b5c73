"""The calls of a model that are profiled: a prefill of a batch, then steps of one token for each sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup

from graphfuse.integrations.transformers_tp import is_transformers_model
from graphfuse.models.causal_lm import CausalLM
from graphfuse.profiling.labels import SAMPLER
from graphfuse.weights.load import load
from graphfuse.weights.random_weights import random_model

PREFILL, STEP = "prefill", "step"
PHASES = (PREFILL, STEP)


class Calls:
    """Calls of a model on random tokens, `[batch, input_len]` and then `[batch, 1]`, with greedy sampling. graphfuse's
    own models keep the context in a cache; transformers' are called without one: a step sees its own token only.

    Args:
        model: the compiled model; `original`: the model that it is of.
        room: how many steps there may be; the last one is repeated afterwards.
    """

    def __init__(
        self, model: nn.Module, original: nn.Module, batch: int, input_len: int, room: int, device: torch.device
    ) -> None:
        self._model, self._transformers = model, is_transformers_model(original)
        config: Any = original.config
        vocab = config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(vocab, (batch, input_len), generator=generator).to(device)
        self._token = self._ids[:, -1:].clone()
        if isinstance(original, CausalLM):
            self._end = input_len + room
            self._caches = original.new_kv_caches(batch, self._end)
            self._first = torch.arange(input_len, device=device).repeat(batch, 1)
            self._position = torch.full_like(self._token, input_len)
            self._last = torch.full((batch,), input_len - 1, device=device)
            self._only = torch.zeros_like(self._last)

    def run(self, phase: str) -> None:
        """One call of a phase."""
        if phase == PREFILL:
            self._sample(self._prefill())
        else:
            self._sample(self._step())

    def _prefill(self) -> Tensor:
        if self._transformers:
            return self._model(input_ids=self._ids, use_cache=False).logits[:, -1]
        self._position.fill_(self._first.shape[1])
        return self._model(self._ids, self._first, self._caches, self._last)

    def _step(self) -> Tensor:
        if self._transformers:
            return self._model(input_ids=self._token, use_cache=False).logits[:, -1]
        logits = self._model(self._token, self._position, self._caches, self._only)
        self._position.add_(1).clamp_(max=self._end - 1)
        return logits

    def _sample(self, logits: Tensor) -> None:
        """The next token of each row, where the next step looks for it."""
        with record_function(SAMPLER.text):
            self._token.copy_(logits.argmax(-1, keepdim=True))


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
