"""Shows a run live in the terminal.

Guarantees: in a terminal one panel is redrawn in place, and text that does not fit is folded, never cut, but of an
evaluation of many metrics the first ones are shown; elsewhere, and
with ``logging.live=false``, one line is printed per step and per evaluation, so that a log file stays readable. The
view never changes the run.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from agentrl.config.recipe import Recipe
from agentrl.observe.diagnosis import diagnose
from agentrl.observe.live_facts import last_answer, progress, speed, trend, waits
from agentrl.observe.step_table import step_table
from agentrl.observe.summary import is_shown, metric_names

_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 60
_ROWS = 8  # last steps shown in the panel
_EVALUATED = 2  # lines of the last evaluation
_LEAST = 4  # lines kept for the last step
_UNBOUNDED = 10_000  # lines of a panel that is not redrawn
_BORDER = 4  # characters of the panel's border and padding


class LiveView:
    """Shows the metric records of a run.

    Args:
        recipe: Resolved recipe of the run.
        run_dir: Folder of the run.
        console: Console to print to.
        clock: Returns monotonic seconds.
        status: Returns the controller's state, see :func:`agentrl.observe.live_facts.waits`.
    """

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        status: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._recipe = recipe
        self._run_dir = run_dir
        self._console = console
        self._clock = clock
        self._status = status
        self._started = clock()
        self._is_open = True
        self._state = "starting"
        self._steps: list[dict[str, float]] = []
        self._evaluation: dict[str, float] = {}
        self._records: list[dict[str, float]] = []  # steps and evaluations, for the diagnosis
        self._findings: dict[str, Text] = {}
        panel = console.is_terminal and recipe.logging.live
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=2) if panel else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop updating and leave the last panel on the screen, with all warnings; may be called twice."""
        self._is_open = False
        if self._live is not None:
            self._live.stop()

    def state(self, text: str) -> None:
        """Show what the run is doing now, such as ``starting``."""
        changed, self._state = text != self._state, text
        self._refresh(Text(f"[{self._elapsed()}] {text}") if changed else None)

    def update(self, record: Mapping[str, Any]) -> None:
        """Show one record of ``metrics.jsonl``."""
        numbers = {name: float(value) for name, value in record.items() if value is not None}
        if any(name.startswith("eval/") for name in numbers):
            self._evaluation = numbers
            self._records.append(numbers)
            self._refresh(Text(f"[{self._elapsed()}] {evaluation_line(numbers)}"))
        if "reward/mean_drawn" not in numbers and "train/loss" in numbers:  # supervised
            self._steps.append(numbers)
            self._state = (
                f"training, {numbers.get('step', 0):.0f} of at most {self._recipe.trainer.total_steps} steps done"
            )
            self._refresh(Text(f"[{self._elapsed()}] {loss_line(numbers, self._recipe.trainer.total_steps)}"))
        elif "reward/mean_drawn" in numbers:
            self._steps.append(numbers)
            self._state = (
                f"training, {numbers.get('step', 0):.0f} of at most {self._recipe.trainer.total_steps} steps done"
            )
            self._refresh(Text(f"[{self._elapsed()}] {step_line(numbers, self._recipe.trainer.total_steps)}"))
            if self._records[-1:] != [numbers]:  # a record may hold a step and its evaluation
                self._records.append(numbers)
            self._diagnose(numbers.get("step", 0))

    def _diagnose(self, step: float) -> None:
        """Show each kind of finding once: warnings in yellow, notes in cyan."""
        for finding in diagnose(self._records, self._recipe.trainer.dtype, self._recipe.weights.pause_mode):
            if finding.kind in self._findings:
                continue
            style = "yellow" if finding.level == "warning" else "cyan"
            self._findings[finding.kind] = Text(f"step {step:.0f}: {finding}", style=style)
            self._refresh(Text(f"[{self._elapsed()}] {finding.level}, step {step:.0f}: {finding}", style=style))

    def _refresh(self, line: Text | None) -> None:
        if self._live is None and line is not None:
            self._console.print(line, soft_wrap=True)

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(self._clock() - self._started), 60)
        return f"{minutes:d}:{seconds:02d}"

    def render(self) -> Panel:
        """Builds the panel from the records so far, no wider and no higher than the terminal."""
        width = self._console.width - _BORDER
        head: list[Any] = [Text(f"{self._state}", style="bold")]
        if self._steps:
            acts = "reward/mean_drawn" in self._steps[-1]
            name, key = ("reward", "reward/mean_drawn") if acts else ("loss", "train/loss")
            values = [record[key] for record in self._steps]
            room = min(_CURVE_WIDTH, max(1, width - len(f"{name}  {values[-1]:.3f}")))
            head.append(Text(f"{name} {sparkline(values, room)} {values[-1]:.3f}"))
        if self._evaluation:
            head.append(Text(evaluation_line(self._evaluation, room=_EVALUATED * width)))
        height = self._console.height - 2 if self._is_open else _UNBOUNDED
        least = self._lines([*self._rows(width, 1), *list(self._findings.values())[-1:]], width)
        for fact in self._facts() if self._is_open else ():
            if self._lines([*head, fact], width) <= min(2 * height // 3, height - least):
                head.append(fact)
        tail = self._shown_warnings(width, height - self._lines(head, width) - _LEAST)
        middle = self._rows(width, height - self._lines([*head, *tail], width))
        title = f"{escape(self._recipe.name)} · {escape(self._recipe.model.name)} · {self._elapsed()}"
        parts = [*head, *middle, *tail]
        return Panel(Group(*parts), title=title, subtitle=escape(str(self._run_dir)), title_align="left")

    def _facts(self) -> list[Text]:
        """Builds what is shown beside the table while there is room, the most important first."""
        trainer, steps = self._recipe.trainer, self._steps
        found = []
        if steps:
            acts = "reward/mean_drawn" in steps[-1]
            found.append(progress(steps, trainer.total_steps, self._clock() - self._started, trainer.time_budget))
            found.append(speed(steps[-1]))
            found.append(trend(steps, *(("reward", "reward/mean_drawn") if acts else ("loss", "train/loss"))))
        texts = [Text(text) for text in found if text]
        texts += [Text(line, style="cyan") for line in waits(self._status())]
        answer = last_answer(self._run_dir / "episodes.jsonl")
        return [*texts, *([Text(answer, style="dim")] if answer else [])]

    def _shown_warnings(self, width: int, height: int) -> list[Any]:
        """Builds the warnings: all that fit, the newest at least; the others are shown when the run has ended."""
        texts = list(self._findings.values())
        for hidden in range(len(texts)):
            more = [Text(f"earlier warnings: {hidden}, shown at the end", style="yellow")] if hidden else []
            if self._lines([*more, *texts[hidden:]], width) <= height or hidden == len(texts) - 1:
                return [*more, *texts[hidden:]]
        return []

    def _rows(self, width: int, height: int) -> list[Any]:
        """Builds the last steps: as many as fit, at least one."""
        for count in range(min(_ROWS, len(self._steps)), 0, -1):
            shown = self._steps[-count:]
            if "reward/mean_drawn" in shown[-1]:
                rows: list[Any] = [step_table(shown, width)]
            else:
                rows = [Text(loss_line(record, self._recipe.trainer.total_steps)) for record in shown]
            if count == 1 or self._lines(rows, width) <= height:
                return rows
        return []

    def _lines(self, parts: list[Any], width: int) -> int:
        options = self._console.options.update(width=width, height=None)
        return len(self._console.render_lines(Group(*parts), options)) if parts else 0


def loss_line(record: Mapping[str, float], total: int) -> str:
    """Formats a step of supervised training as one line."""
    parts = [f"step {record.get('step', 0):.0f}/{total}", f"loss {record['train/loss']:.3f}"]
    parts += [f"{label} {record[key]:.3f}" for key, label in _LEARNED if key in record]
    if "train/tokens" in record:
        parts.append(f"tokens {record['train/tokens']:.0f}")
    if "time/step" in record:
        parts.append(f"{record['time/step']:.1f} s")
    return "  ".join(parts)


_LEARNED = (
    ("train/token_accuracy", "token_accuracy"),
    ("train/pair_accuracy", "pair_accuracy"),
    ("train/margin", "margin"),
)


def sparkline(values: list[float], width: int) -> str:
    """Draws the last ``width`` values as bars between their minimum and maximum."""
    values = values[-width:]
    low, high = min(values), max(values)
    span = high - low or 1.0
    return "".join(_BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1))] for value in values)


