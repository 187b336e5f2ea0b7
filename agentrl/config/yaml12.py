"""Reads and writes YAML 1.2, in which ``1e-5`` is a number, ``on`` is text and ``010`` is ten.

Guarantees: the same rules hold in files and on the command line; :func:`read_yaml` reads back what :func:`write_yaml`
writes; dates stay text, so that a recipe is JSON data; a repeated key is an error.
"""

import io
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from agentrl.config.errors import ConfigError


class _Constructor(SafeConstructor):
    """Reads dates as text."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def read_yaml(text: str, source: str) -> Any:
    """Parses YAML text into plain Python data.

    Args:
        text: YAML.
        source: Name of the file or key that the text comes from, for the error message.

    Raises:
        ConfigError: The text is not YAML, or a key is repeated; the message has the line and column.
    """
    try:
        return _yaml().load(text)
    except (YAMLError, ValueError) as error:  # ValueError: the library parses -_ as a number
        if isinstance(error, MarkedYAMLError):
            error.note = None  # drops the library's advice to turn off its check
        raise ConfigError(f"{source} is not valid YAML: {str(error).strip()}") from error


def write_yaml(value: Any) -> str:
    """Writes plain Python data as YAML on one line."""
    out = io.StringIO()
    _yaml().dump(value, out)
    return out.getvalue().removesuffix("\n").removesuffix("\n...")


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)  # the C library follows YAML 1.1
    yaml.Constructor = _Constructor
    yaml.default_flow_style = True
    yaml.width = 1_000_000
    yaml.allow_unicode = True
    yaml.sort_base_mapping_type_on_output = False  # pyright: ignore[reportAttributeAccessIssue]
    return yaml
