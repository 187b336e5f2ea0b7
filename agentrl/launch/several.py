"""Evaluates several models on several environments, one after the other.

Guarantees: each pair has a folder of its own, ``<environment>--<model>``, which is an evaluation like any other and is
gone on with where it is there; the same call again goes on with the folder of one that was cut. A pair that fails does
not keep the others from being evaluated, and the code at the end is that of the worst. However the call ends, a table
shows the pairs that are done.
"""

import hashlib
import itertools
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentrl.config.errors import UserError
from agentrl.evaluate.judged import ASKED, RESULT
from agentrl.evaluate.metrics import main_metric
from agentrl.host.process import write_json
from agentrl.host.stop_signals import STOP_SIGNAL_CODE
from agentrl.launch.api import evaluate
from agentrl.launch.asked import RUNS, unfinished
from agentrl.launch.results import EvalResult, RunFailed, RunStopped
from agentrl.launch.run_owner import RunOwner
from agentrl.observe.summary import Fitting, shown_value

FAILED_CODE = 1
OWN_MODEL = "its own model"
LONGEST = 100  # characters of a folder's name, without the digits behind it
Pair = tuple[str, str | None]
"""Name of an environment or a recipe, and of a model; ``None`` for the recipe's own."""


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
    pairs = [(name, model) for name in names for model in models]
    folders = folder_names(pairs)
    asked = {"several": pairs, "settings": list(settings), "options": {**options, "resume": False}}
    base = output or unfinished(asked, console, partial(_is_cut, folders=folders)) or _new_folder()
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {base}: {error.strerror}; choose another place with --output") from error
    with RunOwner(base):
        write_json(base / ASKED, asked)
        return _evaluate_all(dict(zip(folders, pairs, strict=True)), settings, base, console, options)


def _new_folder() -> Path:
    """Makes a folder for the evaluations of a call that chose none."""
    name = f"eval-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        folder = RUNS / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError


def _is_cut(folder: Path, folders: Sequence[str]) -> bool:
    return any(not (folder / name / RESULT).is_file() for name in folders)


def folder_names(pairs: Sequence[Pair]) -> list[str]:
    """Returns a name for the folder of each pair; equal and long ones end with digits of the whole names."""
    short = [f"{_short(name)}--{_short(model or OWN_MODEL)}" for name, model in pairs]
    doubtful = [len(one) > LONGEST or short.count(one) > 1 for one in short]
    return [
        f"{one[:LONGEST]}-{hashlib.sha256(repr(pair).encode()).hexdigest()[:6]}" if unclear else one
        for one, pair, unclear in zip(short, pairs, doubtful, strict=True)
    ]


def _evaluate_all(
    pairs: Mapping[str, Pair], settings: Sequence[str], base: Path, console: Console, options: Mapping[str, Any]
) -> int:
    found: dict[tuple[str, str], EvalResult | str] = {}
    code = 0
    for short, (name, model) in pairs.items():
        label, folder = model or OWN_MODEL, base / short
        console.rule(escape(f"{name}, {label}"))
        try:
            own = {**options, "resume": folder.is_dir()}  # also a finished one: it asks for nothing
            result = evaluate(name, settings, model=model, output=folder, console=console, **own)
        except RunStopped:
            code = STOP_SIGNAL_CODE
            break
        except (RunFailed, UserError) as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            found[name, label], code = "failed", FAILED_CODE
            continue
        found[name, label] = result
        code = FAILED_CODE if result.evaluation.failed or not result.evaluation.n else code
    if found:
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
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")
