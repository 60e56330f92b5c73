"""The floor under the time of MoE experts, against numbers worked out by hand."""

import pytest

from graphfuse.tuning.moe_floor import floor_us, flop, min_bytes
from graphfuse.tuning.moe_tiles import MoeShape

QWEN3_30B = MoeShape(128, 384, 2048, 8)
MISTRAL_FP8 = MoeShape(128, 1024, 4096, 4, "fp8_w8a8")


def test_one_token_waits_for_the_weights_of_its_experts():
    # 3 x 384 x 2048 x 2 bytes = 4,718,592 an expert; a token of 4,096 bytes comes in and goes out.
    assert min_bytes(QWEN3_30B, 1, 8, "bf16") == 8 * 4_718_592 + 2 * 4_096
    assert floor_us(QWEN3_30B, 1, 8, "bf16") == pytest.approx(8.781, abs=0.001)


def test_many_tokens_wait_for_the_arithmetic():
    # 8192 tokens x 8 experts x 3 x 384 x 2048 weights x 2 = 309.2 GFLOP
    assert flop(QWEN3_30B, 8192) == pytest.approx(309.24e9, rel=1e-4)
    assert floor_us(QWEN3_30B, 8192, 128, "bf16") == pytest.approx(391.4, abs=0.1)


def test_fp8_has_half_the_bytes_and_twice_the_rate():
    # 12,582,912 bytes an expert; tokens stay bf16: 8,192 bytes each way.
    assert floor_us(MISTRAL_FP8, 1, 4, "fp8_tensor") == pytest.approx((4 * 12_582_912 + 16_384) / 4.3e6)
    assert floor_us(MISTRAL_FP8, 8192, 128, "fp8_block") == pytest.approx(521.9, abs=0.1)


def test_it_grows_with_the_experts_touched_and_never_falls_with_the_tokens():
    times = [floor_us(QWEN3_30B, tokens, 100, "bf16") for tokens in (1, 64, 1024, 4096, 8192)]
    assert times == sorted(times)
    assert floor_us(QWEN3_30B, 8, 52.5, "bf16") > floor_us(QWEN3_30B, 8, 40, "bf16")
