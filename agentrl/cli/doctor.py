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

    The exit code is 1 if something is wrong; notes, about runs that do what their recipe says, leave it 0.
    """
    from rich.console import Console
    from rich.markup import escape

    from agentrl.observe.examine_run import examine

    folder = next((one for one in (run, Path("runs") / run) if one.is_dir()), run)
    found, unjudged = examine(folder)
    console = Console(highlight=False)
    whole = not console.is_terminal  # in a file a finding's sentence is one line; a terminal folds it at a word
    for finding in found:
        style = "bold yellow" if finding.level == "warning" else "bold cyan"
        note = " (note)" * (finding.level == "note")
        console.print(f"[{style}]{finding.kind}[/]{note}  {escape(finding.symptom)}", soft_wrap=whole)
        for head, text in (("cause", finding.cause), ("remedy", finding.remedy)):
            line = f"  {head:6}  {text}"
            console.print(line, markup=False, soft_wrap=whole)
    for text in unjudged:
        console.print(f"not judged: {text}", markup=False, soft_wrap=whole)
    if any(finding.level == "warning" for finding in found):
        raise typer.Exit(1)
    if not found:
        console.print(f"nothing found in {folder}", markup=False)
