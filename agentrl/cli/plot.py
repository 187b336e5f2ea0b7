"""``agentrl plot``: curves of runs as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.completion import complete_run

if TYPE_CHECKING:
    from agentrl.observe.run_plot import Curve


def plot(
    runs: Annotated[
        list[str], typer.Argument(help="Names or folders of runs.", metavar="RUN...", autocompletion=complete_run)
    ],
    metric: Annotated[
        list[str] | None, typer.Option("--metric", "-m", help="A metric; may be given several times.")
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option("--output", "-o", help="File to write, .png or .svg; may be given several times."),
    ] = None,
    smooth: Annotated[int, typer.Option("--smooth", min=1, help="Steps of a moving average.")] = 1,
    apart: Annotated[bool, typer.Option("--side-by-side", help="A column for each run, with a common scale.")] = False,
    minutes: Annotated[
        bool, typer.Option("--minutes", help="Draw over minutes of wall time since the first record, not over steps.")
    ] = False,
    names: Annotated[bool, typer.Option("--list", help="Print the metrics that the runs have, and end.")] = False,
    run_dir: Annotated[Path, typer.Option("--run-dir", help="Folder of all runs.")] = Path("runs"),
) -> None:
    """Draw curves of runs as PNG and SVG; runs that differ in their seed only become one curve with a band."""
    from agentrl.observe.metric_glossary import described
    from agentrl.observe.run_plot import chosen, draw, metric_names
    from agentrl.view.shown_runs import find_folder

    curves = curves_of([find_folder(name, run_dir) for name in runs])
    if names:
        for name in metric_names(curves):
            about = described(name)
            typer.echo("  ".join(part for part in (name, about["unit"], about["meaning"], about["over"]) if part))
        return
    files = output or [Path("curves.png"), Path("curves.svg")]
    metrics = chosen(curves, metric or [])
    draw(curves, metrics, files, smooth=smooth, apart=apart, minutes=minutes)
    typer.echo(f"{', '.join(map(str, files))}: {', '.join(metrics)} of {', '.join(curve.name for curve in curves)}")


def curves_of(folders: list[Path]) -> "list[Curve]":
    """Groups runs that differ in their seed only.

    Args:
        folders: Folders of runs.
    """
    from agentrl.config.errors import UserError
    from agentrl.observe.run_plot import Curve
    from agentrl.observe.sinks import METRICS_FILE, read_metrics

    groups: list[list[Path]] = []
    for folder in dict.fromkeys(one.resolve() for one in folders):
        if not (folder / METRICS_FILE).is_file():
            raise UserError(f"{folder} has no {METRICS_FILE}: nothing was measured")
        of_seeds = next((group for group in groups if differ_in_seed(group[0], folder)), None)
        if of_seeds is None:
            groups.append([folder])
        else:
            of_seeds.append(folder)
    taken: set[str] = set()
    curves = []
    for group in groups:
        name, number = group[0].name, 1
        while name in taken:
            number += 1
            name = f"{group[0].name} {number}"
        taken.add(name)
        curves.append(Curve(name, [read_metrics(folder / METRICS_FILE) for folder in group]))
    return curves


def differ_in_seed(first: Path, second: Path) -> bool:
    """Whether the recipes of two runs differ in their seed only; folders without a recipe are never such."""
    from agentrl.launch.run_folders import CONFIG, settings_that_differ

    both = (first / CONFIG).is_file() and (second / CONFIG).is_file()
    return both and set(settings_that_differ(first, second)) == {"seed"}
