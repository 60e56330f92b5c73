"""Tiny random checkpoints in FP8, written here in each published form, with two yardsticks.

The weights of transformers' model are rounded to FP8 by the form's scales and put back, dequantised: that model is one
yardstick, up to FP8's precision. The other one also rounds what each of these weights multiplies, by formulas of this
module: ours must be equal to it. Both run in float64, so that no sum in another order moves a value over the edge
between two FP8 numbers.

Sizes in blocks of 128 that no number of ranks divides: three blocks of inner entries.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.models.tiny import Batch, Checkpoint, randomise

LARGEST = 448.0
BLOCK = 128
SIZES: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "num_hidden_layers": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
LINEARS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "q_a_proj", "q_b_proj",
    "kv_a_proj_with_mqa", "kv_b_proj", "wq_b", "wk", "in_proj_qkvz", "out_proj",
)  # fmt: skip
MULTIPLIED_AS_MEANT = ("kv_b_proj",)
"""Weights of which products are made with others, absorbed, in the model's dtype: what they multiply is not rounded."""


def compressed(weights: dict[str, Any], activations: dict[str, Any], **more: Any) -> dict[str, Any]:
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**fp8, **weights}, "input_activations": {**fp8, **activations}}
    groups = {"config_groups": {"group_0": group}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", **groups, **more}


@dataclass(frozen=True)
class Form:
    """How a checkpoint is written: its quantization_config, and what its scales are called and shaped."""

    config: dict[str, Any]
    weights: str
    activations: str
    scale: str
    input_scale: str = ""
    shape: tuple[int, ...] = ()
    """Of the scale of a whole tensor, or what follows the channels."""
    dtype: torch.dtype = torch.float32
    plain: tuple[str, ...] = ()
    """Linears that stay as they are."""
    fused: bool = False


HEADS = ["lm_head", "re:.*mlp\\.gate$"]
FORMS = {
    "block": Form(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
         "modules_to_not_convert": ["model.layers.1.self_attn.o_proj", "lm_head", "linear_attn.in_proj_ba"]},
        "block", "group", "weight_scale_inv", plain=("model.layers.1.self_attn.o_proj",),
    ),
    "block_powers_of_two": Form(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "block", "group", "weight_scale_inv", dtype=torch.float8_e8m0fnu,
    ),
    "block_compressed": Form(
        compressed({"strategy": "block", "block_structure": [128, 128]},
                   {"strategy": "group", "group_size": 128, "dynamic": True}, ignore=HEADS),
        "block", "group", "weight_scale", dtype=torch.bfloat16,
    ),
    "static": Form(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "tensor", "static", "weight_scale", "input_scale",
    ),
    "static_compressed": Form(
        compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}, ignore=HEADS),
        "tensor", "static", "weight_scale", "input_scale", shape=(1,),
    ),
    "static_fused": Form(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        "tensor", "static", "weight_scale_inv", "activation_scale", fused=True,
    ),
    "block_fused": Form(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "block", "group", "weight_scale_inv", fused=True,
    ),
    "channel": Form(
        compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True}, ignore=HEADS),
        "channel", "token", "weight_scale", shape=(1,),
    ),
}  # fmt: skip


