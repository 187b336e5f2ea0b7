"""Writes a run's step records, each with the metrics of the evaluation due at that step.

Guarantees: one record per step, written after its evaluation; one evaluation at a time, in its own asyncio task, so no
call waits for its end; after a failed evaluation every :meth:`StepRecords.settled` raises. A record that is not
written yet is part of a checkpoint (:meth:`StepRecords.unwritten`), so a resumed run writes it.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agentrl.inference.backend import InferenceError
from agentrl.rollout.errors import RolloutError

Evaluate = Callable[[int], Awaitable[dict[str, float]]]  # policy version -> metrics
Write = Callable[[int, dict[str, float]], None]  # step, metrics


class StepRecords:
    """Writes each step's record after its evaluation.

    Args:
        evaluate: Evaluates the served version and returns its metrics.
        write: Called once with each step and its metrics.
        failed: Called with the reason when an evaluation fails.
    """

    def __init__(self, evaluate: Evaluate, write: Write, failed: Callable[[RolloutError], None]) -> None:
        self._evaluate = evaluate
        self._write = write
        self._failed = failed
        self._waiting: tuple[int, dict[str, float]] | None = None  # step and metrics of the record under evaluation
        self._job: asyncio.Task[None] | None = None
        self.evaluated: int | None = None  # latest version whose evaluation was recorded

    def add(self, step: int, metrics: Mapping[str, float], *, evaluate: bool) -> None:
        """Write a step's record now, or start its evaluation and write the record afterwards."""
        if not evaluate:
            self._write(step, dict(metrics))
            return
        self._waiting = step, dict(metrics)
        self._job = asyncio.create_task(self._run(step, dict(metrics)), name=f"evaluation-{step}")
        self._job.add_done_callback(self._ended)

    @property
    def evaluating(self) -> int | None:
        """The version under evaluation; ``None`` if there is none."""
        running = self._job is not None and not self._job.done()
        return self._waiting[0] if running and self._waiting is not None else None

    async def settled(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a running evaluation; returns whether none is running.

        Raises:
            RolloutError: An evaluation failed.
        """
        if self._job is not None:
            await asyncio.wait({self._job}, timeout=seconds)
            if self._job.done() and (failure := _failure(self._job)) is not None:
                raise failure
        return self.evaluating is None

    def unwritten(self) -> dict[str, Any] | None:
        """Returns the record that waits for its evaluation, as plain data; ``None`` if there is none."""
        return None if self._waiting is None else {"step": self._waiting[0], "metrics": self._waiting[1]}

    async def close(self) -> None:
        """Cancel a running evaluation."""
        if self._job is not None:
            self._job.cancel()
            await asyncio.gather(self._job, return_exceptions=True)

    async def _run(self, step: int, metrics: dict[str, float]) -> None:
        metrics |= await self._evaluate(step)
        self._waiting = None
        self.evaluated = step
        self._write(step, metrics)

    def _ended(self, job: "asyncio.Task[None]") -> None:
        if not job.cancelled() and (failure := _failure(job)) is not None:
            self._failed(failure)


def _failure(job: "asyncio.Task[None]") -> RolloutError | None:
    """Returns why a finished evaluation failed; ``None`` if it succeeded."""
    if job.cancelled():
        return RolloutError("the controller is stopping")
    error = job.exception()
    if error is None:
        return None
    known = isinstance(error, RolloutError | InferenceError)  # their messages need no traceback
    return RolloutError(f"the evaluation failed: {error if known else ''.join(traceback.format_exception(error))}")
