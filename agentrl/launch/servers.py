"""Inference servers of a run: the model they load, and their start.

Guarantees: servers that were named by URL are never started or stopped by us; a server that does not come up is an
error with the tail of its log.
"""

import contextlib
import socket
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import httpx
from rich.console import Console

from agentrl.config.errors import UserError
from agentrl.config.recipe import InferenceConfig, Recipe
from agentrl.data.models import ResolvedModel, require_chat_template, resolve_model
from agentrl.launch import commands
from agentrl.launch.supervisor import Child, ChildFailed, Supervisor

READY_POLL_SECONDS = 1.0
READY_PATHS = {"sglang": "/ready", "vllm": "/health"}


def find_model(recipe: Recipe, console: Console) -> ResolvedModel:
    """Resolve the model's name, check that it can chat, and say where it came from."""
    model = resolve_model(recipe.model.name, say=lambda text: console.print(text, highlight=False, soft_wrap=True))
    require_chat_template(model.path)
    console.print(f"model   {model.source}", highlight=False, soft_wrap=True)
    return model


def start_servers(
    recipe: Recipe, model: Path, processes: Path, supervisor: Supervisor, kind: str = "server"
) -> list[str]:
    """Start the recipe's servers and return their URLs when all are ready.

    Args:
        recipe: For ``inference``.
        model: Folder to load.
        processes: Folder for the files in which servers announce themselves.
        supervisor: Owns the processes.
        kind: What they are called; one of a kind may die while another lives.
    """
    inference = recipe.inference
    beside_trainer = recipe.trainer.type is not None and recipe.launch.device != "cuda"
    niceness = inference.niceness if beside_trainer else 0
    waiting: list[tuple[Child, Path | str]] = []
    for index in range(inference.servers):
        name = f"{kind}-{index}"
        if inference.engine == "embedded":
            ready = processes / f"{name}.json"
            command = commands.embedded_server(recipe, model, ready, index)
            child = supervisor.start(name, command, env=commands.CPU_ENV, niceness=niceness, peer=kind)
            waiting.append((child, ready))
        else:
            port = free_port()
            make = commands.sglang_server if inference.engine == "sglang" else commands.vllm_server
            command = make(recipe, model, port, server_python(inference))
            child = supervisor.start(name, command, env=server_env(recipe), niceness=niceness, peer=kind)
            waiting.append((child, f"http://127.0.0.1:{port}{READY_PATHS[inference.engine]}"))
    urls: list[str] = []
    for child, where in waiting:
        if isinstance(where, Path):
            urls.append(supervisor.wait_ready(child, where, inference.start_timeout)["url"])
        else:
            wait_http(supervisor, child, where, inference.start_timeout)
            urls.append(where.rpartition("/")[0])
    return urls


def free_port() -> int:
    """A loopback port that is free now; for servers that cannot pick one themselves."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def server_python(inference: InferenceConfig, section: str = "inference") -> str:
    """The interpreter that a foreign server runs in; ``section`` is where the recipe may name it.

    Raises:
        UserError: None is found that has it.
    """
    if inference.python is not None:
        return inference.python
    if find_spec(inference.engine) is not None:
        return sys.executable
    beside = Path(f".venv-{inference.engine}") / "bin" / "python"
    if beside.is_file():
        return str(beside.absolute())
    raise UserError(
        f"{section}.engine={inference.engine} is not installed: neither this interpreter has it nor {beside}; install "
        f"it into an environment of its own (make {inference.engine} does so for a CPU) and name its interpreter with "
        f"{section}.python=PATH"
    )


def server_env(recipe: Recipe) -> dict[str, str]:
    """What a foreign server's environment has beyond ours."""
    engine = recipe.inference.engine
    env = dict(commands.SERVER_ENV[engine])
    if recipe.launch.device == "cpu":
        env |= commands.SERVER_ENV_CPU.get(engine, {})
        if recipe.inference.threads:
            env["OMP_NUM_THREADS"] = str(recipe.inference.threads)
    return env


def wait_http(supervisor: Supervisor, child: Child, url: str, timeout: float) -> None:
    """Wait until ``GET url`` answers 200.

    Raises:
        ChildFailed: The server ended or took too long.
    """
    deadline = time.monotonic() + timeout
    while True:
        supervisor.check()
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5.0, trust_env=False).status_code == 200:
                return
        if child.process.poll() is not None or time.monotonic() > deadline:
            raise ChildFailed(f"{child.name} did not come up at {url}; the end of {child.log}:\n{child.tail()}")
        time.sleep(READY_POLL_SECONDS)
