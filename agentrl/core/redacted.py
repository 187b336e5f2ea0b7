"""Takes secrets out of what is shown or kept: settings, command lines, texts.

Guarantees: pure but for the environment's variables; the value of a key that names a secret, a password in a URL, what
follows ``Bearer``, and the value of any environment variable with such a name are replaced by :data:`HIDDEN`, wherever
in a text they stand. Names of variables (``api_key_env``), counts of tokens
(``max_new_tokens``) and special tokens (``eos_token``) are no secrets.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "[redacted]"
LEAST = 8  # characters of a variable's value that is looked for in texts: shorter ones stand anywhere by chance
_NAMES = re.compile(
    r"(?:^|[_.\-])(?:api[_-]?key|access[_-]?key|secret|password|passwd|credentials?|auth|token|private[_-]?key)$",
    re.IGNORECASE,
)
_SPECIAL = re.compile(
    r"(?:bos|eos|pad|unk|sep|cls|mask|stop|end|start|begin|special|image|first|last|next)[_-]token$", re.IGNORECASE
)
_URL = re.compile(r"(?P<begin>[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
_BEARER = re.compile(r"(?P<begin>bearer\s+)\S+", re.IGNORECASE)
_ASSIGNED = re.compile(r"(?P<name>[\w.\-]+)(?P<sign>[=:]\s*)(?P<value>[^\s,;&\"']+)")


def names_secret(name: str) -> bool:
    """Whether a key's name says that its value is a secret."""
    return _NAMES.search(name.lstrip("-")) is not None and _SPECIAL.search(name) is None


def redacted_text(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Returns a text without secrets.

    Args:
        text: Any text.
        environment: Variables whose values may stand in it; by default the process's own.
    """
    variables = os.environ if environment is None else environment
    secrets = {value for name, value in variables.items() if names_secret(name) and len(value) >= LEAST}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _BEARER.sub(rf"\g<begin>{HIDDEN}", _URL.sub(rf"\g<begin>{HIDDEN}@", text))
    return _ASSIGNED.sub(lambda found: _assigned(found), text)


def _assigned(found: re.Match[str]) -> str:
    return f"{found['name']}{found['sign']}{HIDDEN}" if names_secret(found["name"]) else found[0]


def redacted(data: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Returns plain data without secrets: a copy with the same keys."""
    if isinstance(data, str):
        return redacted_text(data, environment)
    if isinstance(data, Mapping):
        return {
            key: HIDDEN if value and names_secret(str(key)) and isinstance(value, str) else redacted(value, environment)
            for key, value in data.items()
        }
    if isinstance(data, Sequence) and not isinstance(data, bytes | bytearray):
        return [redacted(value, environment) for value in data]
    return data


def redacted_command(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """Returns a command line without secrets, also where a value stands behind its option."""
    found, hide = [], False
    for argument in arguments:
        found.append(HIDDEN if hide else redacted_text(argument, environment))
        hide = argument.startswith("-") and "=" not in argument and names_secret(argument)
    return found
