"""Prints the score of an evaluation: the table, the tags, the answers that say nothing, and the failures.

Guarantees: every table fits 80 columns, whatever the names are; the share of invalid episodes stands beside every
number.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.core.episode import Message
from agentrl.evaluate.evaluator import Evaluator
from agentrl.evaluate.metrics import EvalSummary, main_metric
from agentrl.launch.first_prompt import shortened
from agentrl.observe.summary import Fitting, cells, evaluation_table

MOST_TAGS = 20  # rows of the table of tags


def print_score(name: str, evaluator: Evaluator, summary: EvalSummary, console: Console) -> None:
    """Prints the tables, what the client notes, and the most frequent failures."""
    title = f"{name}: {summary.tasks} {'task' if summary.tasks == 1 else 'tasks'}"
    console.print(evaluation_table(summary.all_metrics(), title, evaluator.answers))
    if summary.tags:
        console.print(tag_table(summary.tags))
    for note in evaluator.notes:
        console.print(f"note    {note}", style="yellow", markup=False, highlight=False)
    print_failures(evaluator.failures, console)


def print_failures(failures: Counter[str], console: Console) -> None:
    """Prints the three most frequent failures, each with the end of its text."""
    for text, count in failures.most_common(3):
        console.print(f"{count} invalid: {last_lines(text)}", style="red", markup=False)


def tag_table(tags: Mapping[str, EvalSummary]) -> Fitting:
    """Builds a table with the main metric of the tasks of each tag, those with the most tasks first."""
    shown = sorted(tags.items(), key=lambda one: (-(one[1].n + one[1].failed), one[0]))
    left_out = len(shown) - MOST_TAGS
    caption = f"{left_out} more tags in result.json" if left_out > 0 else None
    table = Table(title="by tag", caption=caption)
    table.add_column("", overflow="fold")
    names = {main_metric(one.estimates) for one in tags.values()} - {None}
    metric = "accuracy" if "accuracy" in names else "reward"
    table.add_column(rf"{metric} \[95% interval]", justify="right")
    has_invalid = any(one.failed for _, one in shown)
    if has_invalid:
        table.add_column("invalid", justify="right")
        table.add_column("if wrong / right", justify="right")
    table.add_column("tasks", justify="right")
    for tag, one in shown[:MOST_TAGS]:
        row = cells(one.all_metrics(), metric)
        row += ["0.0%", ""] if has_invalid and len(row) == 1 else []
        table.add_row(escape(tag), *row, str(one.tasks))
    return Fitting(table)


def print_prompt(prompt: str | Sequence[Message], console: Console) -> None:
    """Prints the first prompt in one line."""
    text = prompt if isinstance(prompt, str) else "\n".join(f"{one['role']}: {one.get('content')}" for one in prompt)
    if text:
        console.print(f"prompt  {shortened(text)!r}", markup=False, highlight=False)


def last_lines(text: str, most: int = 600) -> str:
    """Returns the end of a text of at most ``most`` characters, from the beginning of a line where it has several."""
    end = text[-most:]
    _, line, rest = end.partition("\n")
    return rest if line and len(text) > most and not text[:-most].endswith("\n") else end
