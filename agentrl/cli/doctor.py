"""``agentrl doctor``: diagnose a run."""

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.completion import complete_run


def doctor(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run's folder, e.g. runs/gsm8k_grpo, or its name below runs/.", autocompletion=complete_run
        ),
    ],
) -> None:
    """Examine a run for common problems; each finding has its cause and a remedy.

    The exit code is 1 if something was found.
    """
    from rich.console import Console
    from rich.markup import escape

    from agentrl.observe.examine_run import examine

    folder = run if run.is_dir() else Path("runs") / run
    found, unjudged = examine(folder)
    console = Console(highlight=False)
    whole = not console.is_terminal  # in a file a finding's sentence is one line; a terminal folds it at a word
    for finding in found:
        console.print(f"[bold yellow]{finding.kind}[/]  {escape(finding.symptom)}", soft_wrap=whole)
        for head, text in (("cause", finding.cause), ("remedy", finding.remedy)):
            line = f"  {head:6}  {text}"
            console.print(line, markup=False, soft_wrap=whole)
    for text in unjudged:
        console.print(f"not judged: {text}", markup=False, soft_wrap=whole)
    if found:
        raise typer.Exit(1)
    console.print(f"nothing found in {folder}", markup=False)
