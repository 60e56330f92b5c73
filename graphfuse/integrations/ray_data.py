"""Text generation in Ray Data (extra `ray`): an actor class for `map_batches`, a tensor-parallel group in each actor.

    ds = ray.data.read_json("prompts.jsonl")
    ds = ds.map_batches(
        TextGenerator,
        fn_constructor_kwargs={"model": "path/to/checkpoint", "tp": 2, "params": SamplingParams(max_tokens=64)},
        num_gpus=2, concurrency=4, batch_size=256,
    )

Ray decides on which host and GPUs an actor runs; what it does with them is `graphfuse.generation.local_ranks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from graphfuse.errors import ConfigError
from graphfuse.generation.local_ranks import LocalRanks
from graphfuse.generation.sampling import SamplingParams

PROMPT, MESSAGES = "prompt", "messages"


class TextGenerator:
    """Adds what a model answers to batches of prompts.

    A batch has a column "prompt" of texts or "messages" of conversations. It comes back with the columns "text",
    "finish_reason", "num_prompt_tokens", "num_tokens" and "error": of a prompt that cannot be used the reason, and None
    in all others.
    """

    def __init__(
        self, model: str, tp: int = 1, params: SamplingParams | None = None, *, device: str = "auto", **options: Any
    ) -> None:
        """`options` are those of `graphfuse.LLM`. `params.n` must be 1. With a seed, row i of a batch is sampled with
        `seed + i`. Raises what `LocalRanks` does."""
        self._params = params or SamplingParams()
        if self._params.n != 1:
            raise ConfigError(f"n={self._params.n} completions do not fit into one row. Repeat the rows instead.")
        self._ranks = LocalRanks(model, tp, device=device, **options)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        prompts = self._prompts(batch)
        seed = self._params.seed
        params = [
            self._params if seed is None else dataclasses.replace(self._params, seed=(seed + i) % 2**63)
            for i in range(len(prompts))
        ]
        rows = [_row(result) for result in self._ranks.complete(prompts, params)]
        return {**batch, **{name: [row[name] for row in rows] for name in _COLUMNS}}

    def _prompts(self, batch: dict[str, Any]) -> list[Any]:
        if (PROMPT in batch) == (MESSAGES in batch):
            raise ConfigError(
                f'A batch has the columns {", ".join(batch)}. Name one of them "{PROMPT}" or "{MESSAGES}", not both.'
            )
        if PROMPT in batch:
            return [str(prompt) if isinstance(prompt, str) else prompt for prompt in batch[PROMPT]]
        return [_conversation(messages) for messages in batch[MESSAGES]]


def _conversation(messages: Any) -> Any:
    """Ray has arrays in the place of lists. What is no conversation, as a null, is for the ranks to refuse."""
    if not isinstance(messages, Iterable) or isinstance(messages, str):
        return messages
    return [dict(message) if isinstance(message, Mapping) else message for message in messages]


_COLUMNS = ("text", "finish_reason", "num_prompt_tokens", "num_tokens", "error")


def _row(result: Any) -> dict[str, Any]:
    if isinstance(result, Exception):
        return {**dict.fromkeys(_COLUMNS), "error": str(result)}
    [completion] = result
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": len(completion.prompt_token_ids),
        "num_tokens": len(completion.token_ids),
        "error": None,
    }
