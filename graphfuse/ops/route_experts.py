"""Which experts a token goes to, and with which weights, as one op: `graphfuse::route_experts`.

    scores  = softmax or sigmoid of the logits [T, E], in float32
    ids     = the K best of scores + bias
    weights = the scores of those, made to sum to one if `normalise`, times scale

Models write the formula out; a pass puts this op in its place on GPUs, where it is one kernel (`kernels/route.py`).

Legend: T tokens, E experts, K choices per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphfuse.errors import ArgumentError

SCORINGS = ("softmax", "sigmoid", "chosen_softmax")
"""The last one chooses by logits, and takes the softmax of the chosen."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op("graphfuse::route_experts", mutates_args=())
def route_experts(
    logits: Tensor,
    top_k: int,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    normalise: bool = False,
    eps: float = 0.0,
    scale: float = 1.0,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The K best experts of each token, the best first.

    Args:
        logits: `[T, E]` float32, bfloat16 or float16; all arithmetic is in float32.
        top_k: K, from 1 to E.
        scoring: "softmax" over all experts, "sigmoid" of each logit, or "chosen_softmax" over the K largest logits.
        bias: `[E]`, of one of these dtypes: added to the scores to choose, and not to weigh.
        normalise: divide the weights by their sum plus `eps`.
        scale: what they are multiplied by then.
        out_dtype: of the weights, one of those of the logits.

    Returns:
        (weights, ids), `[T, K]` each; ids are int64, in [0, E), and differ within a row whatever the logits are. Which
        of equal scores is taken, is left open as by `torch.topk`; on CUDA it is the lowest id.

    Raises:
        ArgumentError: a shape, dtype, device or name does not fit.
    """
    _check(logits, top_k, scoring, bias, out_dtype)
    if logits.device.type == "cuda" and why_not(logits.shape[1], top_k) is None:
        from graphfuse.kernels.route import route

        return route(logits, bias, top_k, scoring, normalise, eps, scale, out_dtype)
    return plain(logits, top_k, scoring, bias, normalise, eps, scale, out_dtype)


@route_experts.register_fake
def _(logits, top_k, scoring="softmax", bias=None, normalise=False, eps=0.0, scale=1.0, out_dtype=torch.float32):
    _check(logits, top_k, scoring, bias, out_dtype)
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=out_dtype), logits.new_empty(shape, dtype=torch.int64)


def plain(
    logits: Tensor,
    top_k: int,
    scoring: str,
    bias: Tensor | None,
    normalise: bool,
    eps: float,
    scale: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The formula in PyTorch's ops."""
    scores = logits.float()
    if scoring == "softmax":
        scores = scores.softmax(dim=-1)
    elif scoring == "sigmoid":
        scores = scores.sigmoid()
    weights, ids = torch.topk(scores if bias is None else scores + bias, top_k, dim=-1)
    if bias is not None:
        weights = scores.gather(1, ids)
    if scoring == "chosen_softmax":
        weights = weights.softmax(dim=-1)
    if normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + eps)
    return (weights * scale).to(out_dtype), ids


def why_not(num_experts: int, top_k: int) -> str | None:
    """Why the kernel cannot choose so many of so many experts."""
    try:
        from graphfuse.kernels.route import MOST_CHOICES, MOST_EXPERTS  # here: Triton is published for Linux only
    except ImportError as error:
        return f"the Triton kernel cannot be imported ({error})"
    if num_experts > MOST_EXPERTS or top_k > MOST_CHOICES:
        return (
            f"{top_k} of {num_experts} experts are chosen, and the kernel has room for {MOST_CHOICES} of {MOST_EXPERTS}"
        )
    return None


def _check(logits: Tensor, top_k: int, scoring: str, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    if scoring not in SCORINGS:
        raise ArgumentError(f"scoring is {scoring!r}. Known: {', '.join(SCORINGS)}.")
    if logits.dim() != 2 or logits.dtype not in DTYPES:
        raise ArgumentError(
            f"logits are {logits.dtype} of {logits.dim()} dimensions. Pass float32, bfloat16 or float16 of [T, E]."
        )
    if out_dtype not in DTYPES:
        raise ArgumentError(f"out_dtype is {out_dtype}. Use float32, bfloat16 or float16.")
    num_experts = logits.shape[1]
    if not 1 <= top_k <= num_experts:
        raise ArgumentError(f"top_k is {top_k} of {num_experts} experts. Pass at least 1, and at most all of them.")
    if bias is not None and (tuple(bias.shape) != (num_experts,) or bias.dtype not in DTYPES):
        raise ArgumentError(
            f"bias is {bias.dtype} of shape {list(bias.shape)}. Pass float32, bfloat16 or float16 of [{num_experts}]."
        )
    if bias is not None and bias.device != logits.device:
        raise ArgumentError(f"logits are on {logits.device}, bias on {bias.device}. Use one device.")
