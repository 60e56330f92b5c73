"""`FuseConfig`: a setting of a wrong type is refused where it is written, with what to pass instead."""

from __future__ import annotations

import pytest

from graphfuse import FuseConfig, default_rules
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
        ({"moe_config_dir": "/nowhere"}, r"moe_config_dir='/nowhere' is not a folder"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_of_a_wrong_type_is_refused_with_what_to_pass(settings, message):
    with pytest.raises(ConfigError, match=message):
        FuseConfig(**settings)


def test_collections_and_paths_of_any_kind_are_taken(tmp_path):
    rules = default_rules()
    config = FuseConfig(rules=iter(rules), disabled_rules=["a", "a"], dump=tmp_path, moe_config_dir=tmp_path)
    assert config.rules == tuple(rules)
    assert config.disabled_rules == frozenset({"a"})
