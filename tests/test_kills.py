"""Real runs that are killed with ``kill -9``, resumed, and prove that each draw was trained once."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.config.errors import UserError
from agentrl.launch.run_folders import check_journal, live_status, run_info
from agentrl.train.checkpoint_state import exported_step
from tests.end_to_end import SECONDS, command, environment, metrics, overrides, processes_of, run

Seen = Callable[[dict[str, Any]], bool]


def doing(process: str, words: str) -> Seen:
    """Whether a process of a run's status does something."""
    return lambda status: any(words in one["doing"] for one in status["waits"] if one["process"] == process)


MOMENTS: dict[str, tuple[Seen, str]] = {  # when it is killed, and what: words of its command line
    "generating": (doing("controller", "runs "), "agentrl.launch.controller_process"),
    "publishing": (doing("trainer", "waits until the servers have loaded"), "recipe run"),
    "checkpointing": (doing("trainer", "writes a checkpoint"), "agentrl.train"),
    "evaluating": (lambda status: status["evaluating"] not in (None, 0), "agentrl.engine"),
}
PATIENCE = 900.0  # seconds until a run is at its moment, also on a machine that does other things
SETTINGS = ("trainer.total_steps=10000", "trainer.save_every=2", "eval.every=1", "rollout.max_staleness=1")


@contextmanager
def begun(settings: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """Starts a run, and kills its launcher at the end, whatever happens."""
    process = subprocess.Popen(
        command("recipe", "run", "arithmetic_grpo", *settings),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()


def wait_for(folder: Path, seen: Seen, process: "subprocess.Popen[str]") -> None:
    """Ask a run for its status until it is at a moment of a later step."""
    deadline = time.monotonic() + PATIENCE
    while True:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        if (folder / "processes" / "controller.json").is_file() and list(folder.glob("checkpoints/step-*")):
            try:
                status = live_status(folder)
            except UserError:
                continue
            if status["step"] >= 3 and seen(status):
                return
        time.sleep(0.002)  # a moment lasts some milliseconds, and nothing tells of it


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_that_was_killed_trains_each_draw_once(tiny_model: Path, tmp_path: Path, moment: str, ranks: int) -> None:
    seen, victim = MOMENTS[moment]
    folder = tmp_path / "x"
    left = set(Path(tempfile.gettempdir()).glob("torchelastic_*"))
    settings = overrides(tiny_model, tmp_path, "x", *SETTINGS, f"trainer.nproc={ranks}")
    with begun(settings) as process:
        wait_for(folder, seen, process)
        refused = run("runs", "resume", "x", "--run-dir", str(tmp_path))
        assert refused.returncode == 2 and f"is still going: process {process.pid} on" in refused.stdout
        wait_for(folder, seen, process)
        found = [one for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                 if victim in " ".join(one.cmdline())]  # fmt: skip
        os.kill(found[-1].pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode != 0, output
    killed = run_info(folder)
    assert killed.state == ("killed" if victim == "recipe run" else "failed") and killed.checkpoint is not None
    steps = killed.checkpoint + 3
    result = run("runs", "resume", "x", f"trainer.total_steps={steps}", "--run-dir", str(tmp_path))
    assert result.returncode == 0, result.stdout
    proof = check_journal(run_info(folder))
    assert proof.resumes == 1 and proof.steps == steps and proof.outcomes["trained"] == 4 * steps
    assert exported_step(folder / "model") == steps and metrics(folder)[-1]["step"] == steps
    assert run("runs", "check", "x", "--run-dir", str(tmp_path)).returncode == 0
    assert processes_of(folder) == []
    assert set(Path(tempfile.gettempdir()).glob("torchelastic_*")) <= left


@pytest.mark.long
def test_a_run_that_was_killed_before_its_export_is_finished_without_a_step(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    settings = overrides(tiny_model, tmp_path, "x", "trainer.total_steps=2")
    with begun(settings) as process:
        while not (folder / "checkpoints" / "step-000002" / "state.json").is_file():
            assert process.poll() is None, process.communicate()[0]
        process.kill()
        process.communicate(timeout=SECONDS)
    (folder / "model").exists() and (folder / "model").rename(tmp_path / "model")  # it was quicker than the kill
    before = metrics(folder)
    result = run("runs", "resume", "x", "--run-dir", str(tmp_path))
    assert result.returncode == 0, result.stdout
    assert exported_step(folder / "model") == 2 and metrics(folder)[-1]["step"] == 2
    assert [one for one in metrics(folder) if "train/loss" in one] == [one for one in before if "train/loss" in one]
    again = run("runs", "resume", "x", "--run-dir", str(tmp_path))
    assert again.returncode == 2 and "has made all its 2 steps" in again.stdout
    assert run_info(folder).state == "finished"
