"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with sparse attention, in which an indexer says which tokens a query attends to.

In later models of GLM's only some layers have an indexer ("full"); those behind one ("shared") attend to what it has
selected. So a layer with an indexer gives its selection beside the hidden states, and one without is given it.

Source: DeepSeek-AI 2025, DeepSeek-V3.2 (arXiv 2512.02556), section 2.1; for sharing arXiv 2603.12201.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PretrainedConfig

from graphfuse.errors import UnsupportedModelError, brief
from graphfuse.models.causal_lm import KVCaches
from graphfuse.models.deepseek import DeepseekV3ForCausalLM, is_dense
from graphfuse.models.family import Family
from graphfuse.models.indexer import Indexer
from graphfuse.models.layers import CacheDims, DecoderLayer, GatedMLP, grouped, rotate
from graphfuse.models.mla import LatentAttention, rotate_interleaved
from graphfuse.models.sharding import TensorParallel
from graphfuse.models.shared_experts import RoutedAndSharedExperts
from graphfuse.ops.layout import Layout


class SelectingAttention(LatentAttention):
    """With an indexer, whose keys are its third cache."""

    cache_dims: ClassVar[CacheDims] = (None, None, None)

    def __init__(self, config: PretrainedConfig, interleaved: bool, tp: TensorParallel, *, dtype, device) -> None:
        """`interleaved`: the indexer's pairs are neighbours too, not in two halves."""
        super().__init__(config, tp, dtype=dtype, device=device)
        self.indexer = Indexer(config, rotate_interleaved if interleaved else rotate, dtype=dtype, device=device)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        layout: Layout,
        latent_cache: Tensor | None,
        k_rope_cache: Tensor | None,
        index_cache: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        q, latents = self.latents(x)
        selected = self.indexer(x, q, cos, sin, positions, layout, index_cache)
        y = self.attend(q, latents, cos, sin, positions, layout, latent_cache, k_rope_cache, selected)
        return y, selected

    def new_cache(self, max_batch: int, max_len: int, like: Tensor) -> tuple[Tensor, ...]:
        """Those of latent attention, and the indexer's keys, `[max_batch, max_len, index_head_dim]`."""
        keys = like.new_zeros(max_batch, max_len, self.indexer.head_dim)
        return *super().new_cache(max_batch, max_len, like), keys


class FollowingAttention(LatentAttention):
    """To what an earlier layer has selected."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        selected: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        layout: Layout,
        latent_cache: Tensor | None,
        k_rope_cache: Tensor | None,
    ) -> Tensor:
        q, latents = self.latents(x)
        return self.attend(q, latents, cos, sin, positions, layout, latent_cache, k_rope_cache, selected)


class SelectingLayer(DecoderLayer):
    """Gives the hidden states, and what it has selected."""

    def forward(self, x: Tensor, *where: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y, selected = self.mixer(self.input_layernorm(x), *grouped(where))
        x = x + y
        return x + self.feed_forward(self.post_attention_layernorm(x)), selected


class FollowingLayer(DecoderLayer):
    """Is given a selection behind the hidden states."""

    def forward(self, x: Tensor, selected: Tensor, *where: Any) -> Tensor:  # type: ignore[override]
        x = x + self.mixer(self.input_layernorm(x), selected, *grouped(where))
        return x + self.feed_forward(self.post_attention_layernorm(x))


class SelectingDenseLayer(SelectingLayer):
    pass


class SelectingSparseLayer(SelectingLayer):
    pass


class FollowingDenseLayer(FollowingLayer):
    pass


class FollowingSparseLayer(FollowingLayer):
    pass


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    about = Family(
        "DeepSeek-V3.2",
        ("DeepseekV32ForCausalLM",),
        "MLA, sparse by an indexer",
        "sigmoid with bias, groups, shared experts",
    )
    interleaved_index: ClassVar[bool] = False

    def make_layer(self, config: PretrainedConfig, index: int, tp: TensorParallel, dtype, device) -> nn.Module:
        kwargs = {"dtype": dtype, "device": device}
        selects, dense = self.selects(config, index), is_dense(config, index)
        if dense:
            mlp: nn.Module = GatedMLP(config, tp, bias=False, **kwargs)
        else:
            mlp = RoutedAndSharedExperts(config, tp, scoring=self.scoring, **kwargs)
        if selects:
            attention: nn.Module = SelectingAttention(config, self.interleaved_index, tp, **kwargs)
            kind: type[DecoderLayer] = SelectingDenseLayer if dense else SelectingSparseLayer
        else:
            attention = FollowingAttention(config, tp, **kwargs)
            kind = FollowingDenseLayer if dense else FollowingSparseLayer
        return kind(config, attention, mlp, dtype, device)

    def selects(self, _config: PretrainedConfig, _index: int) -> bool:
        """Whether a layer has an indexer."""
        return True

    def _hidden(self, ids: Tensor, positions: Tensor, kv_caches: KVCaches | None, layout: Layout) -> Tensor:
        cos, sin = self.rotary(positions)
        x, selected = self.embed_tokens(ids), None
        for layer, caches in zip(self.layers, self.caches_or_none(kv_caches), strict=True):
            where = (cos, sin, positions, *layout, *caches)
            if isinstance(layer, SelectingLayer):
                x, selected = layer(x, *where)
            else:
                x = layer(x, selected, *where)
        return self.norm(x)


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    about = Family("GLM-5", ("GlmMoeDsaForCausalLM",), "MLA, sparse by an indexer", "sigmoid with bias, shared experts")
    interleaved_index = True

    def selects(self, config: PretrainedConfig, index: int) -> bool:
        kinds = config.indexer_types
        if kinds[0] != "full" or kinds[index] not in ("full", "shared"):
            raise UnsupportedModelError(
                f"indexer_types has {brief(kinds[index])} for layer {index}, and begins with {brief(kinds[0])}. Each "
                'must be "full" or "shared", and the first one "full": check the checkpoint\'s config.json.'
            )
        return kinds[index] == "full"
