"""Command lines of a run's processes, from a resolved recipe.

Guarantees: pure functions; a dry run prints exactly what a run would start.
"""

import os
import sys
from pathlib import Path

from agentrl.config.recipe import Recipe

# Threads that wait for work must sleep: server and trainer share the cores, and a spinning one steals the other's time.
CPU_ENV = {
    # Threads that wait spin for some ten microseconds, from one operator to the next, then sleep: another process
    # needs the cores.
    **{"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "0"},
    # Freed tensors stay with the process: pages taken anew for each step's gradients cost more than the step on a
    # virtual machine (docs/performance.md).
    **{"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(64 << 30), "MALLOC_TOP_PAD_": str(64 << 20)},
}


def embedded_server(recipe: Recipe, model: Path, ready_file: Path, index: int) -> list[str]:
    """The embedded engine, on a port it picks itself."""
    inference = recipe.inference
    command = [
        *(sys.executable, "-m", "agentrl.inference.engine"),
        *("--model", str(model)),
        *("--ready-file", str(ready_file)),
        *("--dtype", inference.dtype),
        *("--max-running", str(inference.max_running)),
        *("--context-length", str(inference.context_length)),
        *("--seed", str(recipe.seed + index)),
        *("--parent-pid", str(os.getpid())),
    ]
    if inference.threads:
        command += ["--threads", str(inference.threads)]
    if recipe.launch.device != "auto":
        command += ["--device", recipe.launch.device]
    return [*command, *inference.args]


def sglang_server(recipe: Recipe, model: Path, port: int) -> list[str]:
    """SGLang's own server; it needs to be told its port."""
    inference = recipe.inference
    dtype = {"auto": "auto", "float32": "float32", "bfloat16": "bfloat16"}[inference.dtype]
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(model)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", dtype),
        *("--context-length", str(inference.context_length)),
        *("--max-running-requests", str(inference.max_running)),
        *("--random-seed", str(recipe.seed)),
        "--skip-server-warmup",
        *inference.args,
    ]


def controller(
    recipe: Recipe, model: Path, run_dir: Path, urls: list[str], ready_file: Path, resume: bool
) -> list[str]:
    """The rollout controller."""
    command = [
        *(sys.executable, "-m", "agentrl.launch.controller_process"),
        *("--run-dir", str(run_dir)),
        *("--model", str(model)),
        *("--ready-file", str(ready_file)),
        *("--parent-pid", str(os.getpid())),
    ]
    for url in urls:
        command += ["--server", url]
    return [*command, "--resume"] if resume else command


def trainer(recipe: Recipe, model: Path, run_dir: Path, controller_url: str, resume: bool) -> list[str]:
    """Torchrun and its ranks; ``--standalone`` picks a free port for the rendezvous."""
    command = [
        *(sys.executable, "-m", "agentrl.launch.torchrun"),
        *("--standalone", "--nproc-per-node", str(recipe.trainer.nproc)),
        *("--module", "agentrl.train"),
        *("--run-dir", str(run_dir)),
        *("--model", str(model)),
        *("--controller", controller_url),
    ]
    return [*command, "--resume"] if resume else command
