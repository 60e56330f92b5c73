"""One fused reduction: what every comm backend takes and gives back.

    s = all_reduce(x)                         rounded to x's dtype
    r = residual + s                          rounded to x's dtype; r = s without a residual
    f = r.float()                             float64 stays float64
    f = f * rsqrt(mean(f * f, -1) + eps)
    w = weight + weight_bias                  in f's dtype; no weight: 1
    normed = cast(cast(f) * w)                with cast_before_weight (Llama, Qwen3, DeepSeek)
    normed = cast(f * w)                      without (Gemma, Qwen3-Next, gpt-oss)

Every backend is complete: it returns (normed, r), each like x. None may skip the reduction. With `fp8` the normed value
is also quantised, as `graphfuse.kernels.norm_epilogue` says, and (normed, r, quantised, scale) is returned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FusedCall:
    """The arguments of one call. x and residual [..., H], contiguous and of one dtype; weight [H], contiguous."""

    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor | None
    eps: float
    weight_bias: float = 0.0
    cast_before_weight: bool = True
    x_is_dead: bool = False
    """Nobody reads x after this call: a backend may use its memory."""
    fp8: str | None = None
    """None, "static" (with `scale`, one float32 number), "token" or "group" (of 128 elements)."""
    scale: torch.Tensor | None = None

    @property
    def hidden_size(self) -> int:
        return self.x.shape[-1]

    @property
    def num_bytes(self) -> int:
        """Size of the message, by which the backend is chosen."""
        return self.x.numel() * self.x.element_size()
