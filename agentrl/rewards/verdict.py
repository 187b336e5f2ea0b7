"""Defines verdicts, and runs verifiers.

Guarantees: a value is a finite float, or missing with a reason; missing is never 0. Any other return value of a
verifier raises an error that names the verifier and its place in the source. A verifier that blocks runs in a thread
or a process, not on the event loop; at its time limit the thread is abandoned or the process killed.

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
"""A finite float, or ``None`` if it is missing for a reason unrelated to the answer's quality."""

Verifier = Callable[..., Any]
"""``(answer, reference) -> Reward | Verdict``, sync or async."""

Runs = Literal["auto", "inline", "thread", "process"]
"""Place where a verifier runs; ``auto`` is the event loop for an async one, else a thread."""


class MissingReason(StrEnum):
    """Why a reward is missing."""

    TIMEOUT = "timeout"  # the verifier took too long
    CRASHED = "crashed"  # the verifier's process died, or the verifier failed
    SANDBOX = "sandbox"  # the sandbox, not the code in it, failed
    API_ERROR = "api_error"  # the judge's server failed
    UNPARSABLE_VERDICT = "unparsable_verdict"  # the judge's reply has no score on the scale
    UNSAID = "unsaid"  # the verifier returned None and gave no reason


@dataclass(frozen=True)
class Verdict:
    """A reward, or the reason why it is missing, with metrics and an explanation.

    Attributes:
        value: The reward; ``None`` if it is missing.
        reason: Why the reward is missing; ``None`` if and only if there is a value.
        metrics: Numbers to log in addition to the reward.
        detail: Explanation for logs.
    """

    value: Reward
    reason: MissingReason | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    detail: str = ""

    def __post_init__(self) -> None:
        """Require exactly one of value and reason, and a finite value."""
        if (self.value is None) is (self.reason is None):
            raise ValueError(f"Verdict(value={self.value!r}, reason={self.reason!r}): want exactly one of the two")
        if self.value is not None:
            finite(self.value, "Verdict")

    @classmethod
    def missing(cls, reason: MissingReason, detail: str = "", metrics: dict[str, float] | None = None) -> "Verdict":
        """Returns a verdict without a reward."""
        return cls(None, reason, metrics or {}, detail)


def as_verdict(returned: Any, verifier: Verifier) -> Verdict:
    """Converts the return value of ``verifier`` to a verdict.

    Raises:
        TypeError: The value or a metric is not a number.
        ValueError: The value or a metric is not finite.
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
    """Run a verifier in the right place, within a time limit.

    Args:
        verifier: Callable ``(answer, reference)``, see the module.
        answer: The model's answer.
        reference: Reference that the verifier compares with.
        runs: Place where the verifier runs: event loop, thread or process.
        timeout: Time limit in seconds; the default of 60 suits a judge model or a test suite.

    Returns:
        The verifier's verdict; missing if it took too long or its process died.

    Raises:
        TypeError: The verifier returned something that is not a reward.
        ValueError: The verifier returned a number that is not finite.
        Exception: The verifier raised it.
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
            raise  # raised by the verifier itself
        raise WorkerTimeoutError(f"{source_of(verifier)} took over {timeout:g} s") from error


def is_async(verifier: Verifier) -> bool:
    """Whether the verifier is defined with ``async def``, so that calling it returns an awaitable."""
    while isinstance(verifier, functools.partial):
        verifier = verifier.func
    return inspect.iscoroutinefunction(verifier) or inspect.iscoroutinefunction(type(verifier).__call__)
