"""Graph passes: one file per rewrite. `default_rules()` is the order in which they are tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphfuse.passes.rule import Rule


def default_rules() -> list[Rule]:
    """The built-in rules in order: what makes one op of a layer's experts, and one reduction of two, then fusions, the
    longer pattern first, then the kernels of experts, of their choice, of what stands before attention, and of few
    rows' products."""
    from graphfuse.passes.fuse_add_rms_norm import FUSE_ADD_RMS_NORM
    from graphfuse.passes.fuse_norm_rotary import FUSE_NORM_ROTARY
    from graphfuse.passes.fuse_quantised_norm import FUSE_QUANTISED_NORM
    from graphfuse.passes.fuse_rms_norm import FUSE_RMS_NORM
    from graphfuse.passes.lower_linear import LOWER_LINEAR
    from graphfuse.passes.lower_moe import LOWER_MOE
    from graphfuse.passes.match_grouped_experts import MATCH_GROUPED_EXPERTS
    from graphfuse.passes.merge_reductions import MERGE_REDUCTIONS
    from graphfuse.passes.route_experts import ROUTE_EXPERTS

    return [
        MATCH_GROUPED_EXPERTS, MERGE_REDUCTIONS, FUSE_QUANTISED_NORM, FUSE_ADD_RMS_NORM, FUSE_RMS_NORM, LOWER_MOE,
        ROUTE_EXPERTS,
        FUSE_NORM_ROTARY,
        LOWER_LINEAR,
    ]  # fmt: skip
