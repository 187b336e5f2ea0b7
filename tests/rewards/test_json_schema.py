import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rewards.json_schema import JsonSchemaVerifier

pytest.importorskip("jsonschema")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
TREE = {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ('{"name": "Ann", "age": 3}', 1.0),
        ('\n{"name": "Ann"}\n', 1.0),
        ('```json\n{"name": "Ann"}\n```', 1.0),
        ('Here it is:\n```\n{"name": "Ann"}\n```\nDone.', 1.0),
        ('{"name": "Ann", "age": -1}', 0.0),
        ('{"age": 1}', 0.0),
        ('{"name": "Ann", "extra": 1}', 0.0),
        ('{"name": "Ann", "name": "Bob"}', 0.0),
        ('{"name": "Ann", "age": NaN}', 0.0),
        ('Here: {"name": "Ann"}', 0.0),
        ('```json\n{"name": "Ann"}\n```\n```json\n{"name": "Bob"}\n```', 0.0),
        ("[" * 100_000, 0.0),
        ("9" * 5_000, 0.0),
        ("", 0.0),
    ],
)
def test_answers(answer, reward):
    assert JsonSchemaVerifier(PERSON)(answer) == reward


def test_nesting_deeper_than_the_stack_is_wrong_not_an_error():
    assert JsonSchemaVerifier(TREE)("[[]]") == 1.0
    assert JsonSchemaVerifier(TREE)("[" * 900 + "]" * 900) == 0.0


def test_a_wrong_schema_is_an_error_when_the_verifier_is_made():
    with pytest.raises(ValueError, match=r"no JSON schema, at \$\.type"):
        JsonSchemaVerifier({"type": "person"})


def test_nothing_is_fetched():
    verifier = JsonSchemaVerifier({"$ref": "http://127.0.0.1:9/schema.json"})
    with pytest.raises(ValueError, match=r"\$ref"):
        verifier("1")


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("agentrl.rewards.json_schema.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs jsonschema.*pip install -e '\.'"):
        JsonSchemaVerifier(PERSON)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)


@settings(deadline=None)
@given(st.text() | json_values.map(json.dumps))
def test_no_answer_is_an_error(answer):
    for schema in (PERSON, TREE, {"multipleOf": 0.01}, {"type": "integer", "maximum": 1e300}):
        assert JsonSchemaVerifier(schema)(answer) in (0.0, 1.0)
