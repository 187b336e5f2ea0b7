"""Command lines of a run's processes, from a resolved recipe.

Guarantees: pure functions; a dry run prints exactly what a run would start.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.host.compute_dtype import resolved_dtype

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
        *(sys.executable, "-m", "agentrl.engine"),
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
    return [*command, *map(str, inference.args)]


def sglang_server(recipe: Recipe, model: Path, port: int, python: str) -> list[str]:
    """SGLang's own server; it needs to be told its port."""
    inference = recipe.inference
    command = [
        *tethered(python, "-m", "sglang.launch_server"),
        *("--model-path", str(model)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", resolved_dtype(inference.dtype, recipe.launch.device)),
        *("--context-length", str(inference.context_length)),
        *("--max-running-requests", str(inference.max_running)),
        *("--random-seed", str(recipe.seed)),
        "--skip-server-warmup",
    ]
    if recipe.launch.device == "cpu":
        tokens = inference.max_running * inference.context_length
        command += [
            *("--device", "cpu", "--attention-backend", "torch_native", "--mem-fraction-static", "0.3"),
            *("--max-total-tokens", str(tokens), "--disable-overlap-schedule", "--sleep-on-idle"),
        ]
    return [*command, *map(str, inference.args)]


def vllm_server(recipe: Recipe, model: Path, port: int, python: str) -> list[str]:
    """VLLM's own server, with the calls and the logprobs that training needs."""
    inference = recipe.inference
    command = [
        *tethered(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", resolved_dtype(inference.dtype, recipe.launch.device)),
        *("--max-model-len", str(inference.context_length)),
        *("--max-num-seqs", str(inference.max_running)),
        *("--seed", str(recipe.seed)),
        *("--logprobs-mode", "processed_logprobs"),  # of the distribution that was sampled from
        "--enable-scale-out",  # its answers tell the policy version of each token
    ]
    if recipe.launch.device == "cpu":
        command.append("--enforce-eager")
    return [*command, *map(str, inference.args)]


SERVER_ENV = {
    "sglang": {"HF_HUB_OFFLINE": "1"},
    "vllm": {"HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"},  # without it there are no calls for weights
}
SERVER_ENV_CPU = {"vllm": {"VLLM_CPU_KVCACHE_SPACE": "2"}}  # GB


def tethered(*command: str) -> list[str]:
    """A foreign command that ends when we do, even by ``kill -9``."""
    return [sys.executable, "-m", "agentrl.launch.tethered", str(os.getpid()), *command]


def controller(
    recipe: Recipe,
    model: Path,
    run_dir: Path,
    urls: list[str],
    ready_file: Path,
    resume: bool,
    teacher: Sequence[str] = (),
) -> list[str]:
    """The rollout controller; ``teacher`` are the URLs of a teacher's servers."""
    command = [
        *(sys.executable, "-m", "agentrl.launch.controller_process"),
        *("--run-dir", str(run_dir)),
        *("--model", str(model)),
        *("--ready-file", str(ready_file)),
        *("--parent-pid", str(os.getpid())),
    ]
    for url in urls:
        command += ["--server", url]
    for url in teacher:
        command += ["--teacher", url]
    return [*command, "--resume"] if resume else command


def trainer(recipe: Recipe, model: Path, run_dir: Path, controller_url: str, resume: bool) -> list[str]:
    """The ranks of a trainer that learns from episodes."""
    return _torchrun(recipe, "agentrl.train", model, run_dir, resume, "--controller", controller_url)


def lines_trainer(recipe: Recipe, model: Path, run_dir: Path, ready_file: Path, resume: bool) -> list[str]:
    """The ranks of a trainer that learns from lines."""
    return _torchrun(recipe, "agentrl.supervised", model, run_dir, resume, "--ready-file", str(ready_file))


def _torchrun(recipe: Recipe, module: str, model: Path, run_dir: Path, resume: bool, *more: str) -> list[str]:
    """Torchrun and its ranks; ``--standalone`` picks a free port for the rendezvous."""
    command = [
        *(sys.executable, "-m", "agentrl.launch.torchrun"),
        *("--standalone", "--nproc-per-node", str(recipe.trainer.nproc)),
        *("--module", module),
        *("--run-dir", str(run_dir)),
        *("--model", str(model)),
        *more,
    ]
    return [*command, "--resume"] if resume else command
