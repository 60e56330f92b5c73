"""`FuseConfig`: everything a user can set, each field documented once. CLI and Dynamo backend use the same names."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphfuse.errors import ConfigError, brief

if TYPE_CHECKING:
    from graphfuse.passes.rule import Rule

_CHOICES = {
    "fusion": ("auto", "off", "require"),
    "executor": ("auto", "inductor", "eager"),
    "allreduce": ("auto", "flashinfer", "symm_mem", "reference"),
    "tier": ("faithful", "relaxed"),
}


@dataclass(frozen=True)
class FuseConfig:
    """How a model is rewritten and run. Immutable; derive variants with `dataclasses.replace`."""

    rules: tuple[Rule, ...] | None = None
    """Rules in the order they are tried; `None` means `default_rules()`. Add yours: `default_rules() + [my_rule]`."""

    disabled_rules: frozenset[str] = frozenset()
    """Names of rules to leave out. An unknown name is an error that lists the known ones."""

    fusion: str = "auto"
    """"auto" fuses what the gate allows, "off" rewrites nothing, "require" raises `FusionRequiredError` when a
    reduction that meets the residual stream is declined."""

    executor: str = "auto"
    """Who runs the rewritten graph: "inductor", "eager" (interpreted), or "auto": Inductor on GPUs, else eager."""

    allreduce: str = "auto"
    """The comm backend of the fused ops: "auto" follows the size table of this kind of host; "symm_mem" (graphfuse's
    own kernels), "flashinfer" (up to 32 MiB) or "reference" force one, and raise `BackendUnavailableError` where it
    cannot run."""

    tier: str = "faithful"
    """"faithful" keeps to rules whose error is no larger than the model's own; "relaxed" also allows the others."""

    verify: bool = True
    """Check after rewriting that each partial sum of the traced graph is still reduced exactly once."""

    watch: bool = True
    """Notice when another rank of the group is gone or has failed while this one waits for it: it raises `GroupError`,
    or ends the process where it is stuck (docs/reliability.md). Takes a thread."""

    verify_placements: bool | None = None
    """Follow every value over the ranks, before and after rewriting, and raise `ReductionProofError` where a partial
    sum is not reduced exactly once. None: in `graphfuse explain` and `graphfuse.testing`, not in `compile`."""

    moe_config_dir: str | None = None
    """A folder of tuned MoE kernel configs that is searched before the shipped ones."""

    dump: str | None = None
    """A folder for numbered before/after graphs. The environment variable GRAPHFUSE_DUMP is used when this is unset."""

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            value = getattr(self, field)
            if not isinstance(value, str) or value not in choices:
                raise ConfigError(f"{field}={brief(value)} is not known. Use one of {', '.join(map(repr, choices))}.")
        for field in ("verify", "watch"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(f"{field}={brief(getattr(self, field))} is not a boolean. Pass True or False.")
        if self.verify_placements not in (None, True, False):
            raise ConfigError(f"verify_placements={self.verify_placements!r} is not known. Pass True, False or None.")
        self._check_rules()
        self._check_folders()

    def _check_rules(self) -> None:
        """Rules and names of rules, whatever collections they came in, are a tuple and a frozenset afterwards."""
        if isinstance(self.disabled_rules, str):
            raise ConfigError(
                f"disabled_rules={brief(self.disabled_rules)} is a string. Pass a set of names: "
                f"{{{brief(self.disabled_rules)}}}."
            )
        if not isinstance(self.disabled_rules, Collection) or not all(isinstance(n, str) for n in self.disabled_rules):
            raise ConfigError(
                f"disabled_rules={brief(self.disabled_rules)} is no set of names. Pass a set of strings, "
                "such as {'all_reduce_rms_norm'}."
            )
        object.__setattr__(self, "disabled_rules", frozenset(self.disabled_rules))
        if self.rules is None:
            return
        if not isinstance(self.rules, Iterable) or isinstance(self.rules, str):
            raise ConfigError(
                f"rules={brief(self.rules)} is no list of rules. Pass Rule objects: default_rules() + [mine]."
            )
        from graphfuse.passes.rule import Rule  # imports torch: not for a config without rules of its own

        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise ConfigError(
                    f"rules holds {brief(rule)}, which is no Rule. Pass Rule objects: default_rules() + [mine]."
                )

    def _check_folders(self) -> None:
        for field in ("moe_config_dir", "dump"):
            value = getattr(self, field)
            if value is not None and not isinstance(value, str | os.PathLike):
                raise ConfigError(f"{field}={brief(value)} is no path. Pass a folder's path, or None.")
        if self.moe_config_dir is not None and not os.path.isdir(self.moe_config_dir):
            raise ConfigError(
                f"moe_config_dir={brief(self.moe_config_dir)} is not a folder. Give an existing one or None."
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> FuseConfig:
        """A config from a mapping, as `torch.compile(options=...)` passes it. Unknown keys raise `ConfigError`."""
        if not isinstance(options, Mapping):
            raise ConfigError(f"options={brief(options)} is no mapping. Pass a dictionary of FuseConfig's fields.")
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(
            key if isinstance(key, str) and key.isidentifier() and len(key) < 40 else brief(key)
            for key in options
            if key not in known
        )
        if unknown:
            raise ConfigError(
                f"Unknown option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}. "
                f"Known ones: {', '.join(sorted(known))}."
            )
        return cls(**options)
