"""`FuseConfig`: a setting of a wrong type is refused where it is written, with what to pass instead."""

from __future__ import annotations

import pytest

from graphfuse import FuseConfig, backend, default_rules
from graphfuse.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fusion": []}, r"fusion=\[\] is not known\. Use one of 'auto'"),
        ({"verify": "no"}, r"verify='no' is not a boolean\. Pass True or False"),
        ({"rules": 5}, r"rules=5 is no list of rules\. Pass Rule objects"),
        ({"rules": "name"}, r"rules='name' is no list of rules\. Pass Rule objects"),
        ({"rules": ["name"]}, r"rules holds 'name', which is no Rule\. Pass Rule objects"),
        ({"disabled_rules": 5}, r"disabled_rules=5 is no set of names\. Pass a set of strings"),
        ({"disabled_rules": {5}}, r"disabled_rules=\{5\} is no set of names\. Pass a set of strings"),
        ({"disabled_rules": "name"}, r"disabled_rules='name' is a string\. Pass a set of names: \{'name'\}"),
        ({"dump": 5}, r"dump=5 is no path\. Pass a folder's path, or None"),
        ({"moe_config_dir": 5}, r"moe_config_dir=5 is no path\. Pass a folder's path, or None"),
        ({"moe_config_dir": "x" * 5000}, r"moe_config_dir='x+… is not a folder"),
        ({"moe_config_dir": "a\0b"}, r"moe_config_dir='a\\x00b' is not a folder"),
        ({"tier": 10**5000}, r"tier=a int is not known\. Use one of 'faithful'"),
        ({"moe_config_dir": "/nowhere"}, r"moe_config_dir='/nowhere' is not a folder"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_of_a_wrong_type_is_refused_with_what_to_pass(settings, message):
    with pytest.raises(ConfigError, match=message):
        FuseConfig(**settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (None, r"options=None is no mapping\. Pass a dictionary"),
        ([("fusion", "auto")], r"options=\[\('fusion', 'auto'\)\] is no mapping"),
        ({1: 2, "fusio": 3, None: 4}, r"Unknown options 1, None, fusio\. Known ones: .*fusion"),
        ({"x" * 5000: 1}, r"Unknown option 'x+…\. Known"),
        ({"\x1b[31m": 1}, r"Unknown option '\\x1b\[31m'\. Known"),
    ],
    ids=["none", "pairs", "mixed", "long", "escape"],
)
def test_options_that_are_none_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        FuseConfig.from_options(options)


@pytest.mark.parametrize("text", ["", "-1", "²", "٣", "1e3", "1_0", "9" * 5000])
def test_a_fuel_that_is_no_number_of_rewrites_is_an_error(text, monkeypatch):
    monkeypatch.setenv("GRAPHFUSE_FUEL", text)
    with pytest.raises(ConfigError, match="is not a number of rewrites"):
        backend._fuel()


def test_collections_and_paths_of_any_kind_are_taken(tmp_path):
    rules = default_rules()
    config = FuseConfig(rules=iter(rules), disabled_rules=["a", "a"], dump=tmp_path, moe_config_dir=tmp_path)
    assert config.rules == tuple(rules)
    assert config.disabled_rules == frozenset({"a"})
