"""What `quantization_config` says of a checkpoint's weights: which are FP8, and how their scales lie.

Three forms are read, whoever wrote them:

    blocks      a scale for each 128 x 128 of a weight; activations by the token and group of 128 inputs
    tensor      a scale for each weight; activations by a scale that the checkpoint gives, or by the token
    channels    a scale for each output; activations by the token, or by a given scale

Sources: the `fp8` method (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3; Mistral) and the `compressed-tensors` format
(https://github.com/vllm-project/compressed-tensors).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from graphfuse.errors import UnsupportedModelError, brief

BLOCK = 128
"""Inputs and outputs that share a scale in the block form, and inputs of an activation's group."""

WEIGHT_SCALES = ("weight_scale_inv", "weight_scale", "qscale_weight")
"""What checkpoints call a weight's scale. All of them multiply what is stored."""

INPUT_SCALES = ("input_scale", "activation_scale", "qscale_act")
MOST_REPEATS = 4
KNOWN = "FP8 (quant_method fp8 or compressed-tensors, weights by blocks of 128 x 128, tensors or channels), and MXFP4"


@dataclass(frozen=True)
class Fp8Scheme:
    """How one weight is stored, and how what it multiplies is rounded."""

    weights: str
    """ "block", "tensor" or "channel"."""

    activations: str
    """ "group" (of BLOCK inputs of a token), "token" or "static" (with a scale of the checkpoint's)."""


@dataclass(frozen=True)
class Quantisation:
    """Which weights of a checkpoint are FP8: those that one of `groups` names, the first, unless they are ignored."""

    groups: tuple[tuple[tuple[str, ...], Fp8Scheme], ...]
    """(patterns, scheme); the pattern "Linear" names every linear."""

    ignored: tuple[str, ...]

    def scheme_of(self, name: str) -> Fp8Scheme | None:
        """Of a linear by its name in the checkpoint, "model.layers.3.mlp.down_proj"; None: it is not quantised."""
        if any(_names(pattern, name) for pattern in self.ignored):
            return None
        for patterns, scheme in self.groups:
            if any(pattern == "Linear" or _names(pattern, name) for pattern in patterns):
                return scheme
        return None

    @property
    def has_blocks(self) -> bool:
        return any(scheme.weights == "block" for _, scheme in self.groups)


def read_quantisation(config: PretrainedConfig) -> Quantisation | None:
    """None for an unquantised checkpoint.

    Raises:
        UnsupportedModelError: it is quantised in a way that is not implemented.
    """
    given = getattr(config, "quantization_config", None)
    if given is None:
        return None
    try:
        return _read(given if isinstance(given, dict) else given.to_dict())
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, UnsupportedModelError):
            raise
        raise _unsupported(f"quantization_config={brief(given)}") from error


def _read(values: dict[str, Any]) -> Quantisation | None:
    method = values.get("quant_method")
    if method == "fp8":
        return _fine_grained(values)
    if method == "mxfp4":  # packed weights are decoded while they are read: the model holds none
        return None
    if method == "compressed-tensors":
        return _compressed_tensors(values)
    raise _unsupported(f"quant_method={brief(method)}")


def _fine_grained(values: dict[str, Any]) -> Quantisation:
    block, activations = values.get("weight_block_size"), values.get("activation_scheme", "dynamic")
    if block is not None and list(block) != [BLOCK, BLOCK]:
        raise _unsupported(f"weight_block_size={brief(block)}")
    if activations not in ("static", "dynamic") or values.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported(f"activation_scheme={brief(activations)}, fmt={brief(values.get('fmt'))}")
    if values.get("expert_dtype", "fp8") != "fp8":
        raise _unsupported(f"expert_dtype={brief(values['expert_dtype'])}")
    if block is not None and activations == "static":
        raise _unsupported("static activations with blocks of weights")
    ignored = values.get("modules_to_not_convert") or values.get("ignored_layers") or ()
    dynamic = "token" if block is None else "group"
    scheme = Fp8Scheme("tensor" if block is None else "block", "static" if activations == "static" else dynamic)
    # Heads and embeddings of this method are never quantised, and not all checkpoints list them.
    return Quantisation(((("Linear",), scheme),), ("lm_head", *_strings("modules_to_not_convert", ignored)))


def _compressed_tensors(values: dict[str, Any]) -> Quantisation:
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _unsupported(f"config_groups={brief(groups)}")
    if values.get("kv_cache_scheme") is not None:
        raise _unsupported("a quantised KV cache (kv_cache_scheme)")
    found = tuple((_strings("targets", group.get("targets")), _scheme(group)) for group in groups.values())
    return Quantisation(found, _strings("ignore", values.get("ignore") or ()))


def _scheme(group: dict[str, Any]) -> Fp8Scheme:
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    for what in (weights, inputs):
        if what.get("num_bits") != 8 or what.get("type") != "float" or not what.get("symmetric", True):
            raise _unsupported(f"weights {brief(weights)} with activations {brief(inputs)}")
    if weights.get("dynamic"):
        raise _unsupported("weights with dynamic scales")
    strategy, by = weights.get("strategy"), inputs.get("strategy")
    if strategy == "block" and list(weights.get("block_structure") or ()) != [BLOCK, BLOCK]:
        raise _unsupported(f"block_structure={brief(weights.get('block_structure'))}")
    dynamic = bool(inputs.get("dynamic"))
    activations = {("tensor", False): "static", ("token", True): "token", ("group", True): "group"}.get(
        (str(by), dynamic)
    )
    if strategy not in ("block", "tensor", "channel") or activations is None:
        raise _unsupported(f"weights by {brief(strategy)} with activations by {brief(by)}, dynamic={dynamic}")
    if activations == "group" and inputs.get("group_size") != BLOCK:
        raise _unsupported(f"activations in groups of {brief(inputs.get('group_size'))}")
    if (strategy == "block") != (activations == "group"):
        raise _unsupported(f"weights by {strategy} with activations by {activations}")
    return Fp8Scheme(strategy, activations)


def _strings(field: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
        raise _unsupported(f"{field}={brief(values)}")
    for value in values:
        if value.startswith("re:"):
            # A checkpoint's expression must not keep the matcher busy for ever.
            if re.search(r"\)[*+{?]", value) or len(re.findall(r"[*+{?]", value)) > MOST_REPEATS:
                raise _unsupported(f"the pattern {brief(value)}, which repeats too much")
            try:
                re.compile(value[3:])
            except re.error as error:
                raise _unsupported(f"the pattern {brief(value)} ({error})") from error
    return tuple(values)


def _names(pattern: str, name: str) -> bool:
    """Whether a pattern is of a module or of one that holds it: a regular expression behind "re:", or a part of its
    path ("lm_head", "mlp.gate", "model.layers.0"). Wrappers have another level before the layers."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    pattern = pattern.replace("language_model.", "")
    return f".{pattern}." in f".{name}."


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The checkpoint is quantised in a way that is not implemented: {what}; known is {KNOWN}. "
        'Use another checkpoint of the model, or implementation="transformers".'
    )
