"""Combines several verifiers into one reward, a weighted sum.

Guarantees: the verifiers run concurrently; each value is logged under its criterion's name; a missing value of a
weighted criterion makes the total missing or, with ``missing="skip"``, is left out and the other weights are scaled to
the same sum. Missing criteria and their reasons are in the verdict either way. An exception of a verifier is raised
with its criterion's name, and the other verifiers are cancelled.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.rewards.verdict import Runs, Verdict, Verifier, judge_answer


@dataclass(frozen=True)
class Criterion:
    """One verifier of a rubric.

    Attributes:
        name: Name of its metric.
        verifier: ``(answer, reference) -> Reward | Verdict``, sync or async.
        weight: Factor in the total; with 0 the value is only logged, a negative weight makes it a penalty.
        runs: Place where the verifier runs; ``process`` if it computes for long or may hang.
        timeout: Seconds after which the value counts as missing.
    """

    name: str
    verifier: Verifier
    weight: float = 1.0
    runs: Runs = "auto"
    timeout: float = 60.0

    def __post_init__(self) -> None:
        """Check the weight."""
        if not math.isfinite(self.weight):
            raise ValueError(f"criterion {self.name!r}: weight={self.weight!r} must be finite")


class Rubric:
    """A weighted sum of verifiers, which is itself a verifier.

    Args:
        criteria: The verifiers.
        missing: Effect of a missing value: ``"missing"`` makes the total missing, ``"skip"`` leaves the criterion out
            and scales the other weights so that the sum of absolute weights is unchanged.
    """

    def __init__(self, criteria: Sequence[Criterion], *, missing: Literal["missing", "skip"] = "missing") -> None:
        names = [criterion.name for criterion in criteria]
        if len(set(names)) != len(names):
            raise ValueError(f"Rubric: names must differ, got {names}")
        if not any(criterion.weight for criterion in criteria):
            raise ValueError("Rubric: want at least one criterion with a weight other than 0")
        if missing not in ("missing", "skip"):
            raise ValueError(f"Rubric(missing={missing!r}): want 'missing' or 'skip'")
        self.criteria = tuple(criteria)
        self.missing = missing

    async def __call__(self, answer: str, reference: Any) -> Verdict:
        """Judge an answer.

        Args:
            answer: The model's answer.
            reference: Reference for every verifier; a dict whose keys are exactly the criteria's names gives each
                verifier the value under its name.

        Returns:
            The total. Metrics: ``name`` for each value, ``name/metric`` for each verifier's own metrics, and
            ``name/missing`` = 1 for each missing value.

        Raises:
            Exception: The exception of a verifier, with its criterion's name as a note.
        """
        names = {criterion.name for criterion in self.criteria}
        shared_out = isinstance(reference, dict) and set(reference) == names
        running: dict[str, asyncio.Task[Verdict]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for criterion in self.criteria:
                    part = reference[criterion.name] if shared_out else reference
                    running[criterion.name] = group.create_task(_judge(criterion, answer, part))
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            ended = ((name, task) for name, task in running.items() if task.done() and not task.cancelled())
            for name in [name for name, task in ended if task.exception() is first]:
                first.add_note(f"in the rubric's criterion {name!r}")
            raise first from first.__cause__
        return self.total([task.result() for task in running.values()])

    def total(self, verdicts: Sequence[Verdict]) -> Verdict:
        """Returns the weighted sum of verdicts, given in the order of the criteria."""
        metrics: dict[str, float] = {}
        details: list[str] = []
        lost: list[Verdict] = []
        total = full = present = 0.0
        for criterion, verdict in zip(self.criteria, verdicts, strict=True):
            metrics |= {f"{criterion.name}/{key}": number for key, number in verdict.metrics.items()}
            full += abs(criterion.weight)
            if verdict.value is None:
                metrics[f"{criterion.name}/missing"] = 1.0
                details.append(f"{criterion.name}: {verdict.reason}: {verdict.detail}".rstrip(": "))
                lost += [verdict] if criterion.weight else []
            else:
                metrics[criterion.name] = verdict.value
                present += abs(criterion.weight)
                total += criterion.weight * verdict.value
        detail = "; ".join(details)
        if lost and (self.missing == "missing" or not present):
            return Verdict(None, lost[0].reason, metrics, detail)
        return Verdict(total * full / present if lost else total, None, metrics, detail)


async def _judge(criterion: Criterion, answer: str, reference: Any) -> Verdict:
    return await judge_answer(criterion.verifier, answer, reference, runs=criterion.runs, timeout=criterion.timeout)
