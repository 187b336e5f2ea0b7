"""``agentrl.make``: makes an environment by its id or path.

Guarantees: the environment's ``spec`` holds its id and arguments; wrong arguments raise an error that names them.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agentrl.core.environment import Environment
from agentrl.core.registry import Spec, load, spec_of


def make(id: str, **kwargs: Any) -> Environment[Any, Any]:
    """Make an environment.

    Args:
        id: Registered id (``GSM8K-v0``, or ``gsm8k`` for its newest version), path (``envs/mine.py:Mine``), or the
            name of a file in ``./envs``.
        kwargs: Arguments of the environment; they override the registered ones.

    Raises:
        LookupError: There is no such environment; the message suggests the nearest name.
        TypeError: The environment does not take these arguments, or the object is not an environment.
    """
    spec = spec_of("env", id)
    return construct(load("env", id), Spec(spec.id, spec.entry_point, spec.kwargs | kwargs))


def construct(made: Any, spec: Spec) -> Environment[Any, Any]:
    """Call an environment class, or a function that makes an environment, with a spec's arguments."""
    try:
        env = made(**spec.kwargs)
    except TypeError as error:
        raise TypeError(f"environment {spec.id} with arguments {spec.kwargs}: {error}") from error
    if not isinstance(env, Environment):
        raise TypeError(f"{spec.entry_point} made a {type(env).__name__}, which is no agentrl.Environment")
    env.spec = spec
    return env


def discard(env: Environment[Any, Any]) -> None:
    """Close an environment that was made only as a test; works inside a running event loop too."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, env.close()).result()
