"""``agentrl serve``: runs an inference server in the foreground."""

from enum import StrEnum
from typing import Annotated

import typer


class Engine(StrEnum):
    """Engines that ``agentrl serve`` starts."""

    EMBEDDED = "embedded"  # agentrl's own engine: any Hugging Face causal LM, on CPU or GPU


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Option("--model", help="Local folder, Hugging Face id or a shipped model.")],
    engine: Annotated[Engine, typer.Option("--engine", help="Engine that serves the model.")] = Engine.EMBEDDED,
) -> None:
    """Serve a model over HTTP.

    Further options go to the engine unchanged: --port, --context-length, --max-running and so on.
    """
    from agentrl.data.models import require_chat_template, resolve_model
    from agentrl.launch.needed_packages import SERVING, require_packages

    require_packages(dict.fromkeys(SERVING, "agentrl serve"))
    found = resolve_model(model, say=_say)
    require_chat_template(found.path)
    _say(found.source)
    from agentrl.engine.__main__ import main
    from agentrl.host.entry import REFUSED

    code = main(["--model", str(found.path), *context.args])
    raise typer.Exit(2 if code == REFUSED else code)


def _say(text: str) -> None:
    typer.echo(text, err=True)
