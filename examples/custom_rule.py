"""A rule of your own: relu, then its square, become one op, here plain torch, where a kernel of yours could stand.

python examples/custom_rule.py
"""

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

import graphfuse
from graphfuse.passes.graph_reading import aten, describe, is_call, value
from graphfuse.passes.rule import Context, Decline, Rule, Site


@torch.library.custom_op("example::squared_relu", mutates_args=())
def squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square_()


@squared_relu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def match(node: Node, context: Context) -> Site | Decline:
    readers, tensor = list(node.users), value(node)
    square = len(readers) == 1 and is_call(readers[0], aten.pow.Tensor_Scalar) and readers[0].args[1] == 2
    if tensor is None or not square:
        return Decline(f"no square alone reads the relu, but {', '.join(map(describe, readers))}")
    return Site(node, "squared_relu", None, tensor.dtype, int(tensor.shape[-1]), readers[0])


def rewrite(graph: Graph, site: Site, context: Context) -> None:
    square = site.parts
    with graph.inserting_before(square):
        fused = graph.call_function(torch.ops.example.squared_relu.default, site.anchor.args)
    fused.meta = dict(square.meta)
    square.replace_all_uses_with(fused)
    graph.erase_node(square)  # what nobody reads any more, the relu, is removed afterwards


SQUARED_RELU = Rule(
    name="squared_relu", anchor=lambda node: is_call(node, aten.relu.default), match=match, rewrite=rewrite,
    applies=lambda site, context: None, needs_group=False,
)  # fmt: skip


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x)).pow(2)


if __name__ == "__main__":
    model = nn.Sequential(Layer(8, 16), Layer(16, 8)).requires_grad_(False)
    config = graphfuse.FuseConfig(rules=(*graphfuse.default_rules(), SQUARED_RELU))
    x = torch.randn(4, 8)
    with graphfuse.compile(model, config=config) as compiled:
        print(f"equal: {torch.equal(compiled(x), model(x))}, rewritten: {compiled.report.rules['squared_relu']}")
