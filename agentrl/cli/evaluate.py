"""``agentrl eval``: evaluates models without a trainer, on running servers or the embedded engine.

Guarantees: options mean what the keys of a recipe mean that they set; ``rescore`` and ``export`` as the first word, and
``--compare``, work on evaluations that are there, and ask no model.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.completion import complete_evaluated_or_override
from agentrl.cli.recipe import end, finish

if TYPE_CHECKING:
    from rich.console import Console

_SETTING = re.compile(r"[A-Za-z_][\w.]*=")
RESCORE, EXPORT = "rescore", "export"


def evaluate(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="Recipes' names or environments: an id, a name in ./envs, a path, a module:Class; and settings. "
            "`rescore RUN` judges the saved transcripts of an evaluation again; `export RUN` writes it for others.",
            metavar="NAME... [KEY=VALUE]...",
            autocompletion=complete_evaluated_or_override,
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            "--base-url", help="OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1. Default: start ours."
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="The server's name of the model; without --base-url, the model to load, or the run whose model it is. "
            "Several: once for each.",
        ),
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
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", help="Compare two evaluations, paired by task.")
    ] = None,
    until_ci: Annotated[
        float | None,
        typer.Option("--until-ci", help="End when the accuracy's 95% interval has this half width, e.g. 0.01."),
    ] = None,
    max_cost: Annotated[float | None, typer.Option("--max-cost", help="Begin no episode beyond this cost.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Begin no episode beyond so many tokens.")
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="Form of `export`: markdown, html, datasets, inspect, leaderboard.")
    ] = None,
) -> None:
    """Evaluate models on environments.

    The API key is read from $OPENAI_API_KEY, or the variable that inference.api_key_env names.
    """
    from rich.console import Console

    from agentrl.config.errors import ConfigError

    console = Console(highlight=False)
    names = [one for one in what or () if not _SETTING.match(one)]
    settings = [one for one in what or () if _SETTING.match(one)]
    if to is not None and names[:1] != [EXPORT]:
        raise ConfigError("--to FORM is for `agentrl eval export RUN`")
    if compare is not None:
        if what:
            raise ConfigError(f"--compare RUN_A RUN_B evaluates nothing; what else is asked for: {' '.join(what)}")
        return _compare(*compare, console)
    if names[:1] == [EXPORT]:
        return _export(names[1:], to, output, console)
    if names[:1] == [RESCORE]:
        return _rescore(names[1:], settings, output, console)
    if not names:
        raise ConfigError("name a recipe or an environment, e.g. agentrl eval gsm8k; or --compare RUN_A RUN_B")
    from agentrl.host.garbage import collect_rarely
    from agentrl.launch.several import evaluate_several

    collect_rarely(
        concurrency or 0
    )  # thousands of episodes that wait at a time are looked through again and again else

    options = {
        **{"base_url": base_url, "tasks": n, "samples": k, "concurrency": concurrency, "resume": resume},
        **{"until_ci": until_ci, "max_cost": max_cost, "max_total_tokens": max_tokens},
    }
    models = model or [None]
    if len(names) * len(models) > 1:
        end(evaluate_several(names, models, settings, output=output, console=console, **options))
    from agentrl.launch.api import evaluate as evaluate_model

    finish(
        console,
        lambda: evaluate_model(names[0], settings, model=models[0], output=output, console=console, **options),
    )


def _compare(first: Path, second: Path, console: "Console") -> None:
    from agentrl.evaluate.compare import compare
    from agentrl.launch.compared import print_comparison

    print_comparison(compare(first, second), first, second, console)


def _rescore(names: list[str], settings: list[str], output: Path | None, console: "Console") -> None:
    from agentrl.config.errors import ConfigError
    from agentrl.launch.rescore import rescore

    if len(names) != 1:
        raise ConfigError("agentrl eval rescore RUN: want the folder of one evaluation")
    finish(console, lambda: rescore(Path(names[0]), settings, output=output, console=console))


def _export(names: list[str], to: str | None, output: Path | None, console: "Console") -> None:
    from agentrl.config.errors import ConfigError
    from agentrl.launch.exported import FORMS, export

    if not names or to is None:
        raise ConfigError(f"agentrl eval export RUN --to FORM: want a folder, and one of {', '.join(FORMS)}")
    for name in names:
        export(Path(name), to, output, console)
