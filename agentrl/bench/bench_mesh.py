"""Compares what a mesh of ranks does in parts with one rank that does it all, and two hosts with one.

Guarantees: all ranks are on this machine, so the figures hold no network; both sides of a ratio do the same work, in
turns; times are of the slowest rank.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agentrl.bench.mesh_sides import RANKS
from agentrl.bench.report import default_model

SIDES = "agentrl.bench.mesh_sides"


def run(model: str | None = None, repeats: int = 5) -> dict[str, list[float]]:
    """Measure ``repeats`` times.

    Args:
        model: Model folder; by default the 135M model of the recipes.
        repeats: Number of measurements of each figure.

    Returns:
        ``load_peak_vs_shard``: peak of anonymous memory of the rank that takes most while four ranks load a model, over
        its shard; ``export_vs_gather``: seconds of an export by four ranks, over one that is gathered to
        rank 0; ``hosts_vs_local``: seconds of an update on two torchrun nodes of one rank, over one node of two; and
        what they are computed from.
    """
    from agentrl.host.cpu_env import CPU_ENV

    path = model or default_model()
    figures: dict[str, list[float]] = {}
    for _ in range(repeats):
        ranks = _side(RANKS, [sys.executable, "-m", SIDES, "load", path], CPU_ENV)
        for name in ("load_peak_vs_shard", "load_peak_mb", "load_s"):
            figures.setdefault(name, []).append(max(one[name] for one in ranks))
    ranks = _side(RANKS, [sys.executable, "-m", SIDES, "export", path], CPU_ENV, str(repeats))
    for name in ("export_s", "gather_s"):
        figures[name] = [max(one[name][repeat] for one in ranks) for repeat in range(repeats)]
    figures["export_vs_gather"] = [
        own / whole for own, whole in zip(figures["export_s"], figures["gather_s"], strict=True)
    ]
    for _ in range(max(1, repeats // 2)):  # in turns; each measures as many updates
        for name, nodes in (("hosts_step_s", 2), ("local_step_s", 1)):
            figures.setdefault(name, []).append(min(_steps(path, nodes, str(repeats))))
    figures["hosts_vs_local"] = [
        two / one for two, one in zip(figures["hosts_step_s"], figures["local_step_s"], strict=True)
    ]
    return figures


def _steps(model: str, nodes: int, repeats: str) -> list[float]:
    """Returns the seconds of the updates of two ranks on one or two torchrun nodes."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes)]
    torchrun += ["--nproc-per-node", str(2 // nodes), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    from agentrl.host.cpu_env import CPU_ENV

    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        commands = [
            [
                *(*torchrun, "--node-rank", str(node), "--log-dir", f"{folder}/torchrun-{node}"),
                *("--module", SIDES, "step", model, folder, repeats),
            ]
            for node in range(nodes)
        ]
        _all(commands, CPU_ENV)
        ranks = _read(folder, 2)
    return [max(both) for both in zip(*(one["step_s"] for one in ranks), strict=True)]


def _side(ranks: int, command: Sequence[str], env: dict[str, str], *more: str) -> list[dict]:
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        _all([[*command, folder, *more]], env)
        return _read(folder, ranks)


def _read(folder: str, ranks: int) -> list[dict]:
    return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def _all(commands: Sequence[Sequence[str]], env: dict[str, str]) -> None:
    """Runs commands at the same time.

    Raises:
        RuntimeError: One of them failed.
    """
    import os

    started = [subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **env}) for command in commands]
    if any(process.wait() for process in started):
        raise RuntimeError(f"{' '.join(commands[0])} failed")