def config(family: str, **changes: Any) -> PretrainedConfig:
    if family == "llama":
        return LlamaConfig(**{**SIZES, "head_dim": 128, "intermediate_size": 384, "attention_bias": True, **changes})
    if family in ("deepseek_v3", "deepseek_v32"):  # the projections to latents end in half a block
        index = {"index_topk": 3, "index_n_heads": 8, "index_head_dim": 128} if family == "deepseek_v32" else {}
        kind = DeepseekV32Config if index else DeepseekV3Config
        return kind(
            **{**SIZES, **index, "intermediate_size": 384, "moe_intermediate_size": 128, "n_routed_experts": 4,
               "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1,
               "first_k_dense_replace": 1, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
               "qk_rope_head_dim": 64, "v_head_dim": 128, "num_key_value_heads": 4, **changes},
        )  # fmt: skip
    if family == "qwen3_next":
        return Qwen3NextConfig(
            **{**SIZES, "head_dim": 128, "intermediate_size": 384, "num_experts": 4, "num_experts_per_tok": 2,
               "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "linear_key_head_dim": 128,
               "linear_value_head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
               "layer_types": ["linear_attention", "full_attention"], **changes},
        )  # fmt: skip
    return Qwen3MoeConfig(
        **{**SIZES, "head_dim": 128, "intermediate_size": 384, "num_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 384, "norm_topk_prob": True, **changes},
    )  # fmt: skip


@dataclass(frozen=True)
class Fp8Checkpoint(Checkpoint):
    """`logits` are of the model that rounds its activations too."""

    dequantised: Tensor
    weights: dict[str, Tensor]
    """What the stored weights stand for, by name."""


def save(family: str, form_name: str, folder: Path, **changes: Any) -> Fp8Checkpoint:
    form, generator = FORMS[form_name], torch.Generator().manual_seed(len(family))
    model = AutoModelForCausalLM.from_config(
        config(family, **changes), dtype=torch.float32, experts_implementation="eager"
    ).eval()
    randomise(model, generator)
    stored, meant = {}, {}
    scales: dict[str, Tensor] = {}
    for name, tensor in published(model.state_dict()).items():
        linear, _, kind = name.rpartition(".")
        if kind != "weight" or linear.rpartition(".")[2] not in LINEARS or linear in form.plain:
            stored[name] = tensor.clone()
            continue
        quantised, scale, meant[linear] = quantise_weight(tensor, form)
        stored[name], stored[f"{linear}.{form.scale}"] = quantised, scale
        if form.input_scale:  # one for all readers of an input, as calibration gives; activations reach 30 or so
            key = linear.rpartition(".")[0] + (".down" if linear.endswith("down_proj") else "")
            scales.setdefault(key, (2 + torch.rand((), generator=generator)) / LARGEST * 16)
            stored[f"{linear}.{form.input_scale}"] = scales[key].reshape(form.shape).clone()
    model = model.double()
    for linear, weight in meant.items():
        put_back(model, linear, weight)
    batch = Batch(torch.randint(0, model.config.vocab_size, (3, 9), generator=generator), (6, 3, 1), 3)
    with torch.no_grad():
        dequantised = model(batch.input_ids).logits
        round_activations(model, meant, form, stored)
        logits = model(batch.input_ids).logits
    assert logits.std() >= 1
    if form.fused:
        stored = fuse(stored, form)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in stored.items()}, folder / "model.safetensors")
    values = {**model.config.to_dict(), "quantization_config": form.config, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(values, default=str))
    return Fp8Checkpoint(folder, batch, logits, dequantised, meant)


def published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """One matrix an expert, as published checkpoints have them."""
    found = {}
    for name, tensor in state.items():
        path, _, kind = name.rpartition(".")
        for e in range(tensor.shape[0]) if path.endswith("experts") else ():
            if kind == "gate_up_proj":
                found[f"{path}.{e}.gate_proj.weight"], found[f"{path}.{e}.up_proj.weight"] = tensor[e].chunk(2)
            else:
                found[f"{path}.{e}.{kind}.weight"] = tensor[e]
        if not path.endswith("experts"):
            found[name] = tensor
    return found


def put_back(model: nn.Module, linear: str, weight: Tensor) -> None:
    path, _, part = linear.rpartition(".")
    parent, _, index = path.rpartition(".")
    if not index.isdecimal() or not parent.endswith("experts"):
        model.get_submodule(linear).weight.data = weight
        return
    experts: Any = model.get_submodule(parent)
    half = experts.gate_up_proj.shape[1] // 2
    gate_up, down = experts.gate_up_proj.data[int(index)], experts.down_proj.data[int(index)]
    {"gate_proj": gate_up[:half], "up_proj": gate_up[half:], "down_proj": down}[part].copy_(weight)


