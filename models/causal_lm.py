"""The frame of every family: embedding, layers, final norm, head; caches; and what it takes from a checkpoint.

A family subclasses `CausalLM` and says how a layer is made. Module names are those of the published checkpoints, so
the name map is the module tree itself; modules made of several checkpoint tensors have a `tensor_plans` of their own.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from graphfuse.models.family import Family
from graphfuse.models.fp8 import quantise
from graphfuse.models.layers import RMSNorm, RotaryEmbedding, rotary_size
from graphfuse.models.parallel import ParallelLMHead, VocabParallelEmbedding, replicated
from graphfuse.models.quantisation import BLOCK, read_quantisation
from graphfuse.models.sharding import TensorParallel
from graphfuse.ops.layout import Layout
from graphfuse.weights.plan import TensorPlan

KVCaches = list[tuple[Tensor, ...]]
"""What the layers keep between calls."""


class CausalLM(nn.Module, abc.ABC):
    """A decoder-only language model on one rank of a tensor-parallel group.

    Attributes: `config`, `tp_group` (None on one rank), `num_layers`, `layers`.
    """

    about: ClassVar[Family]
    norm_type: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(
        self,
        config: PretrainedConfig,
        tp_group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        tp, quantisation = TensorParallel.of(tp_group), read_quantisation(config)
        if quantisation is not None and quantisation.has_blocks:
            tp = replace(tp, inner_multiple=BLOCK)
        self.config, self.tp_group, self.num_layers = config, tp.group, config.num_hidden_layers
        self.dtype, self.tp = dtype, tp
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, tp, dtype=dtype, device=device
        )
        self.rotary = RotaryEmbedding(config, rotary_size(config), dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            [
                quantise(self.make_layer(config, index, tp, dtype, device), f"model.layers.{index}", quantisation)
                for index in range(config.num_hidden_layers)
            ]
        )
        self.norm = self.norm_type(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        tied_to = self.embed_tokens.weight if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(
            config.hidden_size, config.vocab_size, tp, tied_to=tied_to, dtype=dtype, device=device
        )
        self.eval()

    @abc.abstractmethod
    def make_layer(self, config: PretrainedConfig, index: int, tp: TensorParallel, dtype, device) -> nn.Module:
        """The index-th decoder layer: (x [T, H], cos, sin, positions, *layout, *caches) → [T, H]; its `mixer`
        makes the caches (see `DecoderLayer`)."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        kv_caches: KVCaches | None = None,
        last_token: Tensor | None = None,
        *,
        entries: Tensor | None = None,
        pages: Tensor | None = None,
        states: Tensor | None = None,
        spans: Tensor | None = None,
    ) -> Tensor:
        """Logits, `[B, S, V]`; with `last_token` `[B]` int64 only those at that index of each row, `[B, V]`.

        A ragged call, with `pages` and the like (see `graphfuse.ops.layout.Layout`), is of R sequences with T tokens in
        all, one behind another; its result is `[R, V]`.

        Args:
            input_ids: `[B, S]` int64, rows padded on the right; of a ragged call `[T]`.
            positions: `[B, S]` int64; None counts from 0 in each row. Of a ragged call `[T]`.
            kv_caches: from `new_kv_caches`, or, for a ragged call, `new_paged_caches`; written in place. None: the
                tokens of this call are the whole text.
            last_token: `[B]` int64. What stands behind it in a row is padding, which no cache remembers. Of a ragged
                call `[R]`: the index of each sequence's last token among the T.
        """
        if pages is not None:
            assert positions is not None and last_token is not None and kv_caches is not None
            layout = Layout(None, entries, pages, states, spans)
            return self.lm_head(self._hidden(input_ids, positions[None], kv_caches, layout)[last_token])
        batch, length = input_ids.shape
        if positions is None:
            positions = torch.arange(length, device=input_ids.device).expand(batch, length)
        lengths = positions.new_full((batch,), length) if last_token is None else last_token + 1
        x = self._hidden(input_ids.reshape(-1), positions, kv_caches, Layout(lengths))
        if last_token is not None:
            rows = torch.arange(batch, device=x.device) * length + last_token
            return self.lm_head(x[rows])  # [B, V]
        return self.lm_head(x).view(batch, length, self.config.vocab_size)  # [B, S, V]

    def _hidden(self, ids: Tensor, positions: Tensor, kv_caches: KVCaches | None, layout: Layout) -> Tensor:
        """The hidden states behind the final norm, `[T, H]`, of ids `[T]` at positions `[B, S]`, T = B * S."""
        cos, sin = self.rotary(positions)
        x = self.embed_tokens(ids)
        for layer, caches in zip(self.layers, self.caches_or_none(kv_caches), strict=True):
            x = layer(x, cos, sin, positions, *layout, *caches)
        return self.norm(x)

    def caches_or_none(self, kv_caches: KVCaches | None) -> Sequence[tuple[Tensor | None, ...]]:
        """Each layer's caches, or as many None."""
        return [(None,) * len(mixer.cache_dims) for mixer in self.mixers] if kv_caches is None else kv_caches

    @property
    def mixers(self) -> list[Any]:
        """Each layer's attention, or what stands in its place."""
        return [layer.mixer for layer in self.layers]

    def new_kv_caches(self, max_batch: int, max_len: int) -> KVCaches:
        """What each layer's mixer keeps between calls: (keys, values) of attention, for one."""
        return [mixer.new_cache(max_batch, max_len, self.norm.weight) for mixer in self.mixers]

    def new_paged_caches(self, num_pages: int, page_size: int, num_states: int) -> KVCaches:
        """The same for ragged calls: `[num_pages, page_size, ...]`, and states `[num_states, ...]`."""
        return [
            mixer.new_cache(num_states if mixer.has_state else num_pages, page_size, self.norm.weight)
            for mixer in self.mixers
        ]

    @property
    def has_state(self) -> bool:
        """Whether a layer keeps a state rather than a token's entries: what came before cannot be shared or cut."""
        return any(mixer.has_state for mixer in self.mixers)

    def checkpoint_plan(self, names: frozenset[str]) -> list[TensorPlan]:
        """What this rank takes from a checkpoint that holds `names`."""
        plans: list[TensorPlan] = []
        for path, module in self.named_modules():
            name = path if path.startswith("lm_head") else f"model.{path}"
            if hasattr(module, "tensor_plans"):
                plans.extend(module.tensor_plans(name, names))
            else:
                plans.extend(replicated(f"{name}.{n}", p) for n, p in module.named_parameters(recurse=False))
        return plans

    def placements(self) -> dict[str, Any]:
        """Along which dimension each parameter, buffer and argument of `forward` is divided over the ranks; None: it is
        whole on every rank; "sum": the ranks' parts add up to it; a list: one for each part. The proof of placements
        starts from it."""
        found: dict[str, Any] = {"kv_caches": [mixer.cache_dims for mixer in self.mixers]}
        for path, module in self.named_modules():
            dims = getattr(module, "shard_dims", {})
            for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                found[f"{path}.{name}"] = dims.get(name)
        return found

    def ignores(self, name: str) -> bool:
        """Checkpoint tensors that are right to be there and not needed: derived buffers, the copy of a tied weight, a
        predictor of several tokens at once."""
        if name.endswith(("rotary_emb.inv_freq", ".k_scale", ".v_scale")):  # of a quantised cache, which ours is not
            return True
        if name.startswith("mtp."):
            return True
        return name == "lm_head.weight" and self.lm_head.tied
