r"""Compares mathematical answers with ``math-verify``: ``1/2`` equals ``0.5``; sets, intervals and units are known.

Guarantees: 1.0 or 0.0 is math-verify's result; if it took too long, ran out of memory, crashed or failed, the reward is
missing with the reason, never 0; an answer that cannot be parsed gives 0.0, such a reference raises. It works
in any thread and on any event loop, and never blocks one: expressions are parsed and compared in worker processes, and
an expression like ``9^9^9^9`` ends only its own process.

The answer is taken from the last ``\boxed{...}``, else from the other mathematics of the text, the last first.
"""

from importlib.util import find_spec

from agentrl.core.extras import install_hint
from agentrl.host.worker_pool import WorkerCrashedError, WorkerPool, WorkerTimeoutError, shared_pool
from agentrl.rewards.verdict import MissingReason, Reward, Verdict

TIMEOUT = 10.0  # seconds: math-verify's own defaults, 5 for parsing and 5 for comparing
CHECK = "agentrl.rewards.math_check:check"  # passed by name, so that only the worker imports sympy


async def math_verdict(
    answer: str, reference: str | float, *, timeout: float = TIMEOUT, pool: WorkerPool | None = None
) -> Verdict:
    r"""Judges whether the answer equals the reference.

    Args:
        answer: The whole answer.
        reference: The right answer: a number, or text in LaTeX or plain, with or without ``$`` or ``\boxed``, or ending
            in ``#### ...``.
        timeout: Seconds for parsing and comparing; starting a worker and importing sympy do not count.
        pool: Worker pool for the comparison; by default the process's own, whose workers may hold 4 GiB each.

    Returns:
        1.0 or 0.0, or missing, with reason ``timeout`` or ``crashed``.

    Raises:
        ValueError: ``reference`` cannot be parsed as mathematics.
        ImportError: ``math-verify`` is not installed.
    """
    if find_spec("math_verify") is None:
        raise ImportError(f"math_reward needs math-verify: {install_hint('rewards')}")
    try:
        value, failure = await (pool or shared_pool()).run(CHECK, answer, str(reference), timeout=timeout)
    except WorkerTimeoutError as error:
        return Verdict.missing(MissingReason.TIMEOUT, str(error))
    except WorkerCrashedError as error:
        return Verdict.missing(MissingReason.CRASHED, str(error))
    return Verdict.missing(MissingReason.CRASHED, failure) if value is None else Verdict(value)


async def math_reward(
    answer: str, reference: str | float, *, timeout: float = TIMEOUT, pool: WorkerPool | None = None
) -> Reward:
    """Returns the reward of :func:`math_verdict`: 1.0, 0.0, or ``None`` if it is missing."""
    return (await math_verdict(answer, reference, timeout=timeout, pool=pool)).value
