"""Answers that are JSON of a given shape.

Guarantees: any answer gives 1.0 or 0.0, never an error; a schema that is wrong is an error when the verifier is made;
nothing is fetched, whatever ``$ref`` a schema has. The answer is JSON as it stands, or has one fenced block that is
JSON, with any text around the block. JSON is strict: a key given twice or ``NaN`` make an answer wrong.
"""

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

_FENCED = re.compile(r"^```[ \t]*(?:json)?[ \t]*\n(.*?)\n?^```[ \t]*$", re.DOTALL | re.MULTILINE | re.IGNORECASE)


class JsonSchemaVerifier:
    """Whether an answer is JSON that is valid under a schema.

    Args:
        schema: A JSON schema; its ``$schema`` says which draft, the newest where it says none.

    Raises:
        ValueError: It is no schema.
        ImportError: ``jsonschema`` is not installed.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        if find_spec("jsonschema") is None:
            raise ImportError("JsonSchemaVerifier needs jsonschema: pip install 'agentrl[rewards]'")
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry

        kind = validator_for(schema)
        try:
            kind.check_schema(dict(schema))
        except SchemaError as error:
            raise ValueError(f"no JSON schema, at {error.json_path}: {error.message}") from error
        self._validator = kind(
            dict(schema), registry=Registry()
        )  # without a registry of ours, a remote $ref is fetched

    def __call__(self, answer: str, reference: Any = None) -> float:
        """1.0 where the answer is valid, else 0.0; the reference is not read.

        Raises:
            ValueError: The schema has a ``$ref`` to nowhere.
        """
        from referencing.exceptions import Unresolvable

        try:
            value = parse_json(answer)
            return float(self._validator.is_valid(value))
        except Unresolvable as error:
            raise ValueError(f"the schema's $ref cannot be resolved: {error}") from error
        except (ValueError, RecursionError, OverflowError):  # not JSON; nested too deep; beyond a float in multipleOf
            return 0.0


def parse_json(answer: str) -> Any:
    """The JSON that an answer is, or that its only fenced block holds.

    Raises:
        ValueError: It is not JSON, has a key twice or a number that JSON does not know, or more than one block.
        RecursionError: It is nested too deep.
    """
    blocks = _FENCED.findall(answer)
    if len(blocks) > 1:
        raise ValueError(f"{len(blocks)} fenced blocks, want one")
    return json.loads(blocks[0] if blocks else answer, object_pairs_hook=_unique, parse_constant=_refuse)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("a key is given twice")
    return keys


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
