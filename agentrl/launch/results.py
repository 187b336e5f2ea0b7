"""Results of trainings and evaluations, as :func:`agentrl.train` and :func:`agentrl.evaluate` return them.

Guarantees: results are frozen, and are read from the files that the run wrote, so they say what the files say; a number
that was not measured is absent, and an interval that the data do not give has NaN bounds.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from agentrl.config.recipe import TrainerConfig
from agentrl.core.episode import Episode
from agentrl.evaluate.moments import Estimate
from agentrl.evaluate.paired import Change, changes
from agentrl.host.stop_signals import STOP_SIGNAL_CODE
from agentrl.observe.sinks import METRICS_FILE, read_metrics
from agentrl.observe.summary import metric_names
from agentrl.train.checkpoint_state import latest_checkpoint, read_state


class ExitReason(StrEnum):
    """Reason why a training ended."""

    TOTAL_STEPS = "total_steps"  # trainer.total_steps were made
    EPOCHS = "epochs"  # trainer.epochs passes over the tasks were made
    TIME_BUDGET = "time_budget"  # trainer.time_budget was used up
    FINISHED = "finished"  # a trainer of one's own ended without saying why
    SAVED = "saved"  # SIGUSR1 asked to save a checkpoint and stop, to be continued with resume
    STOPPED = "stopped"  # Ctrl-C or SIGTERM
    FAILED = "failed"  # a process of the run failed


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation.

    Attributes:
        step: Number of trainer steps before it.
        n: Number of episodes that were judged.
        failed: Number of episodes that failed; wrong answers are not among them.
        estimates: Mean and 95% interval by metric: ``accuracy``, ``reward``, ``truncated``, ``pass@4``, ``turns``, ...
        per_task: Mean over a task's judged episodes, by metric and task.
        setup: Settings that the result depends on: sampling, number of tasks and samples.
        tags: Estimates by tag of the task and metric.
    """

    step: int
    n: int
    failed: int
    estimates: dict[str, Estimate]
    per_task: Mapping[str, Mapping[str, float]] = field(default_factory=dict, repr=False)
    setup: dict[str, Any] = field(default_factory=dict, repr=False)
    tags: dict[str, dict[str, Estimate]] = field(default_factory=dict, repr=False)

    @property
    def invalid_share(self) -> float:
        """Share of all episodes that failed; NaN without an episode."""
        attempts = self.n + self.failed
        return self.failed / attempts if attempts else math.nan

    def __getitem__(self, metric: str) -> Estimate:
        """Returns the estimate of a metric."""
        return self.estimates[metric]

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, Any], stored: Mapping[str, Any]) -> "Evaluation":
        """Reads an evaluation from its record.

        Args:
            step: Number of trainer steps before it.
            metrics: Record with ``eval/<metric>``, ``eval/<metric>_low`` and ``_high``, ``eval/n``, ``eval/invalid``.
            stored: Contents of its file, with ``per_task`` and ``setup``; empty where no task was sampled.
        """
        found = {key.removeprefix("eval/"): value for key, value in metrics.items() if key.startswith("eval/")}
        return cls(
            step=step,
            n=int(found.get("n", 0)),
            failed=int(found.get("invalid", 0)),
            estimates=_estimates(metrics),
            per_task=stored.get("per_task", {}),
            setup=stored.get("setup", {}),
            tags={tag: _estimates(own) for tag, own in stored.get("tags", {}).items()},
        )


def _estimates(metrics: Mapping[str, Any]) -> dict[str, Estimate]:
    """Reads the estimates of flat metrics."""
    beside = ("_low", "_high", "_if_wrong", "_if_right")
    return {
        name: Estimate(metrics[f"eval/{name}"], *(metrics.get(f"eval/{name}{which}", math.nan) for which in beside))
        for name in metric_names(metrics)
    }


