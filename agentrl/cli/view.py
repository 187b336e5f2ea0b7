"""``agentrl view``: shows runs in a browser, in a terminal, or in a file."""

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.completion import complete_run


def view(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names or folders of runs and evaluations; by default all in --run-dir.",
            metavar="[RUN]...",
            autocompletion=complete_run,
        ),
    ] = None,
    run_dir: Annotated[Path, typer.Option("--run-dir", help="Folder of all runs.")] = Path("runs"),
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Port on this machine. Default: a free one.")
    ] = None,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page that needs no server into this file, and end.")
    ] = None,
    select: Annotated[
        str, typer.Option("--filter", help="Episodes for --html and --tui, e.g. 'reward<0.5 stop:length \"text\"'.")
    ] = "",
    sort: Annotated[
        str, typer.Option("--sort", help="Field to sort them by; -FIELD for the largest first.")
    ] = "-place",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most episodes in the file of --html.")] = 200,
    evaluation: Annotated[bool, typer.Option("--eval", help="For --tui: the episodes of evaluations.")] = False,
    tui: Annotated[bool, typer.Option("--tui", help="Show episodes in this terminal.")] = False,
) -> None:
    """Look at runs: curves, episodes, tokens, groups, evaluations, findings.

    Nothing leaves this machine: the page is served on its loopback only, to the browser that opens the printed link.
    """
    from agentrl.view.shown_runs import shown_runs

    found = shown_runs(runs or [], run_dir)
    if html is not None:
        from agentrl.view.static_copy import write_copy

        count = write_copy(found, html, query=select, sort=sort, limit=limit)
        return typer.echo(f"{html}: {count} episodes of {', '.join(run.key for run in found)}")
    if tui:
        from agentrl.view.terminal import show

        return show(found, "eval" if evaluation else None, select, sort)
    from agentrl.view.serve_page import serve

    serve(found, port, typer.echo, browser=browser)
