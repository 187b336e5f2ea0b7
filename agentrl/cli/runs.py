"""``agentrl runs``: lists, shows, checks, resumes and compares runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.completion import complete_override, complete_run

if TYPE_CHECKING:
    from agentrl.launch.run_folders import RunInfo

app = typer.Typer(no_args_is_help=True, help="List, show, check, resume and compare runs.")

RUNS = Path("runs")
Run = Annotated[str, typer.Argument(help="Name of a run, or its folder.", autocompletion=complete_run)]
RunDir = Annotated[Path, typer.Option("--run-dir", help="Folder of all runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_runs(run_dir: RunDir = RUNS, as_json: AsJson = False) -> None:
    """List all runs: how far they are, whether they go on, and their latest result."""
    from rich.console import Console
    from rich.table import Table

    from agentrl.launch.run_folders import all_runs

    found = all_runs(run_dir)
    if as_json:
        return typer.echo(json.dumps([run.as_json() for run in found]))
    if not found:
        return typer.echo(f"no runs in {run_dir}")
    table = Table(box=None, pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("learns", overflow="fold")
    for name in ("step", "state", "latest", "age"):
        table.add_column(name, no_wrap=True)
    for run in found:
        table.add_row(run.name, run.kind, _steps(run), run.state, _latest(run), short_time(run.age))
    Console(markup=False, highlight=False).print(table)


@app.command()
def show(name: Run, run_dir: RunDir = RUNS, as_json: AsJson = False) -> None:
    """Show what each process of a running run waits for, or how a run ended and how to go on."""
    from agentrl.launch.run import again
    from agentrl.launch.run_folders import find_run, how_to_go_on, live_status, run_info

    run = run_info(find_run(name, run_dir))
    live = live_status(run.folder) if run.state == "running" else {}
    further = how_to_go_on(run)
    if as_json:
        return typer.echo(json.dumps({**run.as_json(), "further": further, "status": live}))
    lines = [("run", f"{run.folder}: {run.kind}"), ("state", _state(run)), ("step", _steps(run))]
    if run.value is not None:
        lines.append(("latest", f"{run.metric} {run.value:.3f}, {short_time(run.age)} ago"))
    if run.checkpoint is not None:
        lines.append(("checkpoint", f"after step {run.checkpoint}"))
    lines += [(wait["process"], _wait(wait)) for wait in live.get("waits", [])]
    if run.state == "starting":
        lines.append(("launcher", "waits for the inference servers and the controller (inference.start_timeout)"))
    if further:
        lines.append(("further", f"{further}: {again(run.folder)}" if further.startswith("a resume") else further))
    _print(lines)


@app.command()
def check(name: Run, run_dir: RunDir = RUNS, as_json: AsJson = False) -> None:
    """Prove from its journal that a run trained each draw of a task once; the exit code is 1 if it did not."""
    from agentrl.launch.run_folders import check_journal, find_run, run_info
    from agentrl.rollout.journal_lines import JournalError

    run = run_info(find_run(name, run_dir))
    try:
        proof = check_journal(run)
    except JournalError as error:
        typer.echo(json.dumps({"holds": False, "violation": str(error)}) if as_json else f"violation: {error}")
        raise typer.Exit(1) from error
    if as_json:
        facts = {name: getattr(proof, name) for name in ("lines", "void", "resumes", "steps", "checkpoint", "outcomes")}
        return typer.echo(json.dumps({"holds": True, "draws": len(proof.admitted), "open": proof.running, **facts}))
    typer.echo(f"{run.folder}: each draw was trained at most once\n{proof.text()}")


@app.command()
def resume(
    name: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings to change.", metavar="[KEY=VALUE]...", autocompletion=complete_override),
    ] = None,
    run_dir: RunDir = RUNS,
) -> None:
    """Continue a run with its own settings, from its latest checkpoint."""
    from rich.console import Console

    from agentrl.cli.recipe import finish
    from agentrl.launch import api
    from agentrl.launch.run_folders import find_run, recipe_to_resume

    recipe = recipe_to_resume(find_run(name, run_dir), overrides or [])
    console = Console(highlight=False)
    finish(console, lambda: api.run(recipe, resume=True, console=console, numbered=False))


@app.command()
def diff(first: Run, second: Run, run_dir: RunDir = RUNS, as_json: AsJson = False) -> None:
    """Compare the settings and the latest metrics of two runs."""
    from rich.console import Console
    from rich.table import Table

    from agentrl.launch.run_folders import find_run, last_metrics, settings_that_differ

    one, other = find_run(first, run_dir), find_run(second, run_dir)
    settings = settings_that_differ(one, other)
    values = last_metrics(one), last_metrics(other)
    known = sorted({*values[0], *values[1]})
    pairs = {name: (values[0].get(name), values[1].get(name)) for name in known}
    metrics = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if as_json:
        return typer.echo(json.dumps({"settings": settings, "metrics": metrics}))
    if not settings and not metrics:
        return typer.echo("no setting and no metric differs")
    table = Table(box=None, pad_edge=False)
    names = (one.name, other.name) if one.name != other.name else (str(one), str(other))
    for head in ("setting or metric", *names):
        table.add_column(head, overflow="fold")
    for key, both in {**settings, **metrics}.items():
        table.add_row(key, *map(_shown, both))
    Console(markup=False, highlight=False).print(table)


def short_time(seconds: float) -> str:
    """Formats a time in one unit: ``12 s``, ``5 min``, ``3 h``, ``2 d``."""
    for limit, unit in ((120, 1), (7200, 60), (172800, 3600)):
        if seconds < limit:
            return f"{seconds / unit:.0f} {({1: 's', 60: 'min', 3600: 'h'})[unit]}"
    return f"{seconds / 86400:.0f} d"


def _steps(run: "RunInfo") -> str:
    if run.step is None:
        return "-"
    return f"{run.step}/{run.total}" if run.total is not None else "-"


def _latest(run: "RunInfo") -> str:
    return (
        "-" if run.value is None else f"{(run.metric or '').rpartition('/')[2].removesuffix('_drawn')} {run.value:.3f}"
    )


def _state(run: "RunInfo") -> str:
    owner = run.owner
    if run.state in ("running", "starting"):
        return f"{run.state}, process {owner.get('pid')} on {owner.get('host')}"
    if run.state == "killed":
        return f"killed: process {owner['pid']} on {owner['host']} ended without a word"
    reason = run.reason.splitlines()
    return f"{run.state}: {reason[0]}" if reason and run.state == "failed" else run.state


def _wait(wait: dict[str, Any]) -> str:
    parts = [wait["doing"]]
    if wait.get("seconds") is not None:
        parts.append(f"for {short_time(wait['seconds'])}")
    if wait.get("seconds_left") is not None:
        parts.append(f"gives up in {short_time(max(0.0, wait['seconds_left']))}")
    if wait.get("limit_of_each") is not None:
        parts.append(f"each episode at most {short_time(wait['limit_of_each'])}")
    return ", ".join(parts)


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _print(lines: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for head, text in lines:
        table.add_row(head, text)
    Console(markup=False, highlight=False).print(table)
