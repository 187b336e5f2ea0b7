"""``agentrl servers``: lists, adds and removes the inference servers of a running run."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.completion import complete_run
from agentrl.config.errors import UserError

app = typer.Typer(no_args_is_help=True, help="List, add and remove the inference servers of a running run.")

RunName = Annotated[
    str | None,
    typer.Option("--run", help="Name of the run; default: the only one running.", autocompletion=complete_run),
]
RunDir = Annotated[Path, typer.Option("--run-dir", help="Folder of all runs.")]
RUNS = Path("runs")
SECONDS = 600.0  # time limit of a call: a server that joins first loads the weights


@app.command("list")
def list_servers(run: RunName = None, run_dir: RunDir = RUNS) -> None:
    """Show each server's state, the weights it serves and its sessions."""
    _show(_call(run_dir, run, "GET", None))


@app.command()
def add(url: str, run: RunName = None, run_dir: RunDir = RUNS) -> None:
    """Add a server: it loads the run's current weights, then gets traffic."""
    _show(_call(run_dir, run, "POST", url))


@app.command()
def remove(url: str, run: RunName = None, run_dir: RunDir = RUNS) -> None:
    """Remove a server: it gets no new requests, but is not stopped."""
    _show(_call(run_dir, run, "DELETE", url))


def find_controller(run_dir: Path, run: str | None) -> dict[str, Any]:
    """Find address and secret of a run's controller.

    Raises:
        UserError: No such run is running, or several are and ``run`` is ``None``.
    """
    import psutil

    found = {}
    for file in sorted(run_dir.glob(f"{run or '*'}/processes/controller.json")):
        access = json.loads(file.read_text())
        if psutil.pid_exists(access["pid"]):
            found[file.parent.parent.name] = access
    if not found:
        raise UserError(f"no run{f' named {run!r}' if run else ''} goes on in {run_dir}; see --run and --run-dir")
    if len(found) > 1:
        raise UserError(f"several runs go on: {sorted(found)}; name one with --run")
    return next(iter(found.values()))


def _call(run_dir: Path, run: str | None, method: str, url: str | None) -> list[dict[str, Any]]:
    import httpx

    access = find_controller(run_dir, run)
    headers = {"Authorization": f"Bearer {access['secret']}"}
    body = json.dumps({"url": url}) if url else None
    where = f"{access['url']}/servers"
    try:
        response = httpx.request(method, where, content=body, headers=headers, timeout=SECONDS, trust_env=False)
    except httpx.HTTPError as error:
        raise UserError(f"the run's controller at {access['url']} does not answer: {error}") from error
    if response.status_code != 200:
        text = response.text
        raise UserError(json.loads(text)["error"] if text.startswith("{") else text)
    return response.json()


def _show(servers: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("server", "state", "weights", "sessions", "error")
    for server in servers:
        version, sessions = ("" if server[name] is None else str(server[name]) for name in ("version", "sessions"))
        table.add_row(server["url"], server["state"], version, sessions, escape(server["error"]))
    Console().print(table)
