"""``agentrl eval``: evaluates a model without a trainer, on a running server or the embedded engine."""

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.completion import complete_evaluated
from agentrl.cli.recipe import Overrides, finish


def evaluate(
    name: Annotated[
        str,
        typer.Argument(
            help="A recipe's name, or an environment: an id, a name in ./envs, a path, a module:Class.",
            autocompletion=complete_evaluated,
        ),
    ],
    overrides: Overrides = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            "--base-url", help="OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1. Default: start ours."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="The server's name of the model; without --base-url, the model to load."),
    ] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Number of tasks.")] = None,
    k: Annotated[
        int | None, typer.Option("--k", min=1, help="Episodes per task; over 1, also pass@1 to pass@K.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Folder for the episodes.")] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Most episodes, and requests, at a time. Default: 128.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the evaluation in --output: what is judged is not asked again.")
    ] = False,
) -> None:
    """Evaluate a model on an environment.

    The API key is read from $OPENAI_API_KEY, or the variable that inference.api_key_env names.
    """
    from rich.console import Console

    from agentrl.launch.api import evaluate as evaluate_model

    console = Console(highlight=False)
    finish(
        console,
        lambda: evaluate_model(
            name,
            overrides,
            model=model,
            base_url=base_url,
            tasks=n,
            samples=k,
            output=output,
            concurrency=concurrency,
            resume=resume,
            console=console,
        ),
    )
