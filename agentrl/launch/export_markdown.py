"""Writes an evaluation as a Markdown report, or as one line of a leaderboard's table.

Guarantees: every number has its interval where the data give one, and the share of invalid episodes; names and texts
cannot break the table.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.config.errors import UserError
from agentrl.evaluate.judged import RESULT
from agentrl.evaluate.metrics import main_metric
from agentrl.evaluate.moments import Estimate
from agentrl.evaluate.setup import shown_component
from agentrl.launch.results import Evaluation
from agentrl.observe.summary import setup_line, shown_value

_NEEDED = ("env", "agent", "tasks", "samples", "temperature", "max_new_tokens")  # keys of the setup that reports show
COLUMNS = "| model | environment | metric | value | 95% interval | tasks | samples | temperature | invalid |"


def read_result(run_dir: Path) -> tuple[Evaluation, dict[str, Any]]:
    """Reads the result of an evaluation: its estimates, and everything in its file.

    Raises:
        UserError: The file is damaged, or of another version.
    """
    file = run_dir / RESULT
    try:
        found = json.loads(file.read_bytes())
        missing = [name for name in _NEEDED if name not in found["setup"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is of another version of agentrl, or damaged: {type(error).__name__}: {error}") from (
            error
        )
    if missing:
        raise UserError(f"{file} is of another version of agentrl: its setup lacks {', '.join(missing)}")
    return Evaluation.of(0, found, found), found


def leaderboard_line(run_dir: Path) -> str:
    """Returns one row of a Markdown table with :data:`COLUMNS`."""
    evaluation, _ = read_result(run_dir)
    setup = evaluation.setup
    metric = main_metric(evaluation.estimates)
    one = evaluation[metric] if metric is not None else Estimate(math.nan, math.nan, math.nan)
    cells = [
        str(setup.get("model")),
        shown_component(setup["env"]),
        metric or "nothing judged",
        shown_value(metric or "", one.mean),
        interval(metric or "", one),
        str(setup.get("tasks")),
        str(setup.get("samples")),
        "its own" if setup["temperature"] is None else f"{setup['temperature']:g}",
        f"{evaluation.invalid_share:.1%}",
    ]
    return f"| {' | '.join(map(cell, cells))} |"


def write_markdown(run_dir: Path, target: Path) -> None:
    """Writes the report."""
    target.write_text("\n".join(lines(run_dir)) + "\n", encoding="utf-8")


def lines(run_dir: Path) -> Iterator[str]:
    """Yields the lines of the report."""
    evaluation, found = read_result(run_dir)
    setup = evaluation.setup
    yield f"# {cell(setup.get('model'))} on {cell(shown_component(setup['env']))}"
    yield ""
    yield f"{cell(setup.get('data'))}. {setup_line(setup)[:1].upper()}{setup_line(setup)[1:]}."
    yield f"{evaluation.n} episodes judged, {evaluation.failed} invalid ({evaluation.invalid_share:.1%})."
    if found.get("ended"):
        yield f"Ended early: {cell(found['ended'])}."
    yield ""
    yield from table(evaluation.estimates, evaluation.invalid_share)
    for tag, estimates in evaluation.tags.items():
        yield from ("", f"## {cell(tag)}", "")
        yield from table(estimates, None)
    answers = {name: count for name, count in (found.get("answers") or {}).items() if name != "all" and count}
    if answers:
        yield from ("", "## Answers that say nothing", "", "| kind | answers |", "|---|---|")
        for name, count in answers.items():
            yield f"| {name} | {count} of {found['answers']['all']} |"
    if found.get("failures"):
        yield from ("", "## Invalid episodes", "", "| episodes | reason |", "|---|---|")
        for text, count in sorted(found["failures"].items(), key=lambda one: -one[1])[:20]:
            yield f"| {count} | {cell(text[-400:])} |"
    for note in found.get("notes") or ():
        yield from ("", f"Note: {cell(note)}.")


def table(estimates: Mapping[str, Estimate], invalid_share: float | None) -> Iterator[str]:
    """Yields the lines of a table of estimates."""
    has_bounds = any(not math.isnan(one.if_wrong) for one in estimates.values())
    share = invalid_share is not None
    head = ["", "value", "95% interval", *(["invalid"] if share else [])]
    head += ["all invalid wrong", "all invalid right"] if has_bounds else []
    yield f"| {' | '.join(head)} |"
    yield f"|---{'|---:' * (len(head) - 1)}|"
    for name, one in estimates.items():
        cells = [cell(name), shown_value(name, one.mean), interval(name, one)]
        cells += [f"{invalid_share:.1%}"] if share else []
        if has_bounds:
            cells += ["" if math.isnan(value) else shown_value(name, value) for value in (one.if_wrong, one.if_right)]
        yield f"| {' | '.join(cells)} |"


def interval(name: str, one: Estimate) -> str:
    """Formats an interval; a dash where the data give none."""
    return "-" if math.isnan(one.low) else f"{shown_value(name, one.low)} to {shown_value(name, one.high)}"


def cell(value: Any) -> str:
    """Returns text that cannot end a cell or begin markup."""
    text = " ".join(str(value).split())
    for mark in ("\\", "|", "`", "*", "_", "[", "]"):
        text = text.replace(mark, f"\\{mark}")
    return text.replace("&", "&amp;").replace("<", "&lt;")
