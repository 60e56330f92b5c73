"""What would change a decline: a sentence for each reason that a rule or the gate gives.

Reasons are sentences for people (`passes/`, `graphfuse/gate.py`, `graphfuse/comm/refusals.py`); here each is known by a
part of its wording. A test holds that each part still stands in the code that gives the reason.
"""

from __future__ import annotations

import re

ADVICE: tuple[tuple[str, str], ...] = (
    # switches
    ("fusion is switched off", "Leave FuseConfig.fusion at 'auto'."),
    ("is switched off (disabled_rules)", "Take the rule out of FuseConfig.disabled_rules."),
    ("is a relaxed one", "FuseConfig(tier='relaxed') allows rules that round more than the model does."),
    ("stopped by GRAPHFUSE_FUEL", "Unset GRAPHFUSE_FUEL."),
    # groups
    ("the group has one rank", "With two or more ranks there is something to reduce."),
    ("no group was given", "Give the tensor-parallel group to graphfuse.compile."),
    ("no tensor-parallel group was given", "Give the tensor-parallel group to graphfuse.compile."),
    (
        "the compiled group is ranks",
        "Compile for the group that it reduces over. One of another purpose stays as it is.",
    ),
    ("which this process does not know", "Make the group on this rank, too, and reduce over it."),
    # what is reduced
    ("only sums are fused", "Nothing: it stays a plain collective."),
    ("reduces several tensors in one call", "Reduce each tensor in a call of its own."),
    ("before the reduction has finished", "Wait for the result before it is read, as dist.all_reduce does."),
    (
        "it reduces in place, and the input is read elsewhere",
        "Read the reduced value, not the buffer that it came from.",
    ),
    ("it reduces a scalar", "Nothing: there is no row to norm."),
    ("the last dimension of the reduced value is not static", "Let only batch and length vary, not the hidden size."),
    ("only floating point is fused", "Nothing: integers are not normed."),
    # what reads it
    (
        "the reduced value has another user",
        "Let the residual add alone read the reduced value. Another reader can read the sum or the normed value.",
    ),
    ("a reduced value has another user", "Let only the other term read it, and the two reductions become one."),
    (
        "no residual add follows",
        "If a norm ought to follow, look at the graph (GRAPHFUSE_DUMP): something stands between.",
    ),
    ("no RMSNorm reads", "If a norm ought to follow, look at the graph (GRAPHFUSE_DUMP): something stands between."),
    ("nothing reads the reduced value", "Leave the reduction out: nobody needs its result."),
    ("changes its dtype before the add", "Add in the dtype of the reduced value, and cast behind the add."),
    ("the add scales one of its operands", "Scale in front of the reduction: a sum over ranks is linear."),
    ("a constant is added, not a residual", "Add the constant behind the norm, or to the weights."),
    ("the residual is broadcast", "Give the residual the shape of the reduced value."),
    (", the reduced value torch.", "Keep the residual in the dtype of the reduced value."),
    ("change the last dimension", "Keep the hidden size as the last dimension between the reduction and the add."),
    ("the reduced value is added to itself", "Scale in front of the reduction: a sum over ranks is linear."),
    ("the shape of the re", "Let the model be traced with example inputs whose shapes are known."),
    # the norm
    ("the norm gives ", "Let the norm give the dtype that it is given."),
    ("the norm's weight is not a vector", "Give the norm one weight for each element of the hidden size."),
    ("the norm's mean drops its dimension", "Take the mean with keepdim=True."),
    ("the norm's reciprocal root is read as well", "Let nothing but the norm read its reciprocal root."),
    (" weight with ", "Load the norms' weights in the dtype of the activations."),
    ("the norm's epsilon is a tensor", "Compile without dynamic=True; graphfuse marks the dimensions that vary."),
    ("a LayerNorm follows", "Nothing: the fused op computes RMSNorms."),
    ("a gated RMSNorm follows", "Nothing: the gate is not part of the fused op."),
    ("not over the last one", "Nothing: the fused op norms over the hidden size."),
    ("the norm runs over more than the last dimension", "Nothing: the fused op norms over the hidden size."),
    ("rounded to another dtype before the norm", "Keep the dtype between the reduction and the norm."),
    ("the norm is computed in float64", "Compute the norm in float32."),
    ("the norm's weight is computed after the reduction", "Compute the weight ahead of the forward."),
    # the gate
    ("No fused comm backend can run", "One backend that may run is enough; graphfuse doctor says what this host has."),
    ("The ranks run on several hosts", "Keep tensor parallelism within one host, and run replicas on the others."),
    ("The symm_mem kernels are for 2 to 8 ranks", "Use 2 to 8 ranks."),
    ("The symm_mem kernels are for SM80 and newer GPUs", "Use GPUs from SM80 on."),
    (
        "The GPUs cannot access each other's memory",
        "Use GPUs with peer access: nvidia-smi topo -p2p r shows which have it.",
    ),
    ("Triton must be one version on every rank", "Install the same Triton everywhere."),
    ("the group computes on the CPU", "On GPUs they are lowered; for a host that is not here, give its facts."),
    # experts
    (
        "the grouped products are not transformers' experts",
        "Write the experts as graphfuse::moe_experts (CONTRIBUTING.md).",
    ),
)

NO_ADVICE = "See CONTRIBUTING.md, if a rule should know this pattern."


def advice(reason: str) -> str:
    """What would change a reason."""
    return " ".join(dict.fromkeys(text for part, text in ADVICE if part in reason)) or NO_ADVICE


def general(reason: str) -> str:
    """A reason without the names that differ from layer to layer, so that like ones are equal: `mul (mul_7)`, digits in
    paths."""
    return re.sub(r" \(\w+?(_\d+)?\)", "", re.sub(r"\.\d+\b", ".*", reason))