def fuse(stored: dict[str, Tensor], form: Form) -> dict[str, Tensor]:
    """All experts of a layer in one tensor, scales and all, under transformers' names."""
    found = {name: t for name, t in stored.items() if ".experts." not in name}
    layers = {name.partition(".experts.")[0] for name in stored if ".experts." in name}
    for layer in layers:

        def of(part: str, kind: str, path: str = layer) -> list[Tensor]:
            return [stored[f"{path}.experts.{e}.{part}.{kind}"] for e in range(4)]

        gates, ups, downs = (of(part, "weight") for part in ("gate_proj", "up_proj", "down_proj"))
        found[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
        found[f"{layer}.experts.down_proj"] = torch.stack(downs)
        gates, ups, downs = (of(part, form.scale) for part in ("gate_proj", "up_proj", "down_proj"))
        if form.weights == "tensor":
            gates, ups, downs = ([s.reshape(1, 1) for s in part] for part in (gates, ups, downs))
        found[f"{layer}.experts.gate_up_proj_scale_inv"] = torch.stack(
            [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        )
        found[f"{layer}.experts.down_proj_scale_inv"] = torch.stack(downs)
        if form.input_scale:
            for fused, part in (("gate_up_proj", "gate_proj"), ("down_proj", "down_proj")):
                found[f"{layer}.experts.{fused}_activation_scale"] = torch.stack(of(part, form.input_scale))
    return found


# --- rounding, by formulas of this module -----------------------------------------------------------------------------


def e4m3(x: Tensor) -> Tensor:
    """The nearest number of 4 exponent and 3 mantissa bits, ties to even, as float32."""
    a = x.abs().clamp(max=LARGEST)
    step = torch.exp2(torch.floor(torch.log2(a.double().clamp(min=2.0**-30))).clamp(min=-6) - 3)
    return (torch.round(a.double() / step) * step * x.sign()).float()


def quantise_weight(weight: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """(float8, the scale as stored, what they stand for)."""
    n, k = weight.shape
    if form.weights == "block":
        rows, columns = torch.arange(n) // BLOCK, torch.arange(k) // BLOCK
        scale = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                scale[i, j] = weight[rows == i][:, columns == j].abs().max() / LARGEST
        scale = torch.exp2(scale.log2().ceil()) if form.dtype == torch.float8_e8m0fnu else scale
        stored = scale.to(form.dtype)
        spread = stored.float()[rows][:, columns]
    elif form.weights == "channel":
        stored = (weight.abs().amax(1) / LARGEST).reshape(n, *form.shape)
        spread = stored.reshape(n, 1)
    else:
        stored = (weight.abs().max() / LARGEST).reshape(form.shape)
        spread = stored.reshape(1, 1)
    rounded = e4m3(weight / spread)
    return rounded.to(torch.float8_e4m3fn), stored, rounded.double() * spread.double()


def rounding(form: Form, scale: Tensor | None) -> Callable[[Tensor], Tensor]:
    def group_by_group(x: Tensor) -> Tensor:
        x = x.float()
        if scale is not None:
            return e4m3(x / scale.reshape(())).double() * scale.reshape(()).double()
        width = BLOCK if form.activations == "group" else x.shape[-1]
        parts = []
        for part in x.split(width, -1):
            step = part.abs().max(-1, keepdim=True).values.clamp(min=1e-10) / LARGEST
            parts.append(e4m3(part / step).double() * step.double())
        return torch.cat(parts, -1)

    return group_by_group


def round_activations(model: nn.Module, linears: dict[str, Tensor], form: Form, stored: dict[str, Tensor]) -> None:
    """Let each quantised linear, and each expert, round what it multiplies."""
    for name in linears:
        scale = stored.get(f"{name}.{form.input_scale}")
        if ".experts." not in name and not name.endswith(MULTIPLIED_AS_MEANT):
            hook = rounding(form, scale)
            model.get_submodule(name).register_forward_pre_hook(lambda _module, args, hook=hook: (hook(args[0]),))
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            scales = [
                [stored.get(f"{name}.{e}.{part}.{form.input_scale}") for part in ("gate_proj", "down_proj")]
                for e in range(module.gate_up_proj.shape[0])
            ]
            module.forward = lambda x, ids, weights, m=module, s=scales: experts(m, x, ids, weights, form, s)


def experts(
    module: Any, x: Tensor, ids: Tensor, weights: Tensor, form: Form, scales: list[list[Tensor | None]]
) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for e, share in zip(ids[t].tolist(), weights[t], strict=True):
            gate, up = (module.gate_up_proj[e] @ rounding(form, scales[e][0])(x[t])).chunk(2)
            inner = rounding(form, scales[e][1])(gate * torch.sigmoid(gate) * up)
            out[t] += share * (module.down_proj[e] @ inner)
    return out
