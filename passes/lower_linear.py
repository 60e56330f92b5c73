"""Give linear layers the op that has a kernel for few rows.

    mm(x, weight.T)                becomes      graphfuse::linear(x, weight)
    addmm(bias, x, weight.T)       becomes      graphfuse::linear(x, weight, bias)

How many rows there are is known at run time only, so the choice between the kernels is the op's. Weights are parameters
of the model: the kernel reads them before what runs in front has ended.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from torch.fx import Graph, Node

from graphfuse.ops import linear as linear_op
from graphfuse.passes.graph_reading import PARAMETER, aten, is_call, value
from graphfuse.passes.rule import Context, Decline, Rule, Site

NAME = "lower_linear"
TRANSPOSES = (aten.t.default, aten.permute.default, aten.transpose.int)


@dataclass(frozen=True)
class _Parts:
    product: Node
    x: Node
    weight: Node
    bias: Node | None


def anchor(node: Node) -> bool:
    return is_call(node, aten.mm.default, aten.addmm.default)


def match(node: Node, _context: Context) -> Site | Decline:
    bias, x, turned = (None, *node.args) if node.target is aten.mm.default else node.args
    if any(node.kwargs.get(factor, 1) != 1 for factor in ("alpha", "beta")):
        return Decline("the product is scaled")
    weight = _transposed(turned)
    if weight is None or not weight.meta.get(PARAMETER):
        return Decline("it is no product with the transpose of a weight")
    if any(is_call(user, aten.copy_.default) and user.args[0] is weight for user in weight.users):
        return Decline("the model writes to the weight")
    assert isinstance(x, Node) and (bias is None or isinstance(bias, Node))
    held, rows, added = value(weight), value(x), None if bias is None else value(bias)
    if held is None or rows is None or held.dim() != 2 or rows.dtype != held.dtype:
        return Decline("its operands are not known, or of different dtypes")
    if bias is not None and (added is None or tuple(added.shape) != (held.shape[0],) or added.dtype != held.dtype):
        return Decline("what is added is not one number for each output")
    why_not = linear_op.why_not_skinny(held)
    if why_not is not None:
        return Decline(why_not)
    return Site(node, "linear", None, held.dtype, int(held.shape[0]), _Parts(node, x, weight, bias))


def applies(_site: Site, context: Context) -> Decline | None:
    if context.facts().device_type != "cuda":
        return Decline("the group computes on the CPU, where products run on PyTorch's kernels")
    capability = context.facts().compute_capability
    if capability is None or capability < (9, 0):
        return Decline("the kernel was measured on Hopper GPUs, and these are older or unknown")
    if importlib.util.find_spec("triton") is None:
        return Decline("Triton is not installed")
    return None


def rewrite(graph: Graph, site: Site, _context: Context) -> None:
    parts: _Parts = site.parts
    node = parts.product
    with graph.inserting_before(node):
        new = graph.call_function(linear_op.OP, (parts.x, parts.weight, parts.bias))
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _transposed(node: object) -> Node | None:
    """What `node` is the transpose of, a matrix."""
    if not isinstance(node, Node) or not is_call(node, *TRANSPOSES):
        return None
    source, dims = node.args[0], node.args[1:]
    if not isinstance(source, Node) or dims not in ((), ([1, 0],), ((1, 0),), (0, 1), (1, 0)):
        return None
    return source


LOWER_LINEAR = Rule(name=NAME, anchor=anchor, match=match, applies=applies, rewrite=rewrite, needs_group=False)
