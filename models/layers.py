"""Parts that several families share: RMSNorm, rotary embedding, grouped-query attention, gated MLP, and the
layer around them.

Hidden states are flat, `[T, H]` with T = B * S: a linear over two unknown dimensions would trace to an expanded batched
product. A layer's forward takes tensors only, so that all layers of a model trace to the same graph.

Legend: B batch, S sequence, T tokens, H hidden, I intermediate, Hq and Hkv this rank's query and key-value heads, D
head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from graphfuse.errors import UnsupportedModelError, brief
from graphfuse.models.parallel import ColumnParallelLinear, RowParallelLinear, parameter
from graphfuse.models.sharding import TensorParallel, attention_heads, even
from graphfuse.ops.attention import attention
from graphfuse.ops.layout import Layout

# "hidden_act" of a config: the module's function, and the name of the same function in graphfuse::moe_experts.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "silu": (F.silu, "silu"),
    "gelu": (F.gelu, "gelu"),
    "gelu_pytorch_tanh": (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh"),
}
CacheDims = tuple[int | None, ...]
"""Along which dimension each of a mixer's caches is divided over the ranks; None: it is whole on every rank."""

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # others change their frequencies as the text grows


class RMSNorm(nn.Module):
    """Llama's form: the statistics in float32, the product with the weight in the input's dtype."""

    def __init__(self, size: int, eps: float, *, dtype, device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        f = x.float()
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * f.to(x.dtype)


class ZeroCentredRMSNorm(RMSNorm):
    """The stored weight is what is added to one, and multiplies in float32."""

    def forward(self, x: Tensor) -> Tensor:
        f = x.float()
        f = f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + self.eps)
        return (f * (1.0 + self.weight.float())).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """cos and sin of every token's position, `[B, S, 1, D]` each, in the model's dtype."""

    inv_freq: Tensor

    def __init__(self, config: PretrainedConfig, head_dim: int, *, dtype, device) -> None:
        super().__init__()
        rope = config.rope_parameters
        kind = rope["rope_type"]
        if kind not in STATIC_ROPE_TYPES:
            raise UnsupportedModelError(
                f"Rotary embedding of type {brief(kind)} is not implemented; known: {', '.join(STATIC_ROPE_TYPES)}. "
                'Load the model with implementation="transformers".'
            )
        if kind == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
            inv_freq, self.scaling = 1.0 / (rope["rope_theta"] ** exponents), 1.0
        else:
            inv_freq, self.scaling = ROPE_INIT_FUNCTIONS[kind](config, device)
        if 2 * inv_freq.shape[0] != head_dim:
            raise UnsupportedModelError(
                f"The rotary embedding covers {2 * inv_freq.shape[0]} of {head_dim} dimensions of a head, which is "
                'not implemented for this family. Load the model with implementation="transformers".'
            )
        self.dtype = dtype
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, :, None, None].float() * self.inv_freq  # [B, S, 1, D / 2]
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.scaling).to(self.dtype), (angles.sin() * self.scaling).to(self.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head, x `[B, S, heads, D]`, or of its first dimensions, as many as cos has."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], cos, sin), x[..., size:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention over this rank's heads; with `qk_norm`, queries and keys are normalised per head; with
    `output_gate`, each head's output is multiplied by the sigmoid of a gate, whose rows follow the head's in q_proj."""

    cache_dims: ClassVar[CacheDims] = (2, 2)
    has_state: ClassVar[bool] = False
    norm_type: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(
        self,
        config: PretrainedConfig,
        tp: TensorParallel,
        *,
        bias: bool,
        qk_norm: bool,
        sliding_window: int | None,
        output_bias: bool | None = None,
        output_gate: bool = False,
        dtype,
        device,
    ) -> None:
        """`bias`: of queries, keys and values, and of the output too if `output_bias` is None."""
        super().__init__()
        head_dim = head_size(config)
        q_heads, kv_heads = attention_heads(config.num_attention_heads, config.num_key_value_heads, tp)
        parts = {"q_proj": q_heads, "k_proj": kv_heads, "v_proj": kv_heads}
        self.head_dim, self.num_heads, self.num_kv_heads = head_dim, q_heads.local, kv_heads.local
        self.scale, self.sliding_window = head_dim**-0.5, sliding_window
        kwargs = {"dtype": dtype, "device": device}
        rows = {name: heads.times(head_dim) for name, heads in parts.items()}
        self.output_gate = output_gate
        if output_gate:
            rows["q_proj"] = q_heads.times(2 * head_dim)
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, rows, bias=bias, **kwargs)
        output_bias = bias if output_bias is None else output_bias
        self.o_proj = RowParallelLinear(q_heads.times(head_dim), config.hidden_size, tp, bias=output_bias, **kwargs)
        self.register_parameter("sinks", None)  # some families' heads have one each
        self.q_norm = self.norm_type(head_dim, config.rms_norm_eps, **kwargs) if qk_norm else None
        self.k_norm = self.norm_type(head_dim, config.rms_norm_eps, **kwargs) if qk_norm else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        layout: Layout,
        k_cache: Tensor | None,
        v_cache: Tensor | None,
    ) -> Tensor:
        batch, length = positions.shape
        heads = [self.num_heads * (2 if self.output_gate else 1), self.num_kv_heads, self.num_kv_heads]
        q, k, v = self.qkv_proj(x).view(batch, length, sum(heads), self.head_dim).split(heads, dim=2)
        gate = None
        if self.output_gate:
            q, gate = q.view(batch, length, self.num_heads, 2, self.head_dim).unbind(3)  # [B, S, Hq, D] each
        q, k = self.normalised(q, k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = attention(
            q, k, v, positions, k_cache, v_cache, self.scale, self.sliding_window, self.sinks,
            layout.entries, layout.pages, layout.spans,
        )  # [B, S, Hq, D]  # fmt: skip
        if gate is not None:
            y = y * torch.sigmoid(gate)
        return self.o_proj(y.view(batch * length, self.num_heads * self.head_dim))

    def normalised(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))

    def new_cache(self, max_batch: int, max_len: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, `[max_batch, max_len, Hkv, D]` each. Zero, not empty: attention weighs unused slots with
        zero, and zero times a stray NaN is NaN."""
        shape = (max_batch, max_len, self.num_kv_heads, self.head_dim)
        return like.new_zeros(shape), like.new_zeros(shape)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), the intermediate dimension divided over the ranks."""

    def __init__(
        self,
        config: PretrainedConfig,
        tp: TensorParallel,
        *,
        bias: bool,
        intermediate_size: int | None = None,
        dtype,
        device,
    ) -> None:
        """`intermediate_size`: the config's if None."""
        super().__init__()
        inner = even(intermediate_size or config.intermediate_size, tp, tp.inner_multiple)
        self.activation = activation_of(config)[0]
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = ColumnParallelLinear(config.hidden_size, parts, bias=bias, dtype=dtype, device=device)
        self.down_proj = RowParallelLinear(inner, config.hidden_size, tp, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._inner(x))

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the sum, without a bias, for callers that have more to add before it is reduced."""
        return self.down_proj.partial(self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.activation(gate) * up


class DecoderLayer(nn.Module):
    """The residual stream of a pre-norm layer. Families name their own subclasses, since a class is traced once.

    The mixer (attention, or what stands in its place) makes its own caches: the tensors from `new_cache`, divided over
    the ranks along `cache_dims`.
    """

    mixer_name: ClassVar[str] = "self_attn"
    mlp_name: ClassVar[str] = "mlp"
    norm_type: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, config: PretrainedConfig, mixer: nn.Module, mlp: nn.Module, dtype, device) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = self.norm_type(size, eps, dtype=dtype, device=device)
        self.add_module(self.mixer_name, mixer)
        self.post_attention_layernorm = self.norm_type(size, eps, dtype=dtype, device=device)
        self.add_module(self.mlp_name, mlp)

    @property
    def mixer(self) -> Any:
        return getattr(self, self.mixer_name)

    @property
    def feed_forward(self) -> Any:
        return getattr(self, self.mlp_name)

    def forward(self, x: Tensor, *where: Tensor | None) -> Tensor:
        """x and the result `[T, H]`; `where` is cos, sin, positions, the fields of the layout, then the caches of the
        mixer or as many None (see `grouped`)."""
        x = x + self.mixer(self.input_layernorm(x), *grouped(where))
        return x + self.feed_forward(self.post_attention_layernorm(x))


def grouped(where: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """A layer's arguments as its mixer takes them: with the layout as one. To a layer they come one by one: Dynamo does
    not know the call of a region again by a tuple, and would trace every layer (35 ms each)."""
    end = 3 + len(Layout._fields)
    return (*where[:3], Layout(*where[3:end]), *where[end:])


def activation_of(config: PretrainedConfig) -> tuple[Callable[[Tensor], Tensor], str]:
    if config.hidden_act not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"Activation {brief(config.hidden_act)} is not implemented; known: {', '.join(ACTIVATIONS)}. "
            'Load the model with implementation="transformers".'
        )
    return ACTIVATIONS[config.hidden_act]


def head_size(config: PretrainedConfig) -> int:
    """Some configs leave head_dim out or None, and mean the even division."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotary_size(config: PretrainedConfig) -> int:
    """How many dimensions of a head are rotated. Latent attention rotates a part of its own size."""
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    return getattr(config, "qk_rope_head_dim", None) or int(head_size(config) * share)
