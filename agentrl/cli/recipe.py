"""``agentrl recipe``: lists, shows and runs recipes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.completion import complete_override, complete_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from agentrl.config.recipe import Recipe

app = typer.Typer(help="List, show and run recipes.", no_args_is_help=True)


Name = Annotated[
    str, typer.Argument(help="A recipe's name, or a path to its YAML file.", autocompletion=complete_recipe)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings, e.g. trainer.learning_rate=1e-6.", metavar="[KEY=VALUE]...", autocompletion=complete_override
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file merged over the recipe, before the settings.")
]


@app.command(name="list")
def list_recipes() -> None:
    """List all recipes that can be run by name."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from agentrl.config.load import find_recipe, recipe_names
    from agentrl.config.overrides import read_file

    table = Table(box=None, pad_edge=False)
    for column in ("recipe", "what it does", "file"):
        table.add_column(column, overflow="fold")
    for name in recipe_names():
        path = find_recipe(name)
        table.add_row(*map(escape, (name, str(read_file(path).get("description", "")), str(path))))
    Console().print(table)


@app.command()
def show(name: Name, overrides: Overrides = None, config: ConfigFile = None) -> None:
    """Print a recipe as it would run here: every key, its value and its meaning, and the objective as a formula."""
    from agentrl.config.hints import hints
    from agentrl.config.render import render
    from agentrl.config.supervised import SUPERVISED, objective
    from agentrl.launch.server_checks import check_servers
    from agentrl.train.formula import formula

    recipe = _load(name, overrides, config)
    check_servers(recipe)
    typer.echo(render(recipe), nl=False)
    lines = objective(recipe) if recipe.trainer.type in SUPERVISED else formula(recipe.trainer)
    if recipe.trainer.type is not None:
        typer.echo("\n".join(["", "# what is minimised", *(f"#   {line}" for line in lines)]))
    if found := hints(recipe):
        typer.echo("\n".join(["", *(f"# hint: {one}" for one in found)]))


@app.command()
def run(
    name: Name,
    overrides: Overrides = None,
    config: ConfigFile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and the plan; start nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run of this name from its checkpoint.")
    ] = False,
) -> None:
    """Run a recipe: train, or evaluate with trainer.type=null."""
    from rich.console import Console

    recipe = _load(name, overrides, config)
    console = Console(highlight=False)
    if dry_run:
        from agentrl.launch.run import check_names

        check_names(recipe)
        _print_plan(recipe)
        return
    named = any(setting.startswith("name=") for setting in overrides or ())
    raise typer.Exit(run_loaded(recipe, resume=resume, console=console, numbered=not named))


def run_loaded(recipe: "Recipe", *, resume: bool, console: "Console", numbered: bool = False) -> int:
    """Train, or evaluate if the recipe has no trainer; returns the exit code."""
    from agentrl.launch.bounded_run import END_SECONDS, end_within
    from agentrl.launch.run import run_recipe

    code = run_recipe(recipe, resume=resume, console=console, numbered=numbered)
    end_within(END_SECONDS, code)
    return code


def _load(name: str, overrides: list[str] | None, config: Path | None) -> "Recipe":
    from agentrl.config.load import load_recipe

    return load_recipe(name, overrides or (), str(config) if config is not None else None)


def _print_plan(recipe: "Recipe") -> None:
    from agentrl.config.render import render
    from agentrl.config.supervised import NO_ENV, SUPERVISED
    from agentrl.data.models import find_config
    from agentrl.inference.kinds.kind import server_kind
    from agentrl.launch.dry_run import plan

    in_text = not server_kind(recipe.inference.engine).capabilities.token_logprobs
    if in_text and recipe.inference.urls:
        config, model = None, f"{recipe.inference.model or recipe.model.name}: at {', '.join(recipe.inference.urls)}"
    else:
        config, model = find_config(recipe.model.name)
    resolved, lines = plan(recipe, config, model)
    typer.echo(render(resolved))
    typer.echo("\n".join(lines))
    if recipe.trainer.type in SUPERVISED:
        typer.echo("\n".join(_example_lines(resolved)))
    if not in_text and recipe.env.id != NO_ENV:
        typer.echo("\n".join(_prompt_lines(resolved)))


def _prompt_lines(recipe: "Recipe") -> list[str]:
    """Lines about the first prompt of a run that renders prompts itself."""
    import asyncio

    from agentrl.launch.first_prompt import check_prompt

    folder = _tokenizer_folder(recipe)
    if folder is None:
        return ["prompt     not tried: the model's tokenizer is not available"]
    return asyncio.run(check_prompt(recipe, folder)).lines()


def _example_lines(recipe: "Recipe") -> list[str]:
    """Lines about the first example of a supervised run."""
    from agentrl.launch.first_example import example_lines

    folder = _tokenizer_folder(recipe)
    if folder is None:
        return ["example    not tried: the model's tokenizer is not available"]
    return example_lines(recipe, folder)


def _tokenizer_folder(recipe: "Recipe") -> Path | None:
    """Returns a folder with the files that the model's tokenizer needs; ``None`` where they are not available."""
    from agentrl.data.models import find_file

    wanted = ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja")
    files = [find_file(recipe.model.name, name)[0] for name in wanted]
    return None if files[0] is None or files[1] is None else files[1].parent
