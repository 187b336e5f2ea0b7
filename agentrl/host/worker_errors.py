"""Errors of calls in worker threads and processes.

Guarantees: each error names the function that was called; this module imports only the standard library.
"""

import math
import signal
from collections.abc import Callable
from typing import Any


class WorkerTimeoutError(TimeoutError):
    """The call exceeded its time limit."""


class WorkerCrashedError(RuntimeError):
    """The worker process ended in the middle of the call.

    Attributes:
        exit_code: Exit status of the process; minus the signal number after a signal, ``None`` if unknown.
        infrastructure: Marks it for :func:`~agentrl.core.infrastructure.infrastructure_failure`.
    """

    infrastructure = True

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class WorkerCallError(RuntimeError):
    """The function raised an error that cannot be sent between processes; the message has its traceback."""


class WorkerPoolClosedError(RuntimeError):
    """The pool was closed before or during the call."""


def function_name(function: Callable[..., Any] | str) -> str:
    """``module:name`` of a function, for messages."""
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', None) or type(function).__module__}:{name}"


def checked_timeout(timeout: float) -> float:
    """Returns ``timeout`` if it is a positive finite number.

    Raises:
        ValueError: ``timeout`` is not a positive finite number.
    """
    if not (math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout={timeout!r} must be a finite number of seconds above 0")
    return timeout


def exit_text(code: int | None) -> str:
    """Describes an exit status in words; a negative status is a signal."""
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"
    return f"exit status {code}"
