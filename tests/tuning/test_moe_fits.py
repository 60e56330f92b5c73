"""No OutOfResources: kernels compiled for tiles that were made to fit ask for no more shared memory than there is.

They are compiled for GPUs that need not be here: Hopper (90) and a GPU with 99 KB (RTX PRO 6000, 120).
"""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphfuse.tuning.moe_inputs import Layer, make_weights
from graphfuse.tuning.moe_shared_memory import Limits, fit, shared_memory_bytes
from graphfuse.tuning.moe_tiles import MoeShape, Tile, Tiles
from tests.tuning.moe import SMALL_MEMORY, find

pytest.importorskip("triton")

PRO_6000 = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
TILES = {
    "large": Tile(256, 512, 1024, 8, 8, 10),
    "wide": Tile(128, 256, 128, 8, 8, 4),
    "usual": Tile(64, 128, 128, 8, 4, 4),
    "deep": Tile(16, 64, 256, 1, 4, 5),
    "swapped": Tile(16, 128, 128, 1, 4, 4, swap_ab=True),
}
FORMS = {
    "bf16": MoeShape(4, 512, 1024, 2),
    "bf16_bias_interleaved": MoeShape(4, 512, 1024, 2),
    "fp8_tensor": MoeShape(4, 512, 1024, 2, "fp8_w8a8"),
    "fp8_tensor, scales for each expert": MoeShape(4, 512, 1024, 2, "fp8_w8a8"),
    "fp8_channel": MoeShape(4, 512, 1024, 2, "fp8_w8a8"),
    "fp8_channel, 16-bit activations": MoeShape(4, 512, 1024, 2, "fp8_w8a16"),
    "fp8_block": MoeShape(4, 512, 1024, 2, "fp8_w8a8", (128, 128)),
}
DEVICES = itertools.count(1000)
"""A new one each time: what Triton has compiled for a device it does not compile again."""

ALL = [(form, tile, tokens, arch) for form in FORMS for tile in TILES for tokens in (8, 512) for arch in (90, 120)]
SHORT = [
    ("fp8_tensor", "usual", 512, 90),
    ("fp8_tensor, scales for each expert", "usual", 512, 90),
    ("fp8_channel, 16-bit activations", "usual", 8, 120),
    ("fp8_block", "usual", 8, 90),
    ("fp8_block", "large", 512, 120),
]


@pytest.fixture
def driver(monkeypatch) -> Any:
    """Triton's driver, to be given a GPU to compile for."""
    import triton
    from triton.runtime.driver import driver

    if triton.knobs.runtime.interpret:
        pytest.skip("kernels are interpreted")
    monkeypatch.setattr(driver, "_active", None)  # as it is afterwards
    return driver


def make_layer(form: str) -> Layer:
    kind, _, activations = form.partition(", ")
    layer = make_weights(replace(FORMS[form], dtype=FORMS[kind].dtype), device="cpu", form=kind)
    if activations == "scales for each expert":
        each = [scale.repeat(4) for scale in (layer.tokens_scale, layer.intermediate_scale)]
        return replace(layer, tokens_scale=each[0], intermediate_scale=each[1])
    return replace(layer, dynamic=False) if activations else layer


def compiled(form: str, tiles: Tiles, num_tokens: int, arch: int, driver: Any) -> dict[str, int]:
    """Bytes of shared memory of each kernel of a layer's call."""
    from graphfuse.ops import moe_launch
    from graphfuse.tuning.moe_compile import _Target, collect

    device = next(DEVICES)

    class Gpu(_Target):
        def get_current_device(self) -> int:
            return device

        def get_current_stream(self, _device: int) -> int:
            return 0

    shape = FORMS[form]
    layer = make_layer(form)
    tokens = torch.randn(num_tokens, shape.hidden_size).bfloat16()
    ids = torch.randint(shape.num_experts, (num_tokens, shape.top_k), dtype=torch.int32)

    def launch() -> None:
        moe_launch.run(
            tokens, layer.weights, ids, torch.ones(ids.shape), layer.activation, layer.activation_limit,
            layer.tokens_scale, layer.intermediate_scale, layer.dynamic, layer.dtype, tiles,
        )  # fmt: skip

    driver.set_active(Gpu(("cuda", arch, 32)))
    found = {}
    for kernel in collect(launch):
        function: Any = getattr(importlib.import_module(kernel.module), kernel.function)
        while not hasattr(function, "preload"):
            function = function.fn
        found[kernel.function] = function.preload(kernel.specialization).metadata.shared
    return found


def check(form: str, tile: Tile, num_tokens: int, arch: int, driver: Any) -> None:
    shape = FORMS[form]
    limits = Limits.of(shape, SMALL_MEMORY, rounds_tokens=form.endswith("scales for each expert"))
    tiles = fit(Tiles(tile, tile), limits)
    found = compiled(form, tiles, num_tokens, arch, driver)
    assert max(found.values()) <= SMALL_MEMORY, (tiles, found)
    assert found["gate_up"] <= shared_memory_bytes(tiles.gate_up, limits), tiles.gate_up
    assert found["down"] <= shared_memory_bytes(tiles.down, limits), tiles.down


@pytest.mark.parametrize(("form", "tile", "num_tokens", "arch"), SHORT)
def test_what_was_made_to_fit_fits(form, tile, num_tokens, arch, driver):
    check(form, TILES[tile], num_tokens, arch, driver)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "tile", "num_tokens", "arch"), sorted(set(ALL) - set(SHORT)))
def test_everything_that_was_made_to_fit_fits(form, tile, num_tokens, arch, driver):
    check(form, TILES[tile], num_tokens, arch, driver)


def test_what_crashes_the_peers_runs(driver):
    """A tile of 163,840 bytes, of a file for a GPU with 101,376."""
    tile = find("vllm", 16, 2048, PRO_6000).table.tiles(4).gate_up
    assert shared_memory_bytes(tile, Limits()) == 163_840
    check("bf16", tile, 512, 120, driver)
