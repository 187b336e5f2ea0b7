"""Verifies that an answer is JSON that is valid under a schema.

Guarantees: any answer gives 1.0 or 0.0, never an error; an invalid schema raises when the verifier is made; no ``$ref``
of a schema is fetched from the network. The whole answer is JSON, or it has exactly one fenced block with JSON and any
text around it. JSON is strict: a duplicate key or ``NaN`` makes an answer wrong.
"""

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from agentrl.core.extras import install_hint

_FENCED = re.compile(r"^```[ \t]*(?:json)?[ \t]*\n(.*?)\n?^```[ \t]*$", re.DOTALL | re.MULTILINE | re.IGNORECASE)


class JsonSchemaVerifier:
    """Verifier ``(answer, reference)``: 1.0 if the answer is JSON that is valid under a schema, else 0.0.

    Args:
        schema: A JSON schema; ``$schema`` names its draft, the newest by default.

    Raises:
        ValueError: ``schema`` is not a valid JSON schema.
        ImportError: ``jsonschema`` is not installed.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        if find_spec("jsonschema") is None:
            raise ImportError(f"JsonSchemaVerifier needs jsonschema, which every install brings: {install_hint()}")
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
        """Returns 1.0 if the answer is valid, else 0.0; the reference is not read.

        Raises:
            ValueError: The schema has a ``$ref`` that cannot be resolved.
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
    """Parses an answer's only fenced block as strict JSON, or the whole answer if it has no such block.

    Raises:
        ValueError: The text is not JSON, has a duplicate key, ``NaN`` or infinity, or there are several blocks.
        RecursionError: The JSON is nested too deep.
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
