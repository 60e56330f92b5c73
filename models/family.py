"""What `graphfuse models` and errors say of a family of models. It stands beside the class that it describes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    name: str
    """As people call it: "gpt-oss"."""

    architectures: tuple[str, ...]
    """Names in a config's `architectures`."""

    attention: str
    moe: str
    """ "dense" where there is none."""

    formats: tuple[str, ...] = ("bf16", "FP8")
    """What checkpoints may hold: bf16 stands for any float of 16 or 32 bits, FP8 for each form of `quantisation`."""

    tested_against: str = "transformers"
    """What the logits are compared with in the tests."""
