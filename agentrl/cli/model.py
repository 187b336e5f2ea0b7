"""``agentrl model``: tells what can be done with a model before a run."""

from typing import Annotated

import typer

from agentrl.config.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Check a model: tokenizer, template, engine, trainer.")


@app.callback()
def _group() -> None:
    """Keeps ``check`` a command of its own."""


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="Folder, Hugging Face id, or a model that an installed package ships.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    context: Annotated[
        int, typer.Option("--context", min=0, help="Longest sequence in tokens; 0: the model's own.")
    ] = 0,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the Python code that comes with the model.")
    ] = False,
) -> None:
    """Try a model with all that a run needs of it; each line is ok, slower, or refused with the remedy.

    The exit code is 1 if the trainer or the embedded engine refuses the model.
    """
    from transformers.utils import logging

    from agentrl.data.models import resolve_model
    from agentrl.launch.model_report import as_json, report, shown

    try:
        folder = resolve_model(name, key="the model").path
    except OSError as error:
        raise UserError(str(error)) from error
    logging.disable_progress_bar()
    lines = report(folder, context, trust=trust_remote_code)
    typer.echo(as_json(name, lines) if json else shown(lines))
    if any(line.verdict == "refused" for line in lines if line.part in ("trainer", "embedded engine")):
        raise typer.Exit(1)
