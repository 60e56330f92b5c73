"""`TextGenerator`: on batches as Ray Data hands them, and in Ray itself where it is installed."""

from __future__ import annotations

import numpy as np
import pytest

from graphfuse.errors import ConfigError
from graphfuse.generation import LLM, Job, SamplingParams
from graphfuse.integrations import ray_data
from graphfuse.integrations.ray_data import TextGenerator
from tests.generation.conftest import checkpoint, one_thread  # noqa: F401

PARAMS = SamplingParams(max_tokens=5, temperature=1.0, seed=3, ignore_eos=True)
OPTIONS = {"device": "cpu", "compile": False}
PROMPTS = ["The capital", "A", "", "One two three"]


@pytest.fixture(scope="module")
def expected(checkpoint):  # noqa: F811
    llm = LLM(checkpoint, **OPTIONS)
    usable = [(i, prompt) for i, prompt in enumerate(PROMPTS) if prompt]
    params = [SamplingParams(max_tokens=5, temperature=1.0, seed=3 + i, ignore_eos=True) for i, _ in usable]
    return {prompt: c for (_, prompt), c in zip(usable, llm.generate([p for _, p in usable], params), strict=True)}


class InThisProcess:
    """Stands for `LocalRanks`, which tests/generation/test_local_ranks.py is about."""

    def __init__(self, model, tp, **options) -> None:
        self._llm = LLM(model, **options)

    def complete(self, prompts, params):
        found = dict(self._llm.complete(Job(i, *job) for i, job in enumerate(zip(prompts, params, strict=True))))
        return [found[i] for i in range(len(prompts))]


def test_a_batch_comes_back_with_answers_and_what_is_wrong_with_the_others(checkpoint, expected, monkeypatch):  # noqa: F811
    monkeypatch.setattr(ray_data, "LocalRanks", InThisProcess)
    generate = TextGenerator(str(checkpoint), 1, PARAMS, **OPTIONS)
    batch = generate({"prompt": np.array(PROMPTS, dtype=object), "number": np.arange(4)})
    assert batch["number"].tolist() == [0, 1, 2, 3]
    for i, prompt in enumerate(PROMPTS):
        if not prompt:
            assert batch["text"][i] is None and "is empty" in batch["error"][i]
            continue
        assert batch["text"][i] == expected[prompt].text and batch["error"][i] is None
        assert batch["finish_reason"][i] == "length" and batch["num_tokens"][i] == 5
        assert batch["num_prompt_tokens"][i] == len(expected[prompt].prompt_token_ids)
    messages = [{"role": "user", "content": "The cat"}]
    answers = generate({"messages": [messages, None]})
    assert answers["error"][0] is None and "is of type NoneType" in answers["error"][1]
    with pytest.raises(ConfigError, match=r'columns text\. Name one of them "prompt" or "messages"'):
        generate({"text": ["A"]})
    with pytest.raises(ConfigError, match="n=2 completions do not fit"):
        TextGenerator(str(checkpoint), 1, SamplingParams(n=2, temperature=1.0), **OPTIONS)


@pytest.mark.slow
def test_an_actor_of_two_ranks_in_ray(checkpoint, expected):  # noqa: F811
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        rows = [{"prompt": prompt, "number": i} for i, prompt in enumerate(PROMPTS)]
        done = ray.data.from_items(rows).map_batches(
            TextGenerator,
            fn_constructor_kwargs={"model": str(checkpoint), "tp": 2, "params": PARAMS, **OPTIONS},
            concurrency=1,
            batch_size=len(PROMPTS),
        )
        found = {row["number"]: row for row in done.take_all()}
    finally:
        ray.shutdown()
    assert sorted(found) == [0, 1, 2, 3]
    for i, prompt in enumerate(PROMPTS):
        assert found[i]["text"] == (expected[prompt].text if prompt else None)
