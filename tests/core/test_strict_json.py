import pytest

from agentrl.core.strict_json import strict_json


def test_json_is_read_as_json():
    assert strict_json('{"a": [1, {"b": null}], "c": {"b": 1.5}}') == {"a": [1, {"b": None}], "c": {"b": 1.5}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 1}', "'a' is given twice"),
        ('[{"a": {"b\\n": 1, "b\\n": 2}}]', r"'b\\n' is given twice"),
        ('{"' + "x" * 500 + '": 1, "' + "x" * 500 + '": 2}', r"^'x{60}\.\.\.' is given twice$"),
        ("NaN", "NaN is no JSON number"),
        ('{"a": -Infinity}', "-Infinity is no JSON number"),
        ("{", "Expecting"),
    ],
)
def test_what_json_leaves_open_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        strict_json(text)
