"""``agentrl.make``: makes an environment by its id or path.

Guarantees: the environment's ``spec`` holds its id and arguments; wrong arguments raise an error that names them.
"""

import asyncio
from typing import Any

from agentrl.core.contract import where
from agentrl.core.environment import Environment
from agentrl.core.registry import Spec, load, spec_of
from agentrl.host.worker_threads import DaemonThreads

CLOSE_SECONDS = 30.0  # for the `close` of an environment that nothing was done with


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
    """Close an environment that was made only as a test; works inside a running event loop too.

    Raises:
        TimeoutError: Its ``close`` does not end.
    """
    threads = DaemonThreads(1, "agentrl-close")
    closing = threads.submit(lambda: asyncio.run(env.close()))  # type: ignore[arg-type]
    try:
        closing.result(CLOSE_SECONDS)
    except TimeoutError:
        if closing.done():
            raise  # raised by `close` itself
        raise TimeoutError(
            f"{where(env, 'close')} of an environment that was only made did not end within {CLOSE_SECONDS:g} s"
        ) from None
    finally:
        threads.close()