def step_line(record: Mapping[str, float], total: int) -> str:
    """Formats a training step as one line."""
    names = sorted(name for name in record if name.startswith("metrics/"))
    parts = [f"step {record.get('step', 0):.0f}/{total}", f"reward {record['reward/mean_drawn']:.3f}"]
    parts += [f"{name.removeprefix('metrics/')} {record[name]:.3f}" for name in names]
    if "distill/reverse_kl" in record:
        parts.append(f"kl to teacher {record['distill/reverse_kl']:.3f}")
    for key, label in (("tokens/completion_mean", "tokens"), ("staleness/mean", "stale")):
        if key in record:
            parts.append(f"{label} {record[key]:.1f}")
    if record.get("rollout/truncated"):
        parts.append(f"cut {record['rollout/truncated']:.0%}")
    if record.get("rollout/failed"):
        parts.append(f"failed {record['rollout/failed']:.0f}/{record['rollout/episodes_drawn']:.0f}")
    if record.get("rollout/groups_filtered"):
        parts.append(f"filtered {record['rollout/groups_filtered']:.0f}/{record['rollout/groups_drawn']:.0f}")
    if record.get("dropped/episodes"):
        parts.append(f"too old {record['dropped/episodes']:.0f}")
    if "curriculum/pool" in record:
        retired = f", retired {record['curriculum/retired']:.0f}" if "curriculum/retired" in record else ""
        parts.append(f"pool {record['curriculum/pool']:.0f}{retired}")
    if "time/step" in record:
        inner = [f"{label} {record[key]:.1f}" for key, label in _TIMES if key in record]
        parts.append(f"{record['time/step']:.1f} s" + (f" ({', '.join(inner)})" if inner else ""))
    return "  ".join(parts)


