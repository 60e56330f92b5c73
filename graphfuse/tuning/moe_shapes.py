"""Which MoE shapes a model needs tuned: from a checkpoint's config.json, by name, or given as numbers.

A rank of N holds every expert and 1 / N of each expert's intermediate size (tensor parallelism). Whatever the family
calls its fields, and in whichever section of a multimodal config they stand, four numbers make the shape; its number
format comes from `quantization_config`, or is chosen.

| dtype | weights | file names say |
|---|---|---|
| bf16 | 16 bits | nothing |
| fp8 | FP8, a scale for each expert (or channel, where the checkpoint has that) | dtype=fp8_w8a8 |
| fp8_block | FP8, a scale for each block | dtype=fp8_w8a8, block_shape=[n, k] |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphfuse.errors import CheckpointError, ConfigError, brief
from graphfuse.tuning.moe_tiles import MoeShape

DTYPES = ("bf16", "fp8", "fp8_block")
BLOCK_SHAPE = (128, 128)

FIELDS = (
    ("num_experts", "n_routed_experts", "num_local_experts"),
    ("num_experts_per_tok",),
    ("moe_intermediate_size", "intermediate_size"),
    ("hidden_size",),
)
"""What each number is called in the families' configs, the surest name first: beside `moe_intermediate_size`,
`intermediate_size` is that of dense layers."""

TEXT_SECTIONS = ("text_config", "language_config", "llm_config")


@dataclass(frozen=True)
class Workload:
    """One file to tune."""

    shape: MoeShape
    form: str
    """How weights are stored, by `moe_inputs.FORMS`."""

    @property
    def title(self) -> str:
        s = self.shape
        return f"E={s.num_experts}, N={s.intermediate_size}, H={s.hidden_size}, top-{s.top_k}, {self.form}"


@dataclass(frozen=True)
class Experts:
    """The routed experts of a whole model."""

    num_experts: int
    intermediate_size: int
    hidden_size: int
    top_k: int
    dtypes: tuple[str, ...] = ("bf16",)
    """Those that the model comes in."""

    block_shape: tuple[int, int] = BLOCK_SHAPE
    has_biases: bool = False
    by_channel: bool = False


MODELS = {
    "qwen3-30b-a3b": Experts(128, 768, 2048, 8),
    "qwen3-next-80b-a3b": Experts(512, 512, 2048, 10),
    "mistral-small-4-119b": Experts(128, 2048, 4096, 4, ("bf16", "fp8")),
    "deepseek-v3": Experts(256, 2048, 7168, 8, ("fp8_block",)),
    "glm-4.5-air": Experts(128, 1408, 4096, 8),
    "gpt-oss-120b": Experts(128, 2880, 2880, 4, has_biases=True),
}
"""Models whose shapes need no checkpoint at hand."""


def workloads_of_model(model: str, tp: int, dtypes: Sequence[str] = ()) -> list[Workload]:
    """What to tune for a model on a rank of `tp`.

    Args:
        model: the folder of a checkpoint, or one of `MODELS`.
        dtypes: of `DTYPES`; those that the model comes in if there are none.

    Raises:
        ConfigError: no such folder or name, no even division, or a dtype that the model cannot have.
        CheckpointError: the config cannot be read, or has no experts.
    """
    folder = Path(model)
    if (folder / "config.json").is_file():
        experts, name = _read_experts(folder), str(folder)
    elif model.lower() in MODELS:
        experts, name = MODELS[model.lower()], model
    else:
        raise ConfigError(
            f"--model {brief(model)[1:-1]} is neither a folder with a config.json nor one of {', '.join(MODELS)}. "
            "Give one of these, or the numbers with --shape."
        )
    return [_workload(experts, name, tp, dtype) for dtype in _known(dtypes) or experts.dtypes]


def workloads_of_shape(text: str, dtypes: Sequence[str] = ()) -> list[Workload]:
    """What to tune for "E,N,H,K": experts, intermediate size on a rank, hidden size, experts for each token.

    Raises:
        ConfigError: the text is not four numbers that can be, or a dtype is not known.
    """
    try:
        num_experts, intermediate, hidden, top_k = (int(part) for part in text.split(","))
    except ValueError:
        num_experts = intermediate = hidden = top_k = 0
    experts = Experts(num_experts, intermediate, hidden, top_k)
    if min(num_experts, intermediate, hidden, top_k) < 1 or top_k > num_experts:
        raise ConfigError(
            f"--shape {brief(text)[1:-1]} is not a shape. Give experts, intermediate size on a rank, hidden size and "
            "experts for each token, as in 128,384,2048,8."
        )
    return [_workload(experts, f"--shape {text}", 1, dtype) for dtype in _known(dtypes) or experts.dtypes]


def _known(dtypes: Sequence[str]) -> list[str]:
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype {brief(dtype)[1:-1]} is not known. Use {', '.join(DTYPES)}.")
    return list(dict.fromkeys(dtypes))


def _workload(experts: Experts, name: str, tp: int, dtype: str) -> Workload:
    if tp < 1:
        raise ConfigError(f"--tp {tp} is not a number of ranks. Use 1 or more.")
    intermediate, rest = divmod(experts.intermediate_size, tp)
    if rest:
        raise ConfigError(
            f"{name} has experts of intermediate size {experts.intermediate_size}, which {tp} ranks cannot share "
            f"evenly. Use a --tp that divides it."
        )
    if experts.has_biases and dtype != "bf16":
        raise ConfigError(f"{name} has experts with biases, which run in bf16 only. Leave --dtype {dtype} out.")
    block_shape = experts.block_shape if dtype == "fp8_block" else None
    if block_shape is not None and tp > 1 and any(intermediate % block for block in block_shape):
        raise ConfigError(
            f"{name} has {intermediate} intermediate values on each of {tp} ranks, which splits a block of "
            f"{list(block_shape)} with one scale. Use a smaller --tp, or --dtype fp8."
        )
    form = {"bf16": "bf16", "fp8": "fp8_tensor", "fp8_block": "fp8_block"}[dtype]
    if dtype == "fp8" and experts.by_channel:
        form = "fp8_channel"
    if experts.has_biases:
        form = "bf16_bias_interleaved"
    shape = MoeShape(
        experts.num_experts,
        intermediate,
        experts.hidden_size,
        experts.top_k,
        None if dtype == "bf16" else "fp8_w8a8",
        block_shape,
    )
    return Workload(shape, form)


def _read_experts(folder: Path) -> Experts:
    from graphfuse.jsonfile import read_json
    from graphfuse.weights.config import read_config

    file = folder / "config.json"
    try:
        values = read_json(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({brief(error)}). Check or download it again.") from error
    if isinstance(values, dict) and _is_known_to_transformers(values.get("model_type")):
        # Its classes know what a config that was saved without its defaults left out.
        config = read_config(folder)
        try:
            section = config.get_text_config()
            text: Mapping[str, Any] = section if isinstance(section, dict) else section.to_dict()
        except Exception as error:  # each class has its own ways to find that section
            raise CheckpointError(
                f"{file} has no section for text that can be read ({brief(error)}). Check or download it again."
            ) from error
        quantisation = getattr(config, "quantization_config", None) or text.get("quantization_config")
    elif isinstance(values, dict):
        text = next((values[key] for key in TEXT_SECTIONS if isinstance(values.get(key), dict)), values)
        quantisation = values.get("quantization_config") or text.get("quantization_config")
    else:
        raise CheckpointError(f"{file} holds no JSON object. Check or download it again.")
    experts, top_k, intermediate, hidden = (_number(file, text, names) for names in FIELDS)
    if top_k > experts:
        raise CheckpointError(f"{file} chooses {top_k} of {experts} experts for each token. Check or download it.")
    has_biases = text.get("model_type") == "gpt_oss"
    if has_biases or not quantisation:
        return Experts(experts, intermediate, hidden, top_k, has_biases=has_biases)
    dtype, block_shape, by_channel = _number_format(file, quantisation)
    return Experts(experts, intermediate, hidden, top_k, (dtype,), block_shape, by_channel=by_channel)


def _is_known_to_transformers(model_type: Any) -> bool:
    from transformers import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def _number(file: Path, text: Mapping[str, Any], names: Sequence[str]) -> int:
    for name in names:
        value = text.get(name)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value < 1 << 24:
            raise CheckpointError(f"{file} has {name}={brief(value)}, which cannot be. Check or download it again.")
        return value
    raise CheckpointError(
        f"{file} has no {' or '.join(names)}, as every model with routed experts has. Give another checkpoint, or the "
        "numbers with --shape."
    )


def _number_format(file: Path, quantisation: Any) -> tuple[str, tuple[int, int], bool]:
    """(dtype, block shape, whether there is a scale for each channel) of FP8 checkpoints."""
    values = quantisation if isinstance(quantisation, dict) else getattr(quantisation, "to_dict", dict)()
    method = values.get("quant_method")
    if method == "fp8":
        blocks = values.get("weight_block_size")
        if blocks:
            return "fp8_block", _block_shape(file, blocks), False
        return "fp8", BLOCK_SHAPE, values.get("activation_scheme", "dynamic") != "static"
    if method == "compressed-tensors":
        groups = values.get("config_groups")
        first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
        weights = first.get("weights") if isinstance(first, dict) else None
        if isinstance(weights, dict) and (weights.get("num_bits"), weights.get("type")) == (8, "float"):
            strategy = weights.get("strategy")
            if strategy == "block":
                return "fp8_block", _block_shape(file, weights.get("block_structure")), False
            return "fp8", BLOCK_SHAPE, strategy == "channel"
    raise CheckpointError(
        f"{file} has weights quantised by {brief(method)}, for which there is nothing to tune. Give --shape and "
        "--dtype for what it is loaded as."
    )


def _block_shape(file: Path, blocks: Any) -> tuple[int, int]:
    if (
        isinstance(blocks, list | tuple)
        and len(blocks) == 2
        and all(type(size) is int and 0 < size < 1 << 16 for size in blocks)
    ):
        return (blocks[0], blocks[1])
    raise CheckpointError(f"{file} has blocks of {brief(blocks)}. They must be two sizes: check or download the file.")
