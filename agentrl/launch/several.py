"""Evaluates several models on several environments, one after the other.

Guarantees: each pair has a folder of its own, ``<environment>--<model>``, which is an evaluation like any other and is
gone on with where it is there; a pair that fails does not keep the others from being evaluated, and the code at the end
is that of the worst.
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.config.errors import UserError
from agentrl.evaluate.metrics import main_metric
from agentrl.host.stop_signals import STOP_SIGNAL_CODE
from agentrl.launch.api import evaluate
from agentrl.launch.results import EvalResult, RunFailed, RunStopped
from agentrl.observe.summary import Fitting, shown_value

FAILED_CODE = 1


def evaluate_several(
    names: Sequence[str],
    models: Sequence[str | None],
    settings: Sequence[str],
    *,
    output: Path | None,
    console: Console,
    **options: Any,
) -> int:
    """Evaluates each model on each environment, and prints a table of them all.

    Args:
        names: Recipes or environments.
        models: Names of models; ``None`` is the recipe's own.
        settings: Settings of all evaluations.
        output: Folder that gets a folder for each pair; by default a new one in ``runs/``.
        console: Console to print to.
        options: Further arguments of :func:`agentrl.launch.api.evaluate`.

    Returns:
        Exit code: 0, 1 if an evaluation failed or an episode could not be judged, 130 after Ctrl-C.
    """
    base = output or Path("runs") / f"eval-{time.strftime('%Y%m%d-%H%M%S')}"
    found: dict[tuple[str, str], EvalResult | str] = {}
    code = 0
    for name in names:
        for model in models:
            label = model or "its own model"
            folder = base / f"{_short(name)}--{_short(label)}"
            console.rule(escape(f"{name}, {label}"))
            try:
                own = {**options, "resume": folder.is_dir()}  # also a finished one: it asks for nothing
                result = evaluate(name, settings, model=model, output=folder, console=console, **own)
            except RunStopped:
                return STOP_SIGNAL_CODE
            except (RunFailed, UserError) as error:
                console.print(str(error), style="red", markup=False, highlight=False)
                found[name, label], code = "failed", FAILED_CODE
                continue
            found[name, label] = result
            code = FAILED_CODE if result.evaluation.failed or not result.evaluation.n else code
    console.print(table_of(found))
    console.print(f"all in {base}", highlight=False, markup=False, soft_wrap=True)
    return code


def table_of(found: dict[tuple[str, str], EvalResult | str]) -> Fitting:
    """Builds a table with a row for each pair of environment and model."""
    table = Table(title="all evaluations")
    for column in ("", "model"):
        table.add_column(column, overflow="fold")
    for column in (r"value \[95% interval]", "invalid"):
        table.add_column(column, justify="right")
    for (name, model), result in found.items():
        if isinstance(result, str):
            table.add_row(escape(name), escape(model), result, "")
            continue
        metric = main_metric(result.evaluation.estimates)
        value = "nothing judged"
        if metric is not None:
            one = result.evaluation[metric]
            shown = [shown_value(metric, bound) for bound in (one.mean, one.low, one.high)]
            value = rf"{metric} {shown[0]} \[{shown[1]}, {shown[2]}]" if one.low == one.low else f"{metric} {shown[0]}"
        table.add_row(escape(name), escape(model), value, f"{result.evaluation.invalid_share:.1%}")
    return Fitting(table)


def _short(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:80]