_TIMES = (("time/wait_batch", "wait"), ("time/update", "update"))


_ENDING = 45  # characters of the counts behind the metrics
MAIN = ("accuracy", "reward")  # metrics that come first
_MIXED = ("eval/version_min", "eval/version_max")  # where an evaluation is of several versions


def evaluation_line(record: Mapping[str, float], room: int | None = None) -> str:
    """Formats an evaluation as one line.

    Args:
        record: Metrics of the evaluation.
        room: Characters that it may take about; metrics beyond are counted. ``None`` for all.
    """
    parts = [f"evaluation at step {record.get('step', 0):.0f}"]
    names = metric_names(record)
    shown = sorted((one for one in names if is_shown(one, names)), key=lambda one: (one not in MAIN, "@" in one, one))
    left_out = 0
    for name in (f"eval/{one}" for one in shown):
        text = f"{name.removeprefix('eval/')} {record[name]:.3f}"
        if f"{name}_low" in record:
            text += f" [{record[f'{name}_low']:.3f}, {record[f'{name}_high']:.3f}]"
        fits = room is None or len("  ".join([*parts, text])) <= room - _ENDING
        parts += [text] if fits else []
        left_out += not fits
    if left_out:
        parts.append(f"{left_out} more")
    if "eval/examples" in record:
        parts.append(f"examples {record['eval/examples']:.0f}")
    else:
        abandoned = f", abandoned {record['eval/abandoned']:.0f}" if record.get("eval/abandoned") else ""
        parts.append(f"n {record.get('eval/n', 0):.0f}, invalid {record.get('eval/invalid', 0):.0f}{abandoned}")
    if all(name in record for name in _MIXED):
        parts.append("of versions {:.0f} to {:.0f}".format(*(record[name] for name in _MIXED)))
    return "  ".join(parts)