@dataclass(frozen=True)
class TrainResult:
    """Result of a training.

    Attributes:
        run_dir: Folder of the run with everything that it wrote.
        exit_reason: Reason why it ended.
        steps: Number of trainer steps that were made.
        seconds: Seconds that the call took.
        before: First evaluation on held-out tasks; ``None`` without any.
        after: Last evaluation; ``None`` if there are fewer than two.
        changes: Change of each metric from ``before`` to ``after``, over the tasks that both judged.
        model: Folder of the exported model, for ``transformers``; ``None`` if the training did not come to its end.
        metrics: One record per step: ``step``, ``time`` and the metrics of that step.
        error: Message of the process that failed.
    """

    run_dir: Path
    exit_reason: ExitReason
    steps: int
    seconds: float
    before: Evaluation | None = None
    after: Evaluation | None = None
    changes: dict[str, Change] = field(default_factory=dict)
    model: Path | None = None
    metrics: tuple[dict[str, float], ...] = field(default=(), repr=False)
    error: str | None = None


@dataclass(frozen=True)
class EvalResult:
    """Result of :func:`agentrl.evaluate`.

    Attributes:
        run_dir: Folder with the episodes and ``result.json``.
        evaluation: Estimates with intervals, also by task; a failed episode counts in none of them.
        episodes: All episodes with their messages, in the order in which they ended; they are read from their file.
        failures: Number of failed episodes by reason.
        answers: Number of sampled answers, ``all``, and of those that say nothing, by kind.
        notes: Notes about the requests to an API, for a person.
        data: Source of the tasks.
        seconds: Seconds that the call took.
        ended: Why the evaluation ended before its last task, a sentence; empty if it did not.
    """

    run_dir: Path
    evaluation: Evaluation
    episodes: Sequence[Episode] = field(default=(), repr=False)
    failures: dict[str, int] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    data: str = ""
    seconds: float = 0.0
    ended: str = ""


class RunFailed(RuntimeError):
    """A process of a run failed; the message ends with the end of its log.

    Attributes:
        result: Result of the training so far; ``None`` of an evaluation.
    """

    def __init__(self, message: str, result: TrainResult | None) -> None:
        super().__init__(message)
        self.result = result


class RunStopped(KeyboardInterrupt, SystemExit):
    """Ctrl-C or SIGTERM ended a run, and its processes with it.

    It is a ``KeyboardInterrupt`` for whoever catches one, and a ``SystemExit`` so that a script that catches nothing
    ends as the command does: without a traceback, with code 130.

    Attributes:
        result: Result of the training so far; ``None`` of an evaluation.
    """

    def __init__(self, message: str, result: TrainResult | None) -> None:
        super().__init__(message)
        self.code = STOP_SIGNAL_CODE
        self.result = result


def read_training(run_dir: Path, reason: ExitReason, *, seconds: float = 0.0, error: str | None = None) -> TrainResult:
    """Reads what a training came to from the files of its run."""
    path = run_dir / METRICS_FILE
    records = read_metrics(path) if path.is_file() else []
    found = [record for record in records if any(name.startswith("eval/") for name in record)]
    ends = [found[0], found[-1]] if len(found) > 1 else found
    evaluations = [Evaluation.of(int(one["step"]), one, _stored(run_dir, one)) for one in ends]
    complete = reason not in (ExitReason.SAVED, ExitReason.STOPPED, ExitReason.FAILED) and (run_dir / "model").is_dir()
    return TrainResult(
        run_dir=run_dir,
        exit_reason=reason,
        steps=int(records[-1]["step"]) if records else 0,
        seconds=seconds,
        before=evaluations[0] if evaluations else None,
        after=evaluations[1] if len(evaluations) > 1 else None,
        changes=changes(*(one.per_task for one in evaluations)) if len(evaluations) > 1 else {},
        model=run_dir / "model" if complete else None,
        metrics=tuple(records),
        error=error,
    )


def end_of(run_dir: Path, trainer: TrainerConfig) -> ExitReason:
    """Returns the reason why a training that did not fail ended, by its last checkpoint."""
    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    state = read_state(checkpoint) if checkpoint is not None else None
    if state is None:
        return ExitReason.FINISHED
    if state.get("spent_budget") is not None:
        return ExitReason.TIME_BUDGET
    if state["step"] >= trainer.total_steps:
        return ExitReason.TOTAL_STEPS
    return ExitReason.EPOCHS if trainer.epochs is not None else ExitReason.FINISHED


def _stored(run_dir: Path, record: Mapping[str, float]) -> dict[str, Any]:
    """Reads what an evaluation wrote beside its record; nothing where no task was sampled."""
    path = run_dir / f"eval-{int(record['step']):06d}.json"
    return json.loads(path.read_bytes()) if path.is_file() else {}
