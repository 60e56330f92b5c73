"""Every error a user can meet. Each message has one sentence of what is wrong and one of what to do."""

from __future__ import annotations

from typing import Any


def brief(value: Any, limit: int = 120) -> str:
    """A value from outside as a message can show it: on one line, printable, cut to `limit` characters.

    An exception is shown by what it says, anything else by its `repr`.
    """
    try:
        text = " ".join(str(value).split()) if isinstance(value, BaseException) else repr(value)
    except Exception:  # an integer of more digits than Python prints, an object whose repr fails
        text = f"a {type(value).__name__}"
    text = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)
    return text if len(text) <= limit else f"{text[:limit]}…"


class GraphfuseError(Exception):
    """Base of all errors raised on purpose by graphfuse."""


class ConfigError(GraphfuseError, ValueError):
    """A setting has a value that cannot be used, or a name that is not known."""


class UnknownRuleError(ConfigError):
    """`FuseConfig.disabled_rules` or a lookup names a rule that does not exist."""


class RuleError(GraphfuseError, RuntimeError):
    """A rule failed while it read or rewrote a graph."""


class GradientsEnabledError(GraphfuseError, RuntimeError):
    """A compiled model was called with gradients on."""


class GraphBreakError(GraphfuseError, RuntimeError):
    """The model cannot be traced as one graph."""


class FusionRequiredError(GraphfuseError, RuntimeError):
    """`fusion="require"` is set and a residual-stream reduction was declined."""


class ReductionProofError(GraphfuseError, RuntimeError):
    """The verifier found a partial sum that is not reduced exactly once."""


class GroupError(GraphfuseError, ValueError):
    """A process group or device mesh cannot serve as the tensor-parallel group, its ranks were not started alike, or
    one of them is gone, has failed or stays away."""


class ArgumentError(GraphfuseError, ValueError):
    """A graphfuse op was called with tensors it cannot accept."""


class BackendUnavailableError(GraphfuseError, RuntimeError):
    """A comm backend or executor was asked for by name and cannot run here."""


class CheckpointError(GraphfuseError, ValueError):
    """A checkpoint is missing, damaged, of an unsupported format, or does not fit the model."""


class UnsupportedModelError(GraphfuseError, ValueError):
    """No model definition for this architecture, or a feature of it that is not implemented."""


class SchemaError(GraphfuseError, ValueError):
    """A data file (size table, MoE config, facts, prompts) does not follow its schema."""


class GenerationError(GraphfuseError, ValueError):
    """A prompt or sampling parameter cannot be used."""


class TraceMismatchError(GraphfuseError, AssertionError):
    """`graphfuse.testing` found another graph, or other sites, than the test expects."""
