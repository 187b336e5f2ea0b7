"""``agentrl recipe``: lists, shows and runs recipes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from agentrl.cli.completion import complete_override, complete_recipe
from agentrl.cli.folded import folded, terminal_width

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from agentrl.config.recipe import Recipe
    from agentrl.launch.results import EvalResult, TrainResult

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
    width = terminal_width()
    typer.echo(render(recipe, width=width), nl=False)
    lines = objective(recipe) if recipe.trainer.type in SUPERVISED else formula(recipe.trainer)
    if recipe.trainer.type is not None:
        typer.echo("\n".join(["", "# what is minimised", *(f"#   {line}" for line in lines)]))
    if found := hints(recipe):
        typer.echo("\n".join(["", *folded([f"# hint: {one}" for one in found], "#   ")]))


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
    if dry_run:
        from agentrl.launch.run_checks import check_names

        check_names(recipe)
        _check_heads(recipe)
        _print_plan(recipe)
        _print_job(recipe)
        return
    _check_heads(recipe)
    if recipe.launch.type == "slurm":
        _submit(recipe, resume=resume)
        return
    console = Console(highlight=False)
    if recipe.launch.type == "ray":
        from agentrl.launch.ray_run import run_on_ray
        from agentrl.launch.run_checks import check_names

        check_names(recipe)
        end(run_on_ray(recipe, console, resume=resume))
    if recipe.launch.node_rank > 0:
        from agentrl.launch.joined_run import join_run

        end(join_run(recipe, console))
    from agentrl.launch import api

    named = any(setting.startswith("name=") for setting in overrides or ())
    finish(console, lambda: api.run(recipe, resume=resume, console=console, numbered=not named))


def finish(console: "Console", work: "Callable[[], TrainResult | EvalResult]") -> NoReturn:
    """Run ``work`` and end the command with its exit code.

    The code is 0 after success, 1 if a process failed or an episode could not be judged, 75 after SIGUSR1, 130 after
    Ctrl-C or SIGTERM.
    """
    end(exit_code(console, work))


def end(code: int) -> NoReturn:
    """End the command with an exit code, within seconds, whatever threads are left."""
    from agentrl.launch.bounded_run import END_SECONDS, end_within

    end_within(END_SECONDS, code)
    raise typer.Exit(code)


def exit_code(console: "Console", work: "Callable[[], TrainResult | EvalResult]") -> int:
    """Run ``work``, print why it failed, and return the exit code of :func:`finish`."""
    from agentrl.host.stop_signals import STOP_SIGNAL_CODE
    from agentrl.launch.results import EvalResult, ExitReason, RunFailed, RunStopped
    from agentrl.launch.save_and_stop import SAVED_CODE

    try:
        result = work()
    except RunStopped as stopped:
        saved = stopped.result is not None and stopped.result.exit_reason is ExitReason.SAVED
        return SAVED_CODE if saved else STOP_SIGNAL_CODE
    except RunFailed as failed:
        console.print(str(failed), style="red", markup=False, highlight=False)
        return 1
    if isinstance(result, EvalResult):
        return 1 if result.evaluation.failed or not result.evaluation.n else 0
    return SAVED_CODE if result.exit_reason is ExitReason.SAVED else 0


def _load(name: str, overrides: list[str] | None, config: Path | None) -> "Recipe":
    from agentrl.config.load import load_recipe

    return load_recipe(name, overrides or (), str(config) if config is not None else None)


def _check_heads(recipe: "Recipe") -> None:
    """Refuses ranks that do not divide the model's heads or experts, where its config is known here."""
    trainer = recipe.trainer
    if recipe.inference.tp == trainer.tensor_parallel == trainer.expert_parallel == 1:
        return
    from agentrl.config.errors import UserError
    from agentrl.config.mesh import check_mesh
    from agentrl.data.models import find_config
    from agentrl.launch.placement import head_problems

    config, _ = find_config(recipe.model.name)
    if config is None:
        return
    check_mesh(trainer, config)
    heads = config.get("num_attention_heads")
    if heads is None or recipe.inference.tp == 1:
        return
    for problem in head_problems(recipe, heads, config.get("num_key_value_heads") or heads):
        raise UserError(problem)


def _print_job(recipe: "Recipe") -> None:
    """Prints the script of the job that a run is submitted as."""
    if recipe.launch.type == "slurm":
        from agentrl.launch.slurm import script

        typer.echo(f"job\n{script(recipe)}")


def _submit(recipe: "Recipe", *, resume: bool) -> None:
    """Submits a run as a Slurm job."""
    from agentrl.config.hints import hints
    from agentrl.launch.run_checks import check_names
    from agentrl.launch.slurm import submit

    check_names(recipe)
    for hint in hints(recipe):
        typer.echo(f"hint    {hint}", err=True)
    job, log = submit(recipe, resume=resume)
    typer.echo(f"job {job} is queued; its output: {log}\nsqueue -j {job} tells where it stands, scancel {job} ends it")


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
    typer.echo(render(resolved, width=terminal_width()))
    if recipe.trainer.type in SUPERVISED:
        lines += _example_lines(resolved)
    typer.echo("\n".join(folded(lines, " " * 11)))
    if not in_text and recipe.env.id != NO_ENV:
        typer.echo("\n".join(folded(_prompt_lines(resolved), " " * 11)))


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
