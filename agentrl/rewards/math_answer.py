r"""Mathematical answers, compared by ``math-verify``: ``1/2`` is ``0.5``, sets and intervals and units are understood.

Guarantees: 1.0 or 0.0 is the verifier's word; a verifier that took too long, ran out of memory, crashed or failed is
missing with its reason, never 0; an answer that cannot be parsed is 0.0, a reference that cannot is an error. It works
in any thread and on any event loop, and never blocks one: expressions are parsed and compared in worker processes, and
one like ``9^9^9^9`` ends its own process only.

The answer is looked for in the last ``\boxed{...}``, then in the other mathematics of the text, last first.
"""

from importlib.util import find_spec

from agentrl.host.worker_pool import WorkerCrashedError, WorkerPool, WorkerTimeoutError, shared_pool
from agentrl.rewards.verdict import MissingReason, Reward, Verdict

TIMEOUT = 10.0  # seconds: math-verify's own defaults, 5 for parsing and 5 for comparing
CHECK = "agentrl.rewards.math_check:check"  # by name: sympy is imported in the worker only


async def math_verdict(
    answer: str, reference: str | float, *, timeout: float = TIMEOUT, pool: WorkerPool | None = None
) -> Verdict:
    r"""Whether the answer equals the reference.

    Args:
        answer: The whole answer.
        reference: The right answer: LaTeX or plain, with or without ``$`` or ``\boxed``, or ending in ``#### ...``; a
            number is taken as it is written.
        timeout: Seconds for parsing and comparing; starting a worker and importing sympy do not count.
        pool: Worker pool for the comparison; by default the process's own, whose workers may hold 4 GiB each.

    Returns:
        1.0 or 0.0, or missing: ``timeout`` or ``crashed``.

    Raises:
        ValueError: The reference is no mathematics.
        ImportError: ``math-verify`` is not installed.
    """
    if find_spec("math_verify") is None:
        raise ImportError("math_reward needs math-verify: pip install 'agentrl[rewards]'")
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
    """:func:`math_verdict` as a reward: 1.0, 0.0, or ``None`` where it is missing."""
    return (await math_verdict(answer, reference, timeout=timeout, pool=pool)).value
