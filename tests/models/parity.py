"""The comparison that decides parity, as tasks for the pool of ranks.

`wrap(model, group)` stands for what is done to the loaded model before it runs: `identity`, or compilation. `break_it`
is one of `breakage.BREAKAGES` by name, or None. The yardstick is always transformers' eager model on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import graphfuse
from graphfuse.weights.load import load
from tests.models.breakage import BREAKAGES
from tests.models.ragged import Ragged
from tests.models.tiny import Batch, Checkpoint

TOLERANCE = 1e-4
Wrap = Callable[[nn.Module, Any], nn.Module]


def identity(model: nn.Module, _group: Any) -> nn.Module:
    return model


def compiled(model: nn.Module, group: Any) -> nn.Module:
    """Compiled by graphfuse, which must fuse every reduction there is."""
    config = graphfuse.FuseConfig(fusion="require" if group.size() > 1 else "auto")
    return graphfuse.compile(model.requires_grad_(False), group, config=config)


def compiled_as_it_is(model: nn.Module, group: Any) -> nn.Module:
    """Compiled by graphfuse; what a broken model's reductions have become is not asked."""
    return graphfuse.compile(model.requires_grad_(False), group)


def rank_logits(
    group: Any, path: Path, batch: Batch, wrap: Wrap, break_it: str | None, dtype: Any
) -> dict[str, Tensor]:
    """Task of one rank: logits without cache, and with cache for each prompt's last token and each decoded one."""
    model = load(path, group, dtype=dtype)
    if break_it is not None:
        BREAKAGES[break_it](model)
    texts = Ragged(model, batch.input_ids)
    run = wrap(model, group)
    with torch.no_grad():
        plain = run(batch.input_ids)  # [B, S, V]
        steps = [texts.run(run, dict(enumerate(batch.prompt_lengths)))]  # [B, V]
        steps += [texts.run(run, dict.fromkeys(range(len(texts)), 1)) for _ in range(batch.num_decoded)]
    return {"plain": plain.clone(), "cached": torch.stack(steps, 1)}


@dataclass(frozen=True)
class Comparison:
    """Largest differences of rank 0 from transformers' logits, and whether all ranks gave the same bits."""

    plain: float
    cached: float
    ranks_agree: bool


def compare(
    ranks: Any,
    checkpoint: Checkpoint,
    tp: int,
    wrap: Wrap,
    break_it: str | None = None,
    dtype: torch.dtype | None = None,
) -> Comparison:
    """`dtype`: in which the model is loaded; the checkpoint's if None."""
    batch = checkpoint.batch
    results = ranks.run(tp, rank_logits, checkpoint.path, batch, wrap, break_it, dtype, timeout=120.0)
    agree = all(torch.equal(results[0][kind], other[kind]) for other in results[1:] for kind in other)
    lengths = torch.tensor(batch.prompt_lengths)
    at = lengths[:, None] - 1 + torch.arange(batch.num_decoded + 1)  # [B, steps]
    want = checkpoint.logits[torch.arange(len(lengths))[:, None], at]
    return Comparison(
        plain=float((results[0]["plain"] - checkpoint.logits).abs().max()),
        cached=float((results[0]["cached"] - want).abs().max()),
        ranks_agree=agree,
    )
