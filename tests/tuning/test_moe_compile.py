"""Kernels are compiled for a GPU in other processes, on a host without one."""

import os
from dataclasses import replace

import pytest
import torch

from graphfuse.tuning.moe_compile import Compilers, Kernel, _Target, collect, settle_key
from graphfuse.tuning.moe_cost import Device
from graphfuse.tuning.moe_inputs import FORMS, make_routing, make_tokens, make_weights
from graphfuse.tuning.moe_search import EFFORTS, openings
from graphfuse.tuning.moe_tiles import MoeShape, Tiles
from tests.tuning import compiled_kernels

triton = pytest.importorskip("triton")
from graphfuse.ops import moe_launch  # noqa: E402  (needs Triton)

HOPPER = ("cuda", 90, 32)


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """This process compiles for a GPU that is not there."""
    from triton.runtime.driver import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for kernel in (compiled_kernels.double, compiled_kernels.wrong):
        kernel.device_caches.clear()
    monkeypatch.setattr(driver, "_active", _Target(HOPPER))
    yield
    for kernel in (compiled_kernels.double, compiled_kernels.wrong):
        kernel.device_caches.clear()


@pytest.fixture
def compilers():
    compilers = Compilers(2)
    yield compilers
    compilers.close()


def collected(kernel, *arguments, **parameters):
    return collect(lambda: kernel[(1,)](*arguments, **parameters))


def test_kernels_are_compiled_into_the_cache_and_failures_are_told_apart(hopper, compilers, tmp_path):
    x = torch.zeros(64)
    (good,) = collected(compiled_kernels.double, x, x, 64, BLOCK=64)
    (other,) = collected(compiled_kernels.double, x, x, 64, BLOCK=32, num_warps=2)
    (bad,) = collected(compiled_kernels.wrong, x, BLOCK=16)
    aborting = Kernel("tests.tuning.compiled_kernels", "aborts", "{}", HOPPER)
    assert (good.module, good.function, good.target) == ("tests.tuning.compiled_kernels", "double", HOPPER)

    outcomes = compilers.wait([good, other, bad])
    assert outcomes[good] == outcomes[other] == ""
    assert outcomes[bad].startswith("CompilationError: ")
    cubins = list((tmp_path / "cache").rglob("double.cubin"))
    assert len(cubins) == 2

    # The compilation for the first launch has nothing left to do: it finds the same key.
    compiled_kernels.double.warmup(x, x, 64, BLOCK=64, grid=(1,))
    assert len(list((tmp_path / "cache").rglob("double.cubin"))) == 2

    late = replace(good, specialization=good.specialization.replace('"num_warps": 4', '"num_warps": 8'))
    outcomes = compilers.wait([aborting, late])
    assert outcomes == {aborting: "the compiler ended its process", late: ""}


def test_a_collected_kernel_is_neither_compiled_nor_launched_and_the_hook_goes_again(hopper, tmp_path):
    from triton import knobs

    x = torch.ones(64)
    assert len(collected(compiled_kernels.double, x, x, 64, BLOCK=64)) == 1
    assert not (tmp_path / "cache").exists() and bool((x == 1).all())
    assert knobs.runtime.jit_cache_hook is None


@pytest.mark.parametrize("before", [(), (compiled_kernels.stepped,), (compiled_kernels.step_back,)], ids=repr)
def test_a_kernel_has_one_key_whatever_ran_before_it(before):
    def forget():
        for function in (compiled_kernels.stepped, compiled_kernels.step, compiled_kernels.step_back):
            function.hash, function.used_global_vals = None, {}

    forget()
    alone = settle_key(compiled_kernels.step)
    forget()
    for function in before:
        settle_key(function)
    assert settle_key(compiled_kernels.step) == alone
    forget()


def test_closing_ends_the_processes(hopper, compilers):
    x = torch.zeros(64)
    compilers.wait(collected(compiled_kernels.double, x, x, 64, BLOCK=64))
    (process, *_) = compilers._pool._processes.values()
    compilers.close()
    process.join(10)
    assert not process.is_alive()
    assert os.getpid() != process.pid


def test_settings_of_triton_are_those_of_now(hopper, compilers, monkeypatch, tmp_path):
    x = torch.zeros(64)
    compilers.wait(collected(compiled_kernels.double, x, x, 64, BLOCK=64))
    compilers.close()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "another"))
    assert set(compilers.wait(collected(compiled_kernels.double, x, x, 64, BLOCK=64)).values()) == {""}
    assert not list((tmp_path / "another").rglob("double.cubin")), "what is known is not done again"
    compilers.wait(collected(compiled_kernels.double, x, x, 64, BLOCK=32))
    assert len(list((tmp_path / "another").rglob("double.cubin"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_tuners_likeliest_candidates_compile_for_hopper(hopper, compilers, form):
    dtype = "fp8_w8a8" if form.startswith("fp8") else None
    shape = MoeShape(8, 256, 512, 2, dtype, (128, 128) if form == "fp8_block" else None)
    layer = make_weights(shape, device="cpu", form=form)
    kernels: dict[Kernel, Tiles] = {}
    for num_tokens in (4, 2048):
        (tokens,) = make_tokens(num_tokens, shape, sets=1, device="cpu")
        ((ids, shares),) = make_routing(num_tokens, shape, sets=1, device="cpu")

        def call(tiles, tokens=tokens, ids=ids, shares=shares):
            moe_launch.run(
                tokens, layer.weights, ids, shares, layer.activation, layer.activation_limit, layer.tokens_scale,
                layer.intermediate_scale, layer.dynamic, layer.dtype, tiles,
            )  # fmt: skip

        for opening in openings(shape, num_tokens, Device(), EFFORTS["quick"]).values():
            for tiles in opening.candidates():
                found = collect(lambda tiles=tiles, call=call: call(tiles))
                assert {"gate_up", "down"} <= {kernel.function for kernel in found}
                kernels |= dict.fromkeys(found, tiles)
    outcomes = compilers.wait(kernels)
    assert not {(kernels[kernel], outcome) for kernel, outcome in outcomes.items() if outcome}
