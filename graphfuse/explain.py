"""What would become of a checkpoint's reductions on some host: traced from its config, without weights, GPU or ranks.

The model is built on the "meta" device in a fake group of any size and traced as `graphfuse.compile` would; the gate is
asked with the facts of a described host, or of this one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from graphfuse.config import FuseConfig
from graphfuse.errors import CheckpointError, ConfigError
from graphfuse.facts import Facts
from graphfuse.report import Report
from graphfuse.testing import fake_tp, trace


def explain_checkpoint(
    path: str | Path, tp: int, facts: Facts | str | Path | None = None, *, config: FuseConfig | None = None
) -> Report:
    """The report that compiling a checkpoint for `tp` ranks would give.

    Args:
        path: a checkpoint folder (only config.json is read) or a hub id.
        tp: number of tensor-parallel ranks.
        facts: the host: a facts file, or `Facts`; None describes this one. Its number of ranks becomes `tp`.
        config: settings.

    Raises:
        CheckpointError: there is no readable config.
        UnsupportedModelError: no model definition for it.
        SchemaError: the facts file is damaged.
    """
    from transformers import AutoConfig

    from graphfuse.models import registry

    if tp < 1:
        raise ConfigError(f"tp={tp} is no number of ranks. Give 1 or more.")
    try:
        model_config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} has no config that can be read: {error}") from error
    if facts is not None and not isinstance(facts, Facts):
        facts = Facts.from_json(Path(facts))
    described = facts.for_world_size(tp) if facts is not None else None
    dtype = getattr(model_config, "dtype", None) or torch.bfloat16
    with fake_tp(tp) as group:
        model = registry.build(model_config, group if tp > 1 else None, dtype, "meta")
        ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
        report = trace(model, (ids,), group, config=config or FuseConfig(), facts=described).report
    kept: dict[str, float] = {key: report.seconds[key] for key in ("trace", "passes") if key in report.seconds}
    return dataclasses.replace(report, seconds=kept)
