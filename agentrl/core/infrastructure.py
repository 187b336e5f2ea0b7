"""Tells failures of the infrastructure from faults of code and from what the policy did.

Guarantees: an exception is a failure of the infrastructure only if it says so itself (:class:`InfrastructureError`, or
a true attribute ``infrastructure``), or is one of a few kinds that code and policy do not cause: a connection that
broke or was refused, a machine without memory, disk or file handles, a pool of processes that broke. An exception that
was raised ``from`` one of these is one too. A call that took too long is none: the policy may have asked for it.
"""

import errno
from concurrent.futures import BrokenExecutor

EXHAUSTED = frozenset(
    {
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT),
        *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN),
    }
)
"""Numbers of operating system errors that tell of a machine or a network, not of a program."""


class InfrastructureError(RuntimeError):
    """Failure of the machinery below an environment, a tool or a reward: its sandbox, its host, its database.

    Raise it where code cannot go on and another attempt could: the episode counts as failed by the infrastructure, and
    is tried again (``rollout.on_failure=retry``). A tool that raises it ends the episode, and the policy is not told.
    """

    infrastructure = True


def infrastructure_failure(error: BaseException | None) -> BaseException | None:
    """Finds the failure of the infrastructure behind an exception; ``None`` if there is none.

    Args:
        error: An exception that user code let through.
    """
    for _ in range(100):  # a chain may be a circle
        if isinstance(error, BaseExceptionGroup):
            return next((found for one in error.exceptions if (found := infrastructure_failure(one))), None)
        if error is None:
            return None
        if getattr(error, "infrastructure", False) is True or isinstance(error, ConnectionError | BrokenExecutor):
            return error
        if isinstance(error, OSError) and error.errno in EXHAUSTED:
            return error
        error = error.__cause__
    return None
