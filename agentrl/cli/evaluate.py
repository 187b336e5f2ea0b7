"""``agentrl eval``: evaluates a model without a trainer, on a running server or the embedded engine."""

import re
import time
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.completion import complete_evaluated
from agentrl.cli.recipe import Overrides, run_loaded

# The recipe's limits suit its small CPU model; a model on an external server needs more. Overrides can change both.
_EXTERNAL = ("sampling.max_new_tokens=1024", "inference.context_length=8192")


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

    from agentrl.config.env_recipe import recipe_of, settings_without_recipe
    from agentrl.config.errors import ConfigError
    from agentrl.config.load import load_recipe

    if base_url is not None and model is None:
        raise ConfigError("--base-url needs --model NAME: the name under which that server knows the model")
    if resume and output is None:
        raise ConfigError("--resume needs --output FOLDER: the folder of the evaluation to go on with")
    recipe_name = recipe_of(name)
    short = re.sub(r"\W+", "-", re.sub(r"\.(py|ya?ml)\b", "", name).rpartition("/")[2])
    folder = output or Path("runs") / f"eval-{short}-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = eval_settings(base_url, model, n, k, folder, concurrency)
    if recipe_name is None:
        settings = [*settings_without_recipe(name, model), *settings]
    recipe = load_recipe(recipe_name, [*settings, *(overrides or ())])
    raise typer.Exit(run_loaded(recipe, resume=resume, console=Console(highlight=False)))


def eval_settings(
    base_url: str | None,
    model: str | None,
    n: int | None,
    k: int | None,
    folder: Path,
    concurrency: int | None = None,
) -> list[str]:
    """Convert the options to recipe settings."""
    from agentrl.config.yaml12 import write_yaml

    settings = ["trainer.type=null", f"launch.run_dir={folder.parent}", f"name={folder.name}"]
    if base_url is not None:
        settings += ["inference.engine=openai", f"inference.urls={write_yaml([base_url])}", *_EXTERNAL]
        settings.append(f"inference.model={model}")
    elif model is not None:
        settings.append(f"model.name={model}")
    if concurrency is not None:
        settings.append(f"rollout.max_concurrent={concurrency}")
    if n is not None:
        settings.append(f"eval.tasks={n}")
    if k is not None:
        settings.append(f"eval.samples={k}")
        if k > 1:
            settings.append("sampling.eval_temperature=1.0")  # greedy samples of one task would all be equal
    return settings
