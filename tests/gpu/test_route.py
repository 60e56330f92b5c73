"""The kernel that chooses experts on a GPU: against the formula, replayed, and in a compiled Qwen3-MoE."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig

import graphfuse
from graphfuse.models import registry
from graphfuse.ops.route_experts import plain, route_experts
from graphfuse.testing import trace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

FORMS = {  # experts, choices, scoring, bias, normalise, eps, scale, dtype of the logits and of the weights
    "mixtral": (8, 2, "softmax", False, True, 0.0, 1.0, torch.bfloat16, torch.float32),
    "olmoe": (64, 8, "softmax", False, False, 0.0, 1.0, torch.bfloat16, torch.bfloat16),
    "qwen3_moe": (128, 8, "softmax", False, True, 0.0, 1.0, torch.bfloat16, torch.bfloat16),
    "gpt_oss": (128, 4, "chosen_softmax", False, False, 0.0, 1.0, torch.bfloat16, torch.bfloat16),
    "deepseek_v3": (256, 8, "sigmoid", True, True, 1e-20, 2.5, torch.float32, torch.float32),
    "kimi_k2": (384, 8, "sigmoid", True, True, 1e-20, 2.827, torch.float32, torch.float32),
    "qwen3_next": (512, 10, "softmax", False, True, 0.0, 1.0, torch.bfloat16, torch.bfloat16),
    "qwen2_moe": (60, 4, "softmax", False, False, 0.0, 1.0, torch.float16, torch.float16),
    "largest": (1000, 16, "softmax", True, True, 0.0, 1.0, torch.float32, torch.float32),
    "one": (16, 1, "sigmoid", False, False, 0.0, 1.0, torch.float32, torch.float32),
}


def inputs(name, num_tokens):
    """On the GPU. Scores are far enough apart for one right choice, wherever they are computed."""
    experts, top_k, scoring, biased, normalise, eps, scale, dtype, out_dtype = FORMS[name]
    generator = torch.Generator().manual_seed(num_tokens)
    steps = torch.linspace(-2, 2, experts).to(dtype)
    if dtype != torch.float32:  # neighbours are different numbers of 16 bits
        steps = torch.arange(experts).sub(experts // 2).div(64).to(dtype)
    logits = torch.stack([steps[torch.randperm(experts, generator=generator)] for _ in range(num_tokens)])
    bias = (torch.randperm(experts, generator=generator) * 8.0).cuda() if biased else None
    return logits.cuda(), top_k, scoring, bias, normalise, eps, scale, out_dtype


def exact(logits, top_k, scoring, bias, normalise, eps, scale, out_dtype):
    """The formula on the CPU, where exponentials are accurate."""
    bias = None if bias is None else bias.cpu()
    return plain(logits.cpu(), top_k, scoring, bias, normalise, eps, scale, out_dtype)


def check(got, want):
    assert torch.equal(got[1].cpu(), want[1])
    assert got[0].dtype == want[0].dtype
    rtol = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[got[0].dtype]
    torch.testing.assert_close(got[0].cpu(), want[0], atol=1e-9, rtol=rtol)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("num_tokens", [1, 7, 128, 5000])
def test_the_kernel_equals_the_formula_at_once_and_replayed(name, num_tokens):
    arguments = inputs(name, num_tokens)
    logits, *rest = arguments
    check(route_experts(*arguments), exact(*arguments))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = route_experts(*arguments)
    logits.copy_(logits.flip(1))
    graph.replay()
    check(results, exact(logits, *rest))


def test_it_waits_for_what_computes_the_logits_and_is_waited_for():
    """Launched one behind another, each starts while the one before ends."""
    x, weight = torch.randn(64, 2048, device="cuda"), torch.randn(2048, 256, device="cuda")

    def steps():
        found = []
        for _ in range(20):
            logits = x @ weight
            weights, ids = route_experts(logits, 8, "softmax", None, True)
            found.append((logits, weights, ids))
            x.add_(weights[:, :1] * 1e-2)  # what the next product reads
        return found

    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = steps()
    for _ in range(3):
        graph.replay()
        for logits, weights, ids in results:
            scores = logits.softmax(dim=-1)
            torch.testing.assert_close(scores.gather(1, ids).sort(dim=1).values, scores.topk(8).values.flip(1))
            torch.testing.assert_close(weights.sum(dim=1), torch.ones(64, device="cuda"))


def test_of_equal_scores_the_lower_id_and_ids_of_experts_whatever_the_logits_are():
    logits = torch.zeros(6, 128, device="cuda")
    logits[1], logits[2], logits[3] = float("nan"), float("inf"), -float("inf")
    logits[4, 5], logits[5, 5] = float("nan"), float("inf")
    for scoring in ("softmax", "sigmoid", "chosen_softmax"):
        for bias in (None, torch.zeros(128, device="cuda")):
            ids = route_experts(logits, 8, scoring, bias)[1].tolist()
            assert ids[0] == list(range(8))
            assert all(len(set(row)) == 8 and min(row) >= 0 and max(row) < 128 for row in ids)


TINY = Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim
    hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True, vocab_size=512,
)  # fmt: skip


def test_a_compiled_model_chooses_with_the_kernel():
    torch.manual_seed(0)
    model = registry.build(TINY, None, torch.bfloat16, torch.device("cuda")).requires_grad_(False)
    for parameter in model.parameters():
        parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.normal_(0, 0.1)
    ids = torch.randint(0, 512, (2, 9), device="cuda")
    graph = trace(model, (ids,), None).after.graph
    target = torch.ops.graphfuse.route_experts.default
    assert sum(node.target is target for node in graph.nodes) == TINY.num_hidden_layers
    with graphfuse.compile(model, None) as compiled, torch.no_grad():
        got = compiled(ids)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            compiled(ids)
            torch.cuda.synchronize()
        assert compiled.report.rules["route_experts"]["matches"] == TINY.num_hidden_layers
        want = model(ids)
    names = [event.name for event in profile.events()]
    assert names.count("_route") == TINY.num_hidden_layers
    assert not any("gatherTopK" in name or "bitonicSort" in name for name in names)
    assert (got.float() - want.float()).norm() < 0.2 * want.float().norm()
