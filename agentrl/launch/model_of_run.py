"""Finds the model that a run stands for: the one that it exported, or that of a checkpoint.

Guarantees: what is no run is returned as it is; a checkpoint's model is written once, into the run's folder, by a
process of its own, so that nothing here imports torch.
"""

import subprocess
import sys
from pathlib import Path

from rich.console import Console

from agentrl.config.errors import ConfigError
from agentrl.config.load import recipe_of_run
from agentrl.data.models import resolve_model
from agentrl.host.entry import REFUSED, refusal_in
from agentrl.train.checkpoint_state import STATE_FILE, exported_step, latest_checkpoint, read_state

RUNS = Path("runs")


def model_of_run(model: str, console: Console | None = None) -> str:
    """Returns the folder of a run's model, if ``model`` is a run's name or folder, or a checkpoint's; else ``model``.

    Args:
        model: Name or path. A run that goes on, or was cut, stands for its latest checkpoint.
        console: Console to say on what is written.

    Raises:
        ConfigError: The run has neither a model nor a checkpoint, or the checkpoint holds no whole model.
    """
    given = Path(model)
    if (given / STATE_FILE).is_file() and given.parent.name == "checkpoints":
        return str(_written(given, console))
    for folder in (given, RUNS / model):
        if not (folder / "checkpoints").is_dir():
            continue
        newest = latest_checkpoint(folder / "checkpoints")
        exported = exported_step(folder / "model")
        if exported is not None and (newest is None or exported >= read_state(newest)["step"]):
            return str(folder / "model")
        if newest is None:
            raise ConfigError(f"{folder} is a run without a model and without a checkpoint")
        return str(_written(newest, console))
    return model


def _written(checkpoint: Path, console: Console | None) -> Path:
    """Returns the folder of a checkpoint's model, written if it is not there."""
    run_dir = checkpoint.parent.parent
    target = run_dir / f"model-{checkpoint.name}"
    if exported_step(target) is not None:
        return target
    if console is not None:
        text = f"model   writing that of {checkpoint} to {target}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    start = resolve_model(recipe_of_run(run_dir).model.name).path
    command = [sys.executable, "-m", "agentrl.train.checkpoint_model", str(checkpoint), str(start), str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == REFUSED:
        raise ConfigError(refusal_in(done.stderr))
    if done.returncode:
        raise ConfigError(f"the model of {checkpoint} could not be written: {done.stderr.strip()[-600:]}")
    return target
