"""Text generation: prompts in, completions out, the same on every rank."""

from graphfuse.generation.completion import Completion, GenerationStats
from graphfuse.generation.llm import LLM
from graphfuse.generation.sampling import SamplingParams

__all__ = ["LLM", "Completion", "GenerationStats", "SamplingParams"]
