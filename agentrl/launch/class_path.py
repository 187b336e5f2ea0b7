"""Finds the text by which a run's processes import a class or function that was given in Python.

Guarantees: a class gets the same path in every script that defines it; one that no other process could import is
refused with the reason.
"""

import sys
from types import FunctionType

from agentrl.config.errors import ConfigError


def class_path(made: type | FunctionType, *, in_process: bool) -> str:
    """Returns ``module:name``, or ``file.py:name`` for what a script or a file beside it defines.

    Args:
        made: A class or a function.
        in_process: Whether only this process imports it, as in an evaluation; a notebook's classes will do then.

    Raises:
        ConfigError: It is defined inside another object, or, for other processes, in a notebook or at a prompt.
    """
    name = made.__qualname__
    if "." in name or "<" in name:
        raise ConfigError(f"{name} is defined inside another object: define it at module level")
    file = getattr(sys.modules[made.__module__], "__file__", None) or ""
    in_script = made.__module__ == "__main__"
    if in_process or (not in_script and ("." in made.__module__ or not file.endswith(".py"))):
        return f"{made.__module__}:{name}"
    if not file.endswith(".py"):
        raise ConfigError(
            f"{name} is defined in a notebook or at a prompt, and a training runs in other processes: write it to a "
            f"file, and give its path, such as 'my_env.py:{name}'"
        )
    return f"{file}:{name}"
