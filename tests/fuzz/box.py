"""Where a parser is fed: a folder, another one beside it that nobody may open, and code that must not run."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from graphfuse.errors import GraphfuseError
from tests.fuzz.parsers import Parser, check_message, lines_of
from tests.fuzz.watch import Watch

CODE = """import transformers
open({mark!r}, "w").close()
class Canary(transformers.LlamaConfig): model_type = "canary"
class CanaryForCausalLM(transformers.LlamaForCausalLM): config_class = Canary
class CanaryTokenizer(transformers.PreTrainedTokenizerFast): pass
"""


class Box:
    """Feeds one parser, and checks what must hold whatever it is fed."""

    def __init__(self, parser: Parser, folder: Path) -> None:
        self.parser, self.folder, self.mark = parser, folder / "model", folder / "code-was-run"
        self.outside = outside = folder / "outside"
        self.folder.mkdir(parents=True)
        outside.mkdir()
        (outside / "secret.json").write_text(json.dumps({"a": 0, "secret": 1}))
        (outside / "vocab.json").write_text(json.dumps({"a": 0, "secret": 1}))
        save_file({"a": torch.ones(2, 3)}, outside / "secret.safetensors")
        for name in ("code.py", "modeling_canary.py"):
            (self.folder / name).write_text(CODE.format(mark=str(self.mark)))
        parser.prepare(self.folder)
        self.watch = Watch(outside)

    def feed(self, data: bytes) -> str:
        """What became of the input, in the same words for inputs that took the same way. Anything but a
        `GraphfuseError` goes on to the caller. "@outside" stands for the path of the folder that nobody may open."""
        data = data.replace(b"@outside", bytes(self.outside))
        try:
            way = self.parser.read(self.folder, data) or "read"
        except GraphfuseError as error:
            check_message(error)
            way = " ".join((type(error).__name__, *lines_of(error), *lines_of(error.__cause__)))
        assert not self.mark.exists(), "code of the checkpoint was run"
        opened = self.watch.opened()
        assert not opened, f"opened outside of the folder: {opened}"
        return way
