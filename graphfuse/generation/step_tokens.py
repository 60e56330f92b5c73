"""How many tokens a step computes at most, unless somebody says; without torch, for the command line."""

from __future__ import annotations


def default_step_tokens(device_type: str) -> int:
    """On a GPU enough for the device to take longer than the host, which launches any number of tokens alike."""
    return 16384 if device_type == "cuda" else 2048
