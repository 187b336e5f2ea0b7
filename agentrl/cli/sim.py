"""``agentrl sim``: predicts the speed of a recipe before it runs."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.completion import complete_run
from agentrl.cli.recipe import ConfigFile, Name, Overrides

if TYPE_CHECKING:
    from agentrl.config.recipe import Recipe
    from agentrl.sim.episodes import Shapes

BOUNDS = (0, 1, 2, 4)


def sim(
    context: typer.Context,
    name: Name,
    overrides: Overrides = None,
    config: ConfigFile = None,
    gpus: Annotated[int, typer.Option(min=2, help="Devices to split between inference and training.")] = 8,
    lengths: Annotated[
        Path | None,
        typer.Option(help="File with the tokens of an episode on each line, or a run's folder."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Run whose lengths, latencies and training time are used.", autocompletion=complete_run
        ),
    ] = None,
    mean: Annotated[float | None, typer.Option(min=1, help="Mean tokens of an episode without --lengths.")] = None,
    sigma: Annotated[float, typer.Option(min=0, help="Spread of their lognormal distribution.")] = 0.8,
    token_ms: Annotated[float, typer.Option(min=0, help="Milliseconds of a token on a device.")] = 6.0,
    sequence_ms: Annotated[float, typer.Option(min=0, help="Milliseconds added for each sequence there.")] = 0.06,
    train_seconds: Annotated[float, typer.Option(min=0, help="Seconds of an update on --train-devices.")] = 20.0,
    train_devices: Annotated[int, typer.Option(min=1, help="Devices that --train-seconds is for.")] = 4,
    push_seconds: Annotated[float, typer.Option(min=0, help="Seconds for which a weight push stops servers.")] = 1.0,
    split: Annotated[
        str | None,
        typer.Option(help="The only split to try, as 6+2: devices that generate and that train. Replaces --gpus."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Simulated steps that count, of each candidate.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line instead of a table.")] = False,
) -> None:
    """Predict step time, utilisation, age and lost tokens of a recipe, and the best split and bound.

    The rollout controller itself runs, with simulated servers and trainer, under a virtual clock. Lengths and speeds
    are yours to give; --from takes them from a run, and shows its step time beside the prediction. With --split the
    recipe's own bound is the only one: it costs a tenth of a whole search.
    """
    import json
    import logging

    from agentrl.config.load import load_recipe
    from agentrl.host.garbage import collect_rarely
    from agentrl.launch.needed_packages import require_packages
    from agentrl.sim.choice import Case, tried
    from agentrl.sim.device import Speed
    from agentrl.sim.report import as_data, truth_lines
    from agentrl.sim.report import lines as report
    from agentrl.sim.simulation import Devices

    require_packages({"numpy": "agentrl sim", "safetensors": "agentrl sim"})
    log = logging.getLogger("agentrl")
    context.call_on_close(partial(log.setLevel, log.level))
    log.setLevel(logging.ERROR)
    recipe = load_recipe(name, overrides or (), str(config) if config is not None else None)
    collect_rarely(recipe.rollout.max_concurrent)  # as the controller of a run
    head, data = [], dict[str, Any]()
    if run is not None:
        from agentrl.sim.recorded import read_run

        records = read_run(_folder(run))
        own = Case(records.recipe, records.devices, records.shapes, records.steps)
        bound = asked_bound(records.recipe)
        predicted = own.run(records.devices.inference, records.devices.training, bound)
        head = truth_lines(records, predicted)
        data |= {"run_step_seconds": records.step_seconds, "run_predicted_seconds": predicted.step_seconds}
        data["run_left_out"] = records.left_out
        devices, shapes, source = records.devices, records.shapes, f"as in {run}"
    else:
        speed = Speed(token_ms / 1e3, sequence_ms / 1e3)
        slots = recipe.inference.max_running
        devices = Devices(1, 1, speed, train_seconds * train_devices, push_seconds=push_seconds, slots=slots)
        shapes, source = _assumed(recipe, mean, sigma)
    if lengths is not None:
        shapes, source = _given(lengths)
    case = Case(recipe, devices, shapes, steps)
    if split is not None:
        found = [case.run(*_split(split), asked_bound(recipe))]
    else:
        found = list(tried(case, gpus, sorted({*BOUNDS, asked_bound(recipe)})))
    if as_json:
        typer.echo(json.dumps(as_data(case, found, source) | data))
    else:
        typer.echo("\n".join([*head, *report(case, found, source)]))


def asked_bound(recipe: "Recipe") -> int:
    """Returns the recipe's bound of the age; where it is found during the run, the one that the search begins with."""
    from agentrl.rollout.auto_bound import START

    bound = recipe.rollout.max_staleness
    return START if bound == "auto" else bound


def _split(asked: str) -> tuple[int, int]:
    """Reads ``6+2``.

    Raises:
        ConfigError: It is not two numbers above 0.
    """
    from agentrl.config.errors import ConfigError

    parts = asked.split("+")
    if len(parts) != 2 or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ConfigError(f"--split {asked}: want devices that generate and devices that train, as in --split 6+2")
    return int(parts[0]), int(parts[1])


def _folder(run: Path) -> Path:
    return run if run.is_dir() else Path("runs") / run


def _assumed(recipe: "Recipe", mean: float | None, sigma: float) -> "tuple[Shapes, str]":
    from agentrl.sim.shapes import Lognormal

    cap = recipe.sampling.max_new_tokens
    mean = min(mean or cap / 2, cap)
    return Lognormal(mean, sigma, cap), f"lognormal, mean {mean:g}, sigma {sigma:g}, at most {cap} (no --lengths)"


def _given(place: Path) -> "tuple[Shapes, str]":
    """Reads lengths from a file or a run's folder.

    Raises:
        ConfigError: There is no such file, or a line is no number.
    """
    from agentrl.config.errors import ConfigError
    from agentrl.sim.recorded import read_shapes
    from agentrl.sim.shapes import Lengths

    if (folder := _folder(place)).is_dir():
        return read_shapes(folder), f"as in {place}"
    if not place.is_file():
        raise ConfigError(f"--lengths {place}: no such file, and no run of this name")
    found: list[Any] = place.read_text(encoding="utf-8").split()
    try:
        return Lengths([float(one) for one in found]), f"as in {place}"
    except ValueError as error:
        raise ConfigError(f"--lengths {place}: want one number of tokens on each line: {error}") from error
