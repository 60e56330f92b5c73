"""The tiny Llama of the generation tests, for ranks that die while they use it."""

from tests.generation.conftest import checkpoint  # noqa: F401
