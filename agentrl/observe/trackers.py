"""Trackers that a run's metrics, settings and sample episodes may be sent to.

Guarantees: each tracker's package is imported only when it is used; a metric's name is changed only where the tracker
refuses a letter, and then the same way each time. Settings are sent without secrets. Where no server is set up in the
tracker's own environment variables, it writes into the run's folder and sends nothing.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

PROJECT = "agentrl"
COLUMNS = ("step", "task", "reward", "stop", "tokens", "question", "answer")
Row = Mapping[str, Any]


class Tracker(Protocol):
    """A place that metrics are sent to."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a step; a step may come twice, with other metrics."""
        ...

    def episodes(self, step: int, rows: Sequence[Row]) -> None:
        """Send a table of sample episodes; a row has the keys of :data:`COLUMNS`."""
        ...

    def close(self) -> None:
        """Send what waits, and end."""
        ...


def _table(rows: Sequence[Row]) -> list[list[Any]]:
    return [[row.get(name) for name in COLUMNS] for row in rows]


class Wandb:
    """Weights & Biases; offline, in ``wandb/`` of the run's folder, without ``WANDB_API_KEY`` or ``WANDB_MODE``."""

    def __init__(self, name: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports] - an extra

        offline = "WANDB_API_KEY" not in os.environ and "WANDB_MODE" not in os.environ
        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=name,
            dir=str(run_dir),
            config=dict(settings),
            mode="offline" if offline else None,
        )
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._run.log({**values, "step": step})

    def episodes(self, step: int, rows: Sequence[Row]) -> None:
        """Send a table of sample episodes."""
        self._run.log({"episodes": self._wandb.Table(columns=list(COLUMNS), data=_table(rows)), "step": step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Trackio:
    """Trackio; its data are in ``trackio/`` of the run's folder, unless ``TRACKIO_DIR`` or a space is set."""

    def __init__(self, name: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run_dir / "trackio"))
        import trackio  # pyright: ignore[reportMissingImports] - an extra

        self._trackio = trackio
        space = os.environ.get("TRACKIO_SPACE_ID")
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT), name=name, config=dict(settings), space_id=space
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._trackio.log(dict(values), step=step)

    def episodes(self, step: int, rows: Sequence[Row]) -> None:
        """Send a table of sample episodes."""
        import pandas

        table = pandas.DataFrame(_table(rows), columns=list(COLUMNS))
        self._trackio.log({"episodes": self._trackio.Table(dataframe=table)}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


class MLflow:
    """MLflow; a database ``mlflow.db`` in the run's folder, unless ``MLFLOW_TRACKING_URI`` is set."""

    LETTERS = re.compile(r"[^\w\-. :/]")  # letters that a name may not have
    LONGEST = 6000  # characters of a parameter's value
    LONGEST_NAME = 250

    def __init__(self, name: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        import mlflow  # pyright: ignore[reportMissingImports] - an extra

        self._mlflow = mlflow
        local = "MLFLOW_TRACKING_URI" not in os.environ  # the next call sets it
        if local:
            mlflow.set_tracking_uri(f"sqlite:///{run_dir.resolve() / 'mlflow.db'}")
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if mlflow.get_experiment_by_name(experiment) is None:
            mlflow.create_experiment(
                experiment, artifact_location=(run_dir.resolve() / "mlflow").as_uri() if local else None
            )
        mlflow.set_experiment(experiment)
        mlflow.start_run(run_name=name)
        mlflow.log_params(
            {
                self.LETTERS.sub("-", key)[: self.LONGEST_NAME]: str(value)[: self.LONGEST]
                for key, value in flat(settings).items()
            }
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._mlflow.log_metrics({self.LETTERS.sub("-", key): value for key, value in values.items()}, step=step)

    def episodes(self, step: int, rows: Sequence[Row]) -> None:
        """Send a table of sample episodes."""
        data = {name: [row.get(name) for row in rows] for name in COLUMNS}
        self._mlflow.log_table(data, artifact_file="episodes.json")

    def close(self) -> None:
        """Finish the run."""
        self._mlflow.end_run()


class SwanLab:
    """SwanLab; offline, in ``swanlab/`` of the run's folder, without ``SWANLAB_API_KEY`` or ``SWANLAB_MODE``."""

    def __init__(self, name: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        import swanlab  # pyright: ignore[reportMissingImports] - an extra

        self._swanlab = swanlab
        offline = "SWANLAB_API_KEY" not in os.environ and "SWANLAB_MODE" not in os.environ
        swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            experiment_name=name,
            config=dict(settings),
            logdir=str(run_dir / "swanlab"),
            mode="offline" if offline else None,
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._swanlab.log(dict(values), step=step)

    def episodes(self, step: int, rows: Sequence[Row]) -> None:
        """Send a table of sample episodes."""
        table = self._swanlab.echarts.Table()
        table.add(list(COLUMNS), [["" if cell is None else str(cell) for cell in row] for row in _table(rows)])
        self._swanlab.log({"episodes": table}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._swanlab.finish()


TRACKERS: dict[str, Callable[[str, Path, Mapping[str, Any]], Tracker]] = {
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}
"""Name of a tracker, which is also its package -> what makes it from the run's name, folder and settings."""


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns settings by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return found
