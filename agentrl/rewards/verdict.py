"""Verdicts of verifiers, and the function that runs any verifier.

Guarantees: a value is a finite float or missing, and what is missing says why; missing is never 0. What a verifier
returns is checked: anything else is an error that names the verifier and where it stands in the source. A verifier
that blocks runs in a thread or a process, never on the event loop, and is given up or killed when its time is over.

A verifier is a callable ``(answer, reference)`` that returns a :data:`Reward`, a :class:`Verdict`, or an awaitable of
either.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from agentrl.core.contract import finite, source_of
from agentrl.host.worker_errors import WorkerCrashedError, WorkerTimeoutError
from agentrl.host.worker_pool import in_thread, shared_pool

Reward = float | None
"""A finite float, or ``None``: missing, for a reason that has nothing to do with the answer's quality."""

Verifier = Callable[..., Any]
"""``(answer, reference) -> Reward | Verdict``, sync or async."""

Runs = Literal["auto", "inline", "thread", "process"]
"""Place where a verifier runs; ``auto`` is the event loop for an async one, else a thread."""


class MissingReason(StrEnum):
    """Why a reward is missing."""

    TIMEOUT = "timeout"  # the verifier took too long
    CRASHED = "crashed"  # the verifier's process died, or it could not tell
    SANDBOX = "sandbox"  # the sandbox, not the code in it, failed
    API_ERROR = "api_error"  # the judge's server failed
    UNPARSABLE_VERDICT = "unparsable_verdict"  # the judge said nothing that is a score on the scale
    UNSAID = "unsaid"  # the verifier returned None and gave no reason


@dataclass(frozen=True)
class Verdict:
    """A reward with what belongs to it.

    Attributes:
        value: The reward; ``None`` is missing.
        reason: Why it is missing; ``None`` exactly where there is a value.
        metrics: Numbers to log apart from the reward.
        detail: Explanation for logs.
    """

    value: Reward
    reason: MissingReason | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    detail: str = ""

    def __post_init__(self) -> None:
        """Refuse what is neither a value nor a reason."""
        if (self.value is None) is (self.reason is None):
            raise ValueError(f"Verdict(value={self.value!r}, reason={self.reason!r}): want exactly one of the two")
        if self.value is not None:
            finite(self.value, "Verdict")

    @classmethod
    def missing(cls, reason: MissingReason, detail: str = "", metrics: dict[str, float] | None = None) -> "Verdict":
        """A reward that is not there."""
        return cls(None, reason, metrics or {}, detail)


def as_verdict(returned: Any, verifier: Verifier) -> Verdict:
    """Checks the value that ``verifier`` returned.

    Raises:
        TypeError: It is no number, nor is a metric one.
        ValueError: It is not finite, or a metric is not.
    """
    source = source_of(verifier)
    if returned is None:
        return Verdict.missing(MissingReason.UNSAID, f"{source} returned None")
    if not isinstance(returned, Verdict):
        return Verdict(finite(returned, source))
    for name, number in returned.metrics.items():
        finite(number, source, f"metric {name}")
    return returned


async def judge_answer(
    verifier: Verifier, answer: str, reference: Any, *, runs: Runs = "auto", timeout: float = 60.0
) -> Verdict:
    """Run a verifier where it may.

    Args:
        verifier: See the module.
        answer: The model's answer.
        reference: Reference that the verifier compares with.
        runs: Place where the verifier runs: event loop, thread or process.
        timeout: Seconds it may take; the 60 s of the default suit a judge's model or a test suite.

    Returns:
        Its verdict; missing where it took too long or its process died.

    Raises:
        TypeError: It returned something that is no reward.
        ValueError: It returned a number that is not finite.
        Exception: Whatever it raised.
    """
    try:
        returned = await _run(verifier, answer, reference, runs, timeout)
    except WorkerTimeoutError as error:
        return Verdict.missing(MissingReason.TIMEOUT, str(error))
    except WorkerCrashedError as error:
        return Verdict.missing(MissingReason.CRASHED, str(error))
    return as_verdict(returned, verifier)


async def _run(verifier: Verifier, answer: str, reference: Any, runs: Runs, timeout: float) -> Any:
    on_loop = runs == "inline" or (runs == "auto" and is_async(verifier))
    if runs == "process":
        return await shared_pool().run(verifier, answer, reference, timeout=timeout)
    returned = verifier(answer, reference) if on_loop else await in_thread(verifier, answer, reference, timeout=timeout)
    if not inspect.isawaitable(returned):
        return returned
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            return await returned
    except TimeoutError as error:
        if not limit.expired():
            raise  # the verifier's own
        raise WorkerTimeoutError(f"{source_of(verifier)} took over {timeout:g} s") from error


def is_async(verifier: Verifier) -> bool:
    """Whether calling it gives an awaitable, as far as its definition says."""
    while isinstance(verifier, functools.partial):
        verifier = verifier.func
    return inspect.iscoroutinefunction(verifier) or inspect.iscoroutinefunction(type(verifier).__call__)
