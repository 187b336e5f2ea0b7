"""SIGUSR1 to a launcher: what it asks of the trainer, and what the run returns."""

import io
import signal
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console

from agentrl.config.load import load_recipe
from agentrl.host.stop_signals import interruptible
from agentrl.launch import run as run_module
from agentrl.launch.results import ExitReason, TrainResult
from agentrl.launch.save_and_stop import SavedAndStopped, on_request
from agentrl.train.checkpoint_state import STOP_FILE


def test_the_signal_asks_the_trainer_and_its_handler_is_gone_after_the_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with interruptible(on_request(tmp_path)):
        signal.raise_signal(signal.SIGUSR1)  # nothing is there to ask
        assert not list(tmp_path.iterdir())
        (tmp_path / "processes").mkdir()
        signal.raise_signal(signal.SIGUSR1)
        assert (tmp_path / "processes" / STOP_FILE).exists()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_run_that_saved_and_stopped_says_so_and_names_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(recipe: Any, run_dir: Path, *given: Any, **more: Any) -> NoReturn:
        (run_dir / "model").mkdir()  # of an earlier end
        (run_dir / "metrics.jsonl").write_text('{"step": 4, "time": 1.0}\n')
        raise SavedAndStopped

    monkeypatch.setattr(run_module, "train_recipe", saved)
    out = io.StringIO()
    recipe = load_recipe("arithmetic_grpo", [f"launch.run_dir={tmp_path}", "name=x"], device="cpu")
    result = run_module.run_recipe(recipe, resume=False, console=Console(file=out, width=200))
    assert isinstance(result, TrainResult)
    assert (result.exit_reason, result.steps, result.model) == (ExitReason.SAVED, 4, None)
    assert (
        f"saved and stopped, as SIGUSR1 asked; continue: agentrl runs resume x --run-dir {tmp_path}" in out.getvalue()
    )
