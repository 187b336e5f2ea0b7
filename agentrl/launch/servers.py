"""Finds the model of a run, and starts its inference servers.

Guarantees: servers that the recipe names by URL are never started or stopped; if a server does not start, the error
carries the tail of its log.
"""

import contextlib
import shlex
import socket
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import httpx
from rich.console import Console

from agentrl.config.errors import UserError
from agentrl.config.recipe import InferenceConfig, Recipe
from agentrl.core.image_reader import has_processor, resizes_with_pillow
from agentrl.data.models import ResolvedModel, require_chat_template, resolve_model
from agentrl.host.compute_dtype import resolved_dtype
from agentrl.host.key_guard import KEY_ENV
from agentrl.inference.http import OPEN, Access
from agentrl.inference.kinds.kind import ImageReading, ServerStart, server_kind
from agentrl.launch import commands
from agentrl.launch.placement import devices_beside, sizes, visible_gpus
from agentrl.launch.supervisor import Child, ChildFailed, Supervisor
from agentrl.observe.say import say

READY_POLL_SECONDS = 1.0
LOOPBACK = "127.0.0.1"


def find_model(recipe: Recipe, console: Console) -> ResolvedModel:
    """Find the model by its name, check that it has a chat template or gets one, and print its source.

    For a model with images at ``inference.urls``, print what such servers must have been started with, too.
    """
    model = resolve_model(recipe.model.name, say=lambda text: say(console, text))
    if recipe.model.chat_template in (None, "training"):  # else the recipe brings one
        require_chat_template(model.path)
    say(console, f"model   {model.source}")
    reading = image_reading(recipe, model.path)
    if reading is not None and recipe.inference.urls:
        env, flags = server_kind(recipe.inference.engine).for_images(reading)
        if words := shlex.join([*(f"{name}={value}" for name, value in env.items()), *flags]):
            say(console, f"images  servers at inference.urls read them as this run does if started with {words}")
    return model


def start_servers(
    recipe: Recipe,
    model: Path,
    processes: Path,
    supervisor: Supervisor,
    role: str = "server",
    host: str = "",
    access: Access = OPEN,
    gpus_before: int = 0,
) -> list[str]:
    """Start the recipe's servers and return their URLs when all are ready.

    Args:
        recipe: Recipe with the settings of the servers.
        model: Folder of the model to load.
        processes: Folder for the ready files that servers write.
        supervisor: Supervisor that starts the processes.
        role: Prefix of the processes' names; the run continues while one server of a role lives.
        host: Address of this machine for callers on others; empty for the loopback interface.
        access: Key and trust of the servers, for ``host``.
        gpus_before: Number of GPUs of this machine that other servers take before these.
    """
    known = visible_gpus()
    inference, kind = recipe.inference, server_kind(recipe.inference.engine)
    beside_trainer = recipe.trainer.type is not None and recipe.launch.device != "cuda"
    niceness = inference.niceness if beside_trainer else 0
    waiting: list[tuple[Child, ServerStart]] = []
    for index in range(inference.servers):
        name = f"{role}-{index}"
        start = server_start(recipe, model, processes / f"{name}.json", index, host)
        command = commands.server(kind, start, inference.args)
        own = devices_beside(recipe, index, known, gpus_before)
        env = {**kind.env(start), **own, KEY_ENV: access.key}  # a key of the user's is for servers elsewhere
        child = supervisor.start(name, command, env=env, niceness=niceness, peer=role)
        waiting.append((child, start))
    urls: list[str] = []
    for child, start in waiting:
        if kind.ready_path is None:
            urls.append(supervisor.wait_ready(child, start.ready_file, inference.start_timeout)["url"])
        else:
            urls.append(url_of(start))
            wait_http(supervisor, child, f"{urls[-1]}{kind.ready_path}", inference.start_timeout, access)
    return urls


def url_of(start: ServerStart) -> str:
    """Returns the URL of a server whose port was chosen before its start."""
    host = f"[{start.host}]" if ":" in start.host else start.host
    return f"{'https' if start.certificate else 'http'}://{host}:{start.port}"


def server_start(recipe: Recipe, model: Path, ready_file: Path, index: int, host: str = "") -> ServerStart:
    """Returns the start options of the recipe's server number ``index``.

    Args:
        recipe: Recipe with the settings of the servers.
        model: Folder of the model to load.
        ready_file: File that the server writes when it is ready, if its kind does.
        index: Number of the server.
        host: Address to listen on, for callers on other machines: the server is behind its key, and speaks TLS if the
            recipe does.
    """
    inference, device, tls, apart = recipe.inference, recipe.launch.device, recipe.launch.tls, bool(host)
    host = host or LOOPBACK
    return ServerStart(
        model=model,
        python=server_python(inference),
        port=free_port(host) if server_kind(inference.engine).ready_path is not None else 0,
        ready_file=ready_file,
        dtype=resolved_dtype(inference.dtype, device),
        device=device,
        context_length=inference.context_length,
        max_running=inference.max_running,
        threads=inference.threads,
        seed=recipe.seed + index,
        host=host,
        certificate=(tls.certificate or "") if apart else "",
        private_key=(tls.key or "") if apart else "",
        sizes=sizes(recipe),
        guarded=apart,
        trust=recipe.model.trust_remote_code,
        experts=recipe.trainer.replay_routing,
        images=image_reading(recipe, model),
    )


def image_reading(recipe: Recipe, model: Path) -> ImageReading | None:
    """Returns how the recipe's servers must read images; ``None`` for a model of text."""
    if not has_processor(model):
        return None
    changes = recipe.trainer.type is not None and "vision" not in recipe.trainer.freeze
    return ImageReading(resizes_with_pillow(), changes)


def free_port(host: str = LOOPBACK) -> int:
    """Returns a port of an address that is free now, for servers that cannot pick one themselves."""
    with contextlib.closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def server_python(inference: InferenceConfig, section: str = "inference") -> str:
    """Returns the Python interpreter of a server; ``section`` is the recipe section that may name it.

    Raises:
        UserError: No interpreter with the engine's package is found.
    """
    kind = server_kind(inference.engine)
    if inference.python is not None:
        return inference.python
    if kind.package is None or find_spec(kind.package) is not None:
        return sys.executable
    beside = Path(f".venv-{kind.package}") / "bin" / "python"
    if beside.is_file():
        return str(beside.absolute())
    raise UserError(
        f"{section}.engine={inference.engine} is not installed: neither this interpreter has it nor {beside}; "
        f"{kind.install} and name its interpreter with {section}.python=PATH"
    )


def wait_http(supervisor: Supervisor, child: Child, url: str, timeout: float, access: Access = OPEN) -> None:
    """Wait until ``GET url`` answers 200.

    Raises:
        ChildFailed: The server ended or took too long.
    """
    deadline = time.monotonic() + timeout
    while True:
        supervisor.check()
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(url, timeout=5.0, trust_env=False, headers=access.headers, verify=access.trust)
            if answer.status_code == 200:
                return
        if child.process.poll() is not None or time.monotonic() > deadline:
            raise ChildFailed(f"{child.name} did not answer at {url}; the end of {child.log}:\n{child.tail()}")
        time.sleep(READY_POLL_SECONDS)
