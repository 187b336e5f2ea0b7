"""``agentrl env``: lists, creates, checks and plays environments; ``check`` is in ``env_check.py``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.completion import complete_environment
from agentrl.cli.env_check import NAMES, check, read_settings, read_task
from agentrl.config.errors import UserError

app = typer.Typer(no_args_is_help=True, help="List environments, start a new one, check it, play it.")
app.command("check")(check)

Settings = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the environment as key=value.", show_default=False)
]


@app.command("list")
def list_environments() -> None:
    """List registered environments, and those in ./envs."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from agentrl.core.local_envs import classes_in, local_files
    from agentrl.core.registry import registered, spec_of

    table = Table()
    for column in ("id", "from", "what it is"):
        table.add_column(column, overflow="fold")
    entries = {id: spec_of("env", id).entry_point for id in registered("env")}
    for id in registered("env"):
        table.add_row(*map(escape, (id, entries[id], first_line(id))))
    shipped = Path(__file__).parent.parent / "envs"
    known = {str(entry).partition(":")[0].rpartition(".")[2] for entry in entries.values()}
    for file in local_files():
        if file.parent.resolve() == shipped.resolve() and file.stem in known:
            continue  # in a checkout of agentrl, ./envs has the registered environments too
        names = classes_in(file)
        for name in names:
            shown = (file.stem if len(names) == 1 else name, f"{file}:{name}", docstring_of(file, name))
            table.add_row(*map(escape, shown))
    Console().print(table)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="A Python name, e.g. shop.")],
    folder: Annotated[Path, typer.Option("--folder", help="Working folder to write into.")] = Path("."),
) -> None:
    """Write a tool environment with its test and a recipe, as a start for your own."""
    from agentrl.cli.new_env import write_environment

    for path, what in write_environment(name, folder):
        typer.echo(f"{path}  {what}")
    recipe = f"{name}_grpo"
    typer.echo(
        f"\nnext:\n  agentrl env check {name}\n  agentrl env play {name}\n  python -m pytest tests/test_{name}.py\n"
        f"  agentrl recipe run {recipe}"
    )


@app.command()
def play(
    env: Annotated[str, typer.Argument(help=NAMES, metavar="ENV", autocompletion=complete_environment)],
    settings: Settings = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the task; random by default.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="The task as JSON, instead of a drawn one.")] = None,
) -> None:
    """Be the agent yourself: read the messages, type answers; call tools with /NAME JSON."""
    import asyncio

    from agentrl.cli.play import play_episode

    made = make_environment(env, settings)
    options = read_task(task)
    try:
        asyncio.run(play_episode(made, seed=seed, options=options))
    except (KeyboardInterrupt, EOFError):
        typer.echo("\nstopped")


def make_environment(id: str, settings: list[str] | None) -> Any:
    """Make an environment with ``key=value`` arguments.

    Raises:
        UserError: The environment is unknown, or does not take these arguments.
    """
    from agentrl.envkit.make import make

    kwargs = read_settings(settings or [])
    try:
        return make(id, **kwargs)
    except (LookupError, TypeError, ValueError, ImportError, SyntaxError) as error:
        raise UserError(str(error.args[0] if error.args else error)) from error


def first_line(id: str) -> str:
    """Returns the first line of a registered environment's docstring, without importing it."""
    import importlib.util

    from agentrl.core.registry import spec_of

    module, _, name = spec_of("env", id).entry_point.rpartition(":")
    if module.endswith(".py"):
        return docstring_of(Path(module), name)
    spec = importlib.util.find_spec(module)
    return docstring_of(Path(spec.origin), name) if spec is not None and spec.origin else ""


def docstring_of(file: Path, name: str) -> str:
    """Returns the first line of a class's or function's docstring."""
    import ast

    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""
