import re

import pytest

from agentrl.config.errors import ConfigError
from agentrl.config.overrides import merge, parse_override, set_key
from agentrl.config.yaml12 import read_yaml, write_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("2.0e-5", 2e-5),
        ("3", 3),
        ("010", 10),
        ("0x1F", 31),
        ("-.5", -0.5),
        ("true", True),
        ("null", None),
        ("", None),
        ("on", "on"),
        ("no", "no"),
        ("2024-01-01", "2024-01-01"),
        ("[a, 1]", ["a", 1]),
        ("{a: 1}", {"a": 1}),
        ("'5'", "5"),
    ],
)
def test_values_are_read_as_yaml_1_2(text, value):
    found = read_yaml(text, "test")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "value", ["1e5", "true", "null", "on", "10", 1e-6, ["x", "1"], {"a": None}, "2024-01-01", "a: b", "-_", "0o7", "\t"]
)
def test_what_is_written_reads_back(value):
    assert read_yaml(write_yaml(value), "test") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", r'duplicate key "a"[^"]*"3"[^"]*"1"[^"]*"<unicode string>", line 3, column 1'),
        ("a: {b: 1, 'b': 2}", r'duplicate key "b"[\s\S]*line 1, column 11'),
        ("a:\n  b: [1", r"expected ',' or '\]'[\s\S]*line 2, column 8"),
        ("{[1]: {}, {a: 1}: 2}", "unhashable key"),
        ("-_", "invalid literal"),
    ],
)
def test_what_is_no_yaml_is_refused_with_its_place(text, message):
    with pytest.raises(ConfigError, match=r"file\.yaml is not valid YAML") as caught:
        read_yaml(text, "file.yaml")
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "suppress" not in str(caught.value)


def test_an_override_splits_at_the_first_equals():
    assert parse_override("env.kwargs.text=a=b") == ("env.kwargs.text", "a=b")


def test_text_fields_take_numbers_as_text():
    assert parse_override("name=007") == ("name", "007")
    assert parse_override("train_dataset.path=null") == ("train_dataset.path", None)


def test_a_value_that_is_not_yaml_names_its_key():
    with pytest.raises(ConfigError, match="the value of seed is not valid YAML"):
        parse_override("seed=[1")


def test_merging_goes_into_mappings_and_leaves_its_inputs():
    base = {"a": {"x": 1, "y": [1]}, "b": 1}
    assert merge(base, {"a": {"y": [2]}, "c": 3}) == {"a": {"x": 1, "y": [2]}, "b": 1, "c": 3}
    assert base == {"a": {"x": 1, "y": [1]}, "b": 1}


def test_setting_a_key_replaces_what_it_held():
    assert set_key({"a": {"b": {"old": 1}}}, "a.b", {"new": 2}) == {"a": {"b": {"new": 2}}}
