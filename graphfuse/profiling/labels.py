"""What a piece of work is, told by the node of the graph that it comes from, and how a profiler range says it.

layers.3.self_attn.o_proj [reduction: graphfuse.all_reduce_add_rms_norm]
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Graph, Node

REDUCTION, NORM, ATTENTION, EXPERTS = "reduction", "norm", "attention", "experts"
DENSE, SAMPLING, OTHER = "dense GEMM", "sampling", "other"
CATEGORIES = (REDUCTION, NORM, ATTENTION, EXPERTS, DENSE, SAMPLING, OTHER)
TOP = "(top)"

_RANGE = re.compile(r"(?P<path>.+) \[(?P<category>[\w ]+): (?P<op>.+)\]")


@dataclass(frozen=True)
class Label:
    """A piece of work: path of its module ("(top)" outside of all), one of `CATEGORIES`, and the op."""

    path: str
    category: str
    op: str

    @property
    def text(self) -> str:
        return f"{self.path} [{self.category}: {self.op}]"

    @staticmethod
    def read(text: str) -> Label | None:
        """The label that a range's name is; None if it is none."""
        found = _RANGE.fullmatch(text)
        return Label(**found.groupdict()) if found and found["category"] in CATEGORIES else None

    def moved(self, path: str) -> Label:
        return Label(path or TOP, self.category, self.op)


SAMPLER = Label("sampler", SAMPLING, "argmax")


def label_graph(graph: Graph) -> dict[Node, Label]:
    """A label for each node that computes something."""
    return {node: _label(node) for node in graph.nodes if node.op == "call_function" and not _is_selection(node)}


def _is_selection(node: Node) -> bool:
    return node.target is operator.getitem


def _label(node: Node) -> Label:
    op, path = _op_name(node), str(node.meta.get("graphfuse_path") or "")
    category = category_of(op, path)
    if category == REDUCTION and op.startswith("graphfuse.") and isinstance(node.args[0], Node):
        path = str(node.args[0].meta.get("graphfuse_path") or path)  # where the sum comes from: the site's name
    return Label(path or TOP, category, op)


def _op_name(node: Node) -> str:
    """ "aten.mm" for aten.mm.default; of a Python function, its name."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is not None:
        return str(packet).replace("::", ".")
    return str(getattr(node.target, "__name__", node.target))


_REDUCTIONS = re.compile(r"_c10d_functional\.|c10d\.|(\w+\.)?all_reduce\w*$|(\w+\.)?reduce_scatter\w*$")
_ATTENTION_OPS = re.compile(
    r"graphfuse\.(attention|norm_rotary|mla|latent_attention|gated_delta|causal_conv)|aten\._?(scaled_dot_product|softmax|flash|efficient)"
)
_EXPERT_OPS = re.compile(r"graphfuse\.(moe|route)_experts|aten\._?grouped_mm|aten\._scaled_grouped_mm")
_PRODUCTS = re.compile(r"aten\.(mm|addmm|linear|_scaled_mm|_int_mm)$|graphfuse\.(linear$|quantise_fp8|fp8_linear)")
_NORM_OPS = re.compile(r"aten\.(_fused_rms_norm|rms_norm|native_layer_norm|layer_norm)$")
_SAMPLING_OPS = re.compile(r"aten\.(argmax|multinomial)$")
_NORM_PATH = re.compile(r"norm|^ln_?\w*$|layernorm")
_ATTENTION_PATH = re.compile(r"attn|attention|mixer|rotary|delta")
_EXPERT_PATH = re.compile(r"(?<!shared_)experts?$|router|^gate$|moe|shared_expert_gate")


def category_of(op: str, path: str) -> str:
    """The kind of work of an op, such as "aten.mm", in a module. The op decides where it can; else the innermost part
    of the module's path that says what it is."""
    for pattern, category in (
        (_REDUCTIONS, REDUCTION),
        (_EXPERT_OPS, EXPERTS),
        (_ATTENTION_OPS, ATTENTION),
        (_PRODUCTS, DENSE),
        (_NORM_OPS, NORM),
        (_SAMPLING_OPS, SAMPLING),
    ):
        if pattern.match(op):
            return category
    for part in reversed(path.split(".")):
        if _NORM_PATH.search(part):
            return NORM
        if _EXPERT_PATH.search(part):
            return EXPERTS
        if _ATTENTION_PATH.search(part):
            return ATTENTION
    return DENSE if re.match(r"aten\.(bmm|baddbmm|matmul)$", op) else OTHER


_CALLED = (REDUCTION, EXPERTS, ATTENTION, DENSE, SAMPLING, NORM, OTHER)
_GENERATED = (NORM, ATTENTION, EXPERTS, SAMPLING, OTHER, DENSE, REDUCTION)
_GENERATED_NAME = re.compile(r"triton_(?!tem_|mm)|cpp_(?!\w*gemm)")
_CALLED_NAME = re.compile(r"(?:torch\.ops\.(?P<namespace>\w+)|extern_kernels|aten)\.(?P<name>\w+?)_?(?:\.\w+)?")


def label_of_kernel(name: str, labels: Iterable[Label]) -> Label | None:
    """One label for a kernel that several nodes became. `name` is Inductor's: "triton_poi_fused_add_0" of one that it
    generated, which is no matrix product and no collective, though it may read or write for one; "extern_kernels.mm" of
    one that it calls."""
    counted = Counter(labels)
    if not counted:
        return None
    order = _GENERATED if _GENERATED_NAME.match(name) else _CALLED
    called = _CALLED_NAME.fullmatch(name)
    op = called and f"{called['namespace'] or 'aten'}.{called['name']}"
    product = name.startswith("extern_kernels.")

    def rank(label: Label) -> tuple:
        fits = label.op == op or (product and label.category == DENSE)
        return not fits, order.index(label.category), -counted[label], -label.path.count(".")

    best = min(counted, key=rank)
    # A product whose result is reduced in place goes by the name of the reduction.
    return Label(best.path, DENSE, op or best.op) if product and best.category == REDUCTION else best
