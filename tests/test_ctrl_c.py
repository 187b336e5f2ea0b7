"""Ctrl-C at thirty moments of a real run, from its start to its export: nothing is left behind."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from agentrl.core.weight_manifest import SHM, SHM_PREFIX
from tests.end_to_end import command, environment, metrics, overrides

PATIENCE = 900.0  # seconds, also on a machine that does other things
STEPS, SAVED_AT = 4, 2


def has(name: str) -> Callable[[Path], bool]:
    """Whether a run's folder holds a file of this name."""
    return lambda folder: any(folder.glob(name))


def steps(count: int) -> Callable[[Path], bool]:
    """Whether a run has recorded so many steps."""
    return lambda folder: (folder / "metrics.jsonl").is_file() and len(metrics(folder)) >= count


STAGES: dict[str, tuple[Callable[[Path], bool], float]] = {  # what is there, and how long the stage lasts, in seconds
    "launcher starts": (lambda folder: True, 3.0),
    "settings are written": (has("config.json"), 1.0),
    "servers load, controller reads data": (has("processes"), 3.0),
    "a server is ready": (has("processes/server-0.json"), 1.0),
    "controller is ready": (has("processes/controller.json"), 1.0),
    "trainer loads": (has("processes/torchrun-*"), 6.0),
    "first steps": (steps(1), 0.5),
    "checkpoint": (has("checkpoints/*"), 0.2),
    "last steps": (steps(STEPS), 0.3),
    "export": (has("model*"), 0.5),
}
MOMENTS = [(stage, part) for stage in STAGES for part in range(3)]


@contextlib.contextmanager
def begun(settings: list[str], temporary: Path) -> Iterator["subprocess.Popen[str]"]:
    """Starts a run whose temporary files go to a folder of its own; it is killed at the end, whatever happens."""
    process = subprocess.Popen(
        command("recipe", "run", "arithmetic_grpo", *settings),
        env={**environment(), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()


def processes_with(temporary: Path) -> list[psutil.Process]:
    """Live processes of a run, also those whose parent is gone: all inherit its temporary folder."""
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(psutil.Error):
            if process.info["status"] != psutil.STATUS_ZOMBIE and process.environ().get("TMPDIR") == str(temporary):
                found.append(process)
    return found


@pytest.mark.long
@pytest.mark.parametrize(("stage", "part"), MOMENTS)
def test_ctrl_c_leaves_nothing_at_any_moment(tiny_model: Path, tmp_path: Path, stage: str, part: int) -> None:
    folder, temporary = tmp_path / "x", tmp_path / "temporary"
    temporary.mkdir()
    reached, lasts = STAGES[stage]
    more = (f"trainer.total_steps={STEPS}", f"trainer.save_every={SAVED_AT}", "eval.every=2", "rollout.max_staleness=1")
    deadline = time.monotonic() + PATIENCE
    with begun(overrides(tiny_model, tmp_path, "x", *more), temporary) as process:
        while process.poll() is None and not reached(folder):
            assert time.monotonic() < deadline, f"{stage} never came"
            time.sleep(0.002)  # nothing tells of a stage
        time.sleep(random.Random(f"{stage}/{part}").uniform(0.0, lasts))  # some moment within it
        pids = {one.pid for one in processes_with(temporary)}
        if process.poll() is None:
            os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode in (0, 130), output
    assert "Traceback" not in output, output
    assert not processes_with(temporary), "a process is left, and with it its port"
    left = [one.name for one in SHM.iterdir() if one.name.startswith(SHM_PREFIX)]
    assert not [name for name in left if int(name.removeprefix(SHM_PREFIX).split("-")[0]) in pids]
    assert not list(temporary.rglob("*")), "a temporary file is left"
    assert not list(folder.glob("**/*.partial")), "half a file is left"
