"""Command lines of a run's processes, from a resolved recipe.

Guarantees: pure functions; a dry run prints exactly what a run would start.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from agentrl.config.recipe import Recipe
from agentrl.inference.kinds.kind import ServerKind, ServerStart


class Meeting(NamedTuple):
    """Place where the ranks of several machines meet.

    Attributes:
        address: Address of the head.
        port: Port of the ranks' store there.
        node_rank: Number of this machine.
    """

    address: str
    port: int
    node_rank: int


ALONE = Meeting("", 0, 0)  # all ranks are on this machine


def server(kind: ServerKind, start: ServerStart, args: Iterable[str | int | float]) -> list[str]:
    """Command of an inference server with the flags of ``inference.args``; the server ends when this process ends."""
    return tethered(*kind.command(start), *map(str, args))


def tethered(*command: str) -> list[str]:
    """Wraps a command so that it ends when this process ends, even by ``kill -9``."""
    return [sys.executable, "-m", "agentrl.launch.tethered", str(os.getpid()), *command]


def controller(
    recipe: Recipe, model: Path, run_dir: Path, servers_file: Path, ready_file: Path, resume: bool
) -> list[str]:
    """Command of the rollout controller; ``servers_file`` will hold the URLs of the servers and of the teacher's."""
    command = [
        *(sys.executable, "-m", "agentrl.launch.controller_process"),
        *("--run-dir", str(run_dir)),
        *("--model", str(model)),
        *("--servers-file", str(servers_file)),
        *("--ready-file", str(ready_file)),
        *("--parent-pid", str(os.getpid())),
    ]
    return [*command, "--resume"] if resume else command


def rollout_worker(model: Path, run_dir: Path, index: int) -> list[str]:
    """Command of rollout worker number ``index``."""
    return [
        *(sys.executable, "-m", "agentrl.launch.rollout_worker"),
        *("--run-dir", str(run_dir)),
        *("--model", str(model)),
        *("--index", str(index)),
        *("--parent-pid", str(os.getpid())),
    ]


def model_check(model: Path, run_dir: Path) -> list[str]:
    """Command that refuses a model that cannot be trained, before any weights are read."""
    return [sys.executable, "-m", "agentrl.train.model_check", "--run-dir", str(run_dir), "--model", str(model)]


def trainer(
    recipe: Recipe, model: Path, run_dir: Path, controller_url: str, resume: bool, meeting: Meeting = ALONE
) -> list[str]:
    """Command of a trainer that learns from episodes, with this machine's ranks."""
    return _torchrun(recipe, "agentrl.train", model, run_dir, resume, meeting, "--controller", controller_url)


def examples_trainer(
    recipe: Recipe, model: Path, run_dir: Path, ready_file: Path, resume: bool, meeting: Meeting = ALONE
) -> list[str]:
    """Command of a trainer that learns from examples, with this machine's ranks."""
    return _torchrun(recipe, "agentrl.supervised", model, run_dir, resume, meeting, "--ready-file", str(ready_file))


def _torchrun(
    recipe: Recipe, module: str, model: Path, run_dir: Path, resume: bool, meeting: Meeting, *more: str
) -> list[str]:
    """Command of torchrun: alone it picks a free port for its ranks; with others it meets them at the head.

    torchrun makes a folder for its workers' logs, by default one in the temporary folder that it leaves there.
    """
    where = ["--standalone"]
    if meeting is not ALONE:
        where = ["--nnodes", str(recipe.trainer.nodes), "--node-rank", str(meeting.node_rank)]
        where += ["--master-addr", meeting.address, "--master-port", str(meeting.port)]
    command = [
        *(sys.executable, "-m", "agentrl.launch.torchrun"),
        *where,
        *("--nproc-per-node", str(recipe.trainer.nproc)),
        *("--log-dir", str(run_dir / "processes" / f"torchrun-{meeting.node_rank}")),
        *("--module", module),
        *("--run-dir", str(run_dir)),
        *("--model", str(model)),
        *more,
    ]
    return [*command, "--resume"] if resume else command
