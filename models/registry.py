"""Which class serves which config. A family is added here by its `model_type`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from graphfuse.errors import CheckpointError, GraphfuseError, UnsupportedModelError, brief
from graphfuse.models.causal_lm import CausalLM
from graphfuse.models.deepseek import DeepseekV3ForCausalLM, Glm4MoeLiteForCausalLM, Mistral4ForCausalLM
from graphfuse.models.deepseek_v32 import DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM
from graphfuse.models.family import Family
from graphfuse.models.glm4_moe import Glm4MoeForCausalLM
from graphfuse.models.gpt_oss import GptOssForCausalLM
from graphfuse.models.llama import LlamaForCausalLM, MistralForCausalLM
from graphfuse.models.minimax_m2 import MiniMaxM2ForCausalLM
from graphfuse.models.mixtral import MixtralForCausalLM
from graphfuse.models.quantisation import read_quantisation
from graphfuse.models.qwen2 import Qwen2ForCausalLM
from graphfuse.models.qwen2_moe import Qwen2MoeForCausalLM
from graphfuse.models.qwen3 import Qwen3ForCausalLM
from graphfuse.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from graphfuse.models.qwen3_moe import Qwen3MoeForCausalLM
from graphfuse.models.qwen3_next import Qwen3NextForCausalLM
from graphfuse.weights.config import text_config

TASKS = ("ForCausalLM", "ForConditionalGeneration")
"""How the architectures that generate text end; the second ones wrap a language model and other modalities."""

FAMILIES: dict[str, type[CausalLM]] = {
    "deepseek_v3": DeepseekV3ForCausalLM,
    "deepseek_v32": DeepseekV32ForCausalLM,
    "glm4_moe": Glm4MoeForCausalLM,
    "glm4_moe_lite": Glm4MoeLiteForCausalLM,
    "glm_moe_dsa": GlmMoeDsaForCausalLM,
    "gpt_oss": GptOssForCausalLM,
    "llama": LlamaForCausalLM,
    "minimax_m2": MiniMaxM2ForCausalLM,
    "mistral": MistralForCausalLM,
    "mistral4": Mistral4ForCausalLM,
    "mixtral": MixtralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen2_moe": Qwen2MoeForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "qwen3_5_moe_text": Qwen3_5MoeForCausalLM,
    "qwen3_5_text": Qwen3_5ForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
    "qwen3_next": Qwen3NextForCausalLM,
}


def families() -> list[tuple[Family, list[str]]]:
    """What each family says of itself, with the `model_type`s that it serves."""
    kinds: dict[type[CausalLM], list[str]] = {}
    for kind, model in FAMILIES.items():
        kinds.setdefault(model, []).append(kind)
    return [(model.about, types) for model, types in kinds.items()]


def resolve(config: PretrainedConfig) -> type[CausalLM]:
    """The model class for a config, or for the `text_config` that it wraps.

    Raises:
        UnsupportedModelError: the family is not known, or the checkpoint is of another task (a classifier, say) or
            quantised in a way that is not implemented.
    """
    family = FAMILIES.get(text_config(config).model_type)
    architectures = getattr(config, "architectures", None) or []
    if family is None or (architectures and not any(name.endswith(TASKS) for name in architectures)):
        what = brief(config.model_type) + (f" ({brief(', '.join(architectures))[1:-1]})" if architectures else "")
        raise UnsupportedModelError(
            f"There is no model definition for {what}; known, as causal language models: "
            f"{', '.join(sorted(FAMILIES))} (`graphfuse models` tells more). "
            'Load the model with implementation="transformers".'
        )
    read_quantisation(config)
    return family


def build(
    config: PretrainedConfig,
    tp_group: dist.ProcessGroup | DeviceMesh | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> CausalLM:
    """The model with zero weights; also on device "meta" and under FakeTensorMode. Of a wrapper, the language model.

    Raises:
        UnsupportedModelError: from `resolve`, or a feature that is not implemented.
        CheckpointError: the config has a value of which no model can be made.
    """
    family = resolve(config)
    try:
        return family(text_config(config), tp_group, dtype=dtype, device=device)
    except (GraphfuseError, torch.OutOfMemoryError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The config describes a {config.model_type} model that cannot be made here ({brief(error, 400)}). Check "
            "the values of its config.json."
        ) from error
