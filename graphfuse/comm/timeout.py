"""GRAPHFUSE_COMM_TIMEOUT: seconds after which a rank that waits for another gives up, for finding errors.

Unset, ranks wait for one another as long as their processes live. Set, on every rank alike, each call of a fused op
first compares its shapes with those of the other ranks (`graphfuse.comm.call_check`), symm_mem kernels stop waiting,
and a rank that does not come to a call is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from graphfuse.errors import ConfigError, brief

TIMEOUT_VARIABLE = "GRAPHFUSE_COMM_TIMEOUT"


def comm_timeout(environment: Callable[[str], str | None] = os.environ.get) -> float | None:
    """The seconds, or None where the variable is not set.

    Raises:
        ConfigError: it is set to something that is not a positive number.
    """
    text = environment(TIMEOUT_VARIABLE)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(
            f"{TIMEOUT_VARIABLE}={brief(text)} is not a positive number of seconds. Give one, or unset it."
        )
    return seconds
