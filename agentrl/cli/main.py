"""``agentrl``: the command line and its error handling.

Guarantees: an error that a user can fix prints one message on standard error, with exit code 2 and no traceback;
other errors keep their traceback. ``agentrl --help`` imports neither torch nor transformers, gymnasium or openai.
"""

import io
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from agentrl import __version__
from agentrl.cli.bench import bench
from agentrl.cli.chat import chat
from agentrl.cli.commands import Commands
from agentrl.cli.completion_scripts import use_own_scripts
from agentrl.cli.doctor import doctor
from agentrl.cli.env import app as env_app
from agentrl.cli.evaluate import evaluate
from agentrl.cli.model import app as model_app
from agentrl.cli.plan import plan
from agentrl.cli.plot import plot
from agentrl.cli.recipe import app as recipe_app
from agentrl.cli.replay import replay
from agentrl.cli.runs import app as runs_app
from agentrl.cli.serve import serve
from agentrl.cli.servers import app as servers_app
from agentrl.cli.sim import sim
from agentrl.cli.view import view
from agentrl.config.errors import UserError
from agentrl.core.extras import extra_of, install_hint

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    name="agentrl",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich would double the time of --help
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(recipe_app, name="recipe")
app.add_typer(runs_app, name="runs")
app.add_typer(env_app, name="env")
app.add_typer(servers_app, name="servers")
app.add_typer(model_app, name="model")
app.command(name="eval")(evaluate)
app.command(name="chat")(chat)
app.command(name="serve", context_settings=PASS_THROUGH)(serve)
app.command(name="bench")(bench)
app.command(name="plan")(plan)
app.command(name="sim")(sim)
app.command(name="doctor")(doctor)
app.command(name="replay")(replay)
app.command(name="view")(view)
app.command(name="plot")(plot)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"agentrl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning of language-model agents, with Gymnasium's vocabulary."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code.

    Args:
        argv: Arguments without the program's name; the process's own by default.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a terminal of another encoding ends no run
    use_own_scripts()
    try:
        app(args=list(argv) if argv is not None else None, prog_name="agentrl")
    except UserError as error:
        print(f"agentrl: {error}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:  # of an extra: where it was not foreseen, the package is named at least
        extra = extra_of(error.name or "")
        if extra is None:
            raise
        print(f"agentrl: this needs {error.name}, not installed: {install_hint(extra)}", file=sys.stderr)
        sys.exit(2)
