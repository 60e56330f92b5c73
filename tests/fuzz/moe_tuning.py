"""What `graphfuse tune moe` reads, as something to feed bytes to: a config for its shapes, trials to go on from."""

from __future__ import annotations

import json
from pathlib import Path

from graphfuse.tuning.moe_inputs import FORMS
from graphfuse.tuning.moe_journal import COLUMNS, Journal, Trial
from graphfuse.tuning.moe_shapes import workloads_of_model
from graphfuse.tuning.moe_tiles import Tile, Tiles
from tests.fuzz.documents import Choices, edit, one_of

ROUTED = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "hidden_size": 64}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [24, 16]}
GROUPS = {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 16]}}}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": GROUPS}
SHAPES = [
    {"model_type": "qwen3_moe", **ROUTED},
    {"model_type": "unheard_of", **ROUTED, "quantization_config": BLOCKS},
    {"model_type": "unheard_of", "text_config": {"n_routed_experts": 8, **ROUTED}},
    {"model_type": "deepseek_v3", "quantization_config": COMPRESSED},
    {"model_type": "gpt_oss", "num_local_experts": 16, "intermediate_size": 48, "hidden_size": 64},
]
SHAPE_WORDS = [
    *ROUTED, *BLOCKS, "n_routed_experts", "num_local_experts", "text_config", "language_config", "llm_config",
    "quantization_config", "config_groups", "group_0", "weights", "strategy", "channel", "tensor", "static", "gpt_oss",
    "num_bits", "type", "float", "block_structure", "model_type", 8, 16, 24, 48, 1 << 23, [24, 16], [1 << 15, 1],
]  # fmt: skip


def read_shape(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    for workload in workloads_of_model(str(folder), 2):
        shape = workload.shape
        assert workload.form in FORMS and workload.title.isprintable()
        assert min(shape.num_experts, shape.intermediate_size, shape.hidden_size, shape.top_k) >= 1
        assert shape.top_k <= shape.num_experts
        assert shape.block_shape is None or min(shape.block_shape) >= 1


ORIGIN = {"device": "NVIDIA H200", "triton": "3.6.0"}
TRIAL = Trial(4, Tiles(Tile(16, 64, 128), Tile(16, 32, 64, swap_ab=True)), 3, 27.125)
_CELLS = ("2026-11-30T18:20:05", "1", "2", "27.13", "ok", "16", "64", "128", "1", "4", "3", "0", "64", "64", "1", "4")
_FAILED = (*_CELLS[:3], "", "OutOfResources", *_CELLS[5:], "3", "0")
_WORDS = (
    "",
    "ok",
    "nan",
    "inf",
    "-1",
    "0",
    "1e309",
    "9" * 5000,
    "٣",
    "1_0",
    '"',
    '"a',
    "a,b",
    "\0",
    "\r",
    "\u2028",
    "1.5",
)


def journals(choices: Choices) -> bytes:
    """A journal in which a few cells were changed, and perhaps some bytes."""
    rows = [list(COLUMNS), [*_CELLS, "3", "0"], list(_FAILED), [*_CELLS, "4", "1"]]
    for _ in range(choices.below(4)):
        row = one_of(choices, rows)
        row[choices.below(len(row))] = one_of(choices, _WORDS)
    text = "\n".join([f"# {json.dumps(ORIGIN)}", *(",".join(row) for row in rows), ""])
    return edit(choices, text.encode())


def read_journal(folder: Path, data: bytes) -> None:
    file = folder / "x.trials.csv"
    file.write_bytes(data)
    with Journal(file, ORIGIN) as journal:
        known = len(journal.known)
        journal.add(TRIAL)
    with Journal(file, ORIGIN) as journal:
        assert journal.known.get(TRIAL.num_tokens, TRIAL.tiles, TRIAL.rounds) == TRIAL
        assert known <= len(journal.known) <= known + 1
