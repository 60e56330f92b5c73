"""A tiny gpt-oss with its experts in MXFP4, as published. transformers' model computes with what they decode to."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.models import tiny
from tests.weights.mxfp4_reference import decoded


def save(family: str, folder: Path) -> tiny.Checkpoint:
    generator = torch.Generator().manual_seed(7)
    model = tiny.model_of(tiny.config(family)).eval()
    tiny.randomise(model, generator)
    stored = {name: p.clone() for name, p in model.state_dict().items()}
    for name, p in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = p.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(122, 126, blocks.shape[:3], dtype=torch.uint8, generator=generator)
            p.data = decoded(blocks, scales).transpose(1, 2).float()
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    values = model.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    values["architectures"] = ["GptOssForCausalLM"]
    (folder / "config.json").write_text(json.dumps(values, default=str))
    return tiny.yardstick(model, folder, generator)
