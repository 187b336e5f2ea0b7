"""Shows how far an evaluation is: counts, rate, running score with its interval, cost and time left.

Guarantees: on a terminal one line, redrawn in place, that fits 80 columns; elsewhere a plain line each
:data:`LINE_SECONDS`, so that a log stays readable. Episodes that were judged before a resume count as done, and not in
the rate. The running score is of the tasks whose samples have all ended. While no episode ends, the line says since
when (:meth:`EvalProgress.tick`).
"""

import math
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from agentrl.core.episode import Episode
from agentrl.evaluate.evaluator import Evaluator
from agentrl.evaluate.metrics import main_metric

LINE_SECONDS = 10.0
_DRAW_SECONDS = 0.25
_WARM = 3  # episodes before a rate is told
STILL_SECONDS = 10.0  # without an end of an episode from which that is said


class EvalProgress:
    """Shows the progress of an evaluator while the block runs.

    Args:
        evaluator: The evaluator; its ``on_episode`` is taken.
        console: Console to print to.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, evaluator: Evaluator, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._evaluator = evaluator
        self._console = console
        self._clock = clock
        self._since = self._shown = self._ended = clock()
        self._asked = 0
        columns = (TextColumn("{task.fields[text]}", markup=False), BarColumn(bar_width=None))
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal, expand=True)
        self._row = self._bar.add_task("", total=evaluator.total, text="")

    def __enter__(self) -> Self:
        self._since = self._shown = self._ended = self._clock()
        self._evaluator.on_episode = self._ends
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def _ends(self, episode: Episode) -> None:
        now = self._ended = self._clock()
        judged = self._evaluator.judged
        self._asked = self._evaluator.done - (len(judged) if judged is not None else 0)
        self._show(now)

    def tick(self) -> None:
        """Show the line anew, if it is time: also while no episode ends."""
        self._show(self._clock())

    def _show(self, now: float) -> None:
        if self._console.is_terminal:
            if now - self._shown >= _DRAW_SECONDS:
                self._shown = now
                self._bar.update(self._row, completed=self._evaluator.done, text=self.line(now))
        elif now - self._shown >= LINE_SECONDS:
            self._shown = now
            self._console.print(self.line(now), highlight=False, markup=False, soft_wrap=True)

    def line(self, now: float) -> str:
        """Returns the progress in one line."""
        evaluator = self._evaluator
        parts = [f"{evaluator.done}/{evaluator.total}"]
        rate = self._asked / (now - self._since) if self._asked >= _WARM and now > self._since else 0.0
        if rate:
            parts.append(f"{rate:.1f}/s" if rate >= 1 else f"{60 * rate:.1f}/min")
        scores = evaluator.tally.total.scores
        name = main_metric(scores)
        if name is not None:
            parts.append(_score(name, scores[name].mean, *_bounds(evaluator, name)))
        if evaluator.tally.total.failed:
            parts.append(f"{evaluator.tally.total.failed} invalid")
        if evaluator.price is not None:
            parts.append(f"cost {evaluator.ends.cost:.3g}")
        if now - self._ended >= STILL_SECONDS:
            parts.append(f"none ended for {now - self._ended:.0f} s")
        elif rate:
            left = (evaluator.total - evaluator.done) / rate
            parts.append(f"{timedelta(seconds=round(left))} left")
        return "  ".join(parts)


def _bounds(evaluator: Evaluator, name: str) -> tuple[float, float]:
    found = evaluator.tally.total.scores[name].estimate()
    return found.low, found.high


def _score(name: str, mean: float, low: float, high: float) -> str:
    share = name == "accuracy"
    show = (lambda value: f"{100 * value:.1f}") if share else (lambda value: f"{value:.3f}")
    interval = "" if math.isnan(low) else f" [{show(low)}, {show(high)}]"
    return f"{name} {show(mean)}{'%' if share else ''}{interval}"
