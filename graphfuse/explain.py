"""What would become of a checkpoint's reductions on some host: traced from its config, without weights, GPU or ranks.

The model is built on the "meta" device in a fake group of any size and traced as `graphfuse.compile` would; the gate is
asked with the facts of a described host, or of this one. A family that graphfuse has no definition of is explained as
transformers' model, sharded by transformers' own plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from graphfuse.config import FuseConfig
from graphfuse.errors import ConfigError, UnsupportedModelError, brief
from graphfuse.facts import Facts
from graphfuse.integrations.transformers_tp import shard_if_whole
from graphfuse.report import Report
from graphfuse.testing import fake_tp, trace
from graphfuse.weights.config import read_config
from graphfuse.weights.load import local_folder


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
        CheckpointError: there is no such folder or repository, or no readable config in it.
        UnsupportedModelError: no model definition for it.
        SchemaError: the facts file is damaged.
    """
    if tp < 1:
        raise ConfigError(f"tp={tp} is no number of ranks. Give 1 or more.")
    model_config = read_config(local_folder(path, ["config.json"]))
    if facts is not None and not isinstance(facts, Facts):
        facts = Facts.from_json(Path(facts))
    described = facts.for_world_size(tp) if facts is not None else None
    ids = torch.zeros(1, 8, dtype=torch.long, device="meta")
    with fake_tp(tp) as group:
        model, inputs = _model_of(model_config, group, ids)
        return trace(model, inputs, group, config=config or FuseConfig(), facts=described).report


def _model_of(config: Any, group: ProcessGroup, ids: torch.Tensor) -> tuple[nn.Module, Any]:
    """graphfuse's model of a config, or transformers', on "meta", and the arguments of its forward."""
    from graphfuse.models import registry

    dtype = getattr(config, "dtype", None) or torch.bfloat16
    try:
        registry.resolve(config)
    except UnsupportedModelError as unsupported:
        return _sharded_by_transformers(config, group, dtype, unsupported), {"input_ids": ids, "use_cache": False}
    return registry.build(config, group if group.size() > 1 else None, dtype, "meta"), (ids,)


def _sharded_by_transformers(
    config: Any, group: ProcessGroup, dtype: torch.dtype, unsupported: UnsupportedModelError
) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        shard_if_whole(model, group)
        return model
    except Exception as error:  # every model checks its config in its own way
        raise UnsupportedModelError(
            f"{unsupported} transformers cannot shard its model over {group.size()} ranks either: {brief(error, 400)}"
        ) from error
