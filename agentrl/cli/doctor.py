"""``agentrl doctor``: diagnose a run."""

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    run: Annotated[Path, typer.Argument(help="A run's folder, e.g. runs/gsm8k_grpo, or its name below runs/.")],
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
    for finding in found:
        console.print(f"[bold yellow]{finding.kind}[/]  {escape(finding.symptom)}", soft_wrap=True)
        console.print(f"  cause   {finding.cause}", markup=False, soft_wrap=True)
        console.print(f"  remedy  {finding.remedy}", markup=False, soft_wrap=True)
    for text in unjudged:
        console.print(f"not judged: {text}", markup=False, soft_wrap=True)
    if found:
        raise typer.Exit(1)
    console.print(f"nothing found in {folder}", markup=False)
