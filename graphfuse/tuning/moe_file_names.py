"""Names of tuned MoE kernel configs, as vLLM and SGLang write them.

    E={experts},N={intermediate size},device_name={torch's name, spaces to _}[,dtype=fp8_w8a8][,block_shape=[128,128]]
        [,per_channel_quant=True][_down].json

E and N count what a rank holds. vLLM writes no space in a block shape, SGLang does. `_down` is for the down projection
where it was tuned by itself; it stands beside the file without.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from graphfuse.tuning.moe_tiles import MoeShape

# Devices with the same tensor cores, as much shared memory and about as many SMs: what is tuned for one is a good start
# for the others. The nearest by memory bandwidth come first in each line, as seen from the middle.
FAMILIES = (
    ("NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA GH200 144G HBM3e", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3",
     "NVIDIA H100", "NVIDIA H100 NVL", "NVIDIA H800", "NVIDIA H100 PCIe"),
    ("NVIDIA H20", "NVIDIA H20-3e"),
    ("NVIDIA B200", "NVIDIA GB200", "NVIDIA B300 SXM6 AC", "NVIDIA GB300"),
    ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-40GB",
     "NVIDIA A800-SXM4-80GB"),
    ("NVIDIA L40S", "NVIDIA L40", "NVIDIA RTX 6000 Ada Generation"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
)  # fmt: skip

_NAME = re.compile(
    r"E=(?P<experts>\d{1,9}),N=(?P<intermediate>\d{1,9}),device_name=(?P<device>[^,]+?)(,dtype=(?P<dtype>[^,\[]+?))?"
    r"(,block_shape=\[(?P<n>\d{1,9}), ?(?P<k>\d{1,9})\])?(?P<channel>,per_channel_quant=True)?(?P<down>_down)?\.json",
    re.ASCII,
)


@dataclass(frozen=True)
class FileName:
    """What a file's name says."""

    num_experts: int
    intermediate_size: int
    device_name: str
    """With underscores for spaces."""

    dtype: str | None = None
    block_shape: tuple[int, int] | None = None
    per_channel: bool = False
    down: bool = False

    @classmethod
    def of(cls, shape: MoeShape, device_name: str, *, per_channel: bool = False, down: bool = False) -> FileName:
        device = re.sub(r"[\s/\\\0]", "_", device_name)  # stays in its folder whatever the device is called
        return cls(
            shape.num_experts, shape.intermediate_size, device, shape.dtype, shape.block_shape, per_channel, down
        )

    @classmethod
    def parse(cls, name: str) -> FileName | None:
        """None for what is no such name."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        block_shape = (int(match["n"]), int(match["k"])) if match["n"] else None
        return cls(
            int(match["experts"]), int(match["intermediate"]), match["device"], match["dtype"], block_shape,
            bool(match["channel"]), bool(match["down"]),
        )  # fmt: skip

    def spellings(self) -> list[str]:
        """The name as graphfuse and vLLM write it, then as SGLang does, if that is another."""
        return [self._text(""), self._text(" ")] if self.block_shape else [self._text("")]

    def __str__(self) -> str:
        return self._text("")

    def _text(self, space: str) -> str:
        parts = [f"E={self.num_experts}", f"N={self.intermediate_size}", f"device_name={self.device_name}"]
        if self.dtype:
            parts.append(f"dtype={self.dtype}")
        if self.block_shape:
            parts.append(f"block_shape=[{self.block_shape[0]},{space}{self.block_shape[1]}]")
        if self.per_channel:
            parts.append("per_channel_quant=True")
        return ",".join(parts) + ("_down" if self.down else "") + ".json"


def relatives(device_name: str) -> list[str]:
    """Other devices whose configs may stand in for those of this one, the likeliest first."""
    wanted = device_name.replace("_", " ")
    family = next((family for family in FAMILIES if wanted in family), ())
    if not family:
        return []
    at = family.index(wanted)
    return sorted((name for name in family if name != wanted), key=lambda name: abs(family.index(name) - at))
