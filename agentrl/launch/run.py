"""``agentrl recipe run``: a run from its recipe to its outputs.

Guarantees: what can be refused is refused before a process starts; whatever ends the run (success, a failing child, Ctrl-C) leaves
no process, port or shared memory behind; outputs stand in ``runs/<name>/``.
"""

import contextlib
import json
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from agentrl.config.recipe import Recipe
from agentrl.core.process import write_json
from agentrl.data.models import ResolvedModel, require_chat_template, resolve_model
from agentrl.launch import commands
from agentrl.launch.supervisor import Child, ChildFailed, Supervisor
from agentrl.observe.curve import draw_curve
from agentrl.observe.live import LiveView
from agentrl.observe.summary import summary_table
from agentrl.train.checkpoint_state import latest_checkpoint, read_state
from agentrl.train.controller_client import SECRET_ENV

STOP_SIGNAL_CODE = 130  # the shell's code for a process ended by Ctrl-C


class RunError(ValueError):
    """The run cannot start; the message says what to change."""


def run_recipe(recipe: Recipe, *, resume: bool, console: Console) -> int:
    """Train as the recipe says.

    Returns:
        Exit code: 0, 1 when a process failed, 130 after Ctrl-C.

    Raises:
        RunError: The run cannot start.
    """
    started = time.monotonic()
    run_dir = prepare_run_dir(recipe, resume=resume)
    model = find_model(recipe, console)
    check_disk(recipe, model.path, run_dir)
    write_json(run_dir / "config.json", recipe.model_dump(mode="json"))
    console.print(f"run     {run_dir}")
    supervisor = Supervisor(run_dir / "logs")
    try:
        with LiveView(recipe, run_dir, console) as view:
            _train(recipe, model.path, run_dir, supervisor, view, resume=resume)
    except KeyboardInterrupt:
        console.print(f"\nstopped. Go on with: agentrl recipe run RECIPE name={recipe.name} --resume")
        return STOP_SIGNAL_CODE
    except ChildFailed as error:
        console.print(f"[red]{_escape(str(error))}[/red]", highlight=False)
        return 1
    finally:
        supervisor.stop()
        if (run_dir / "metrics.jsonl").is_file():
            draw_curve(run_dir / "metrics.jsonl", run_dir / "reward.png", title=recipe.name)
    _report(run_dir, console, time.monotonic() - started)
    return 0


def prepare_run_dir(recipe: Recipe, *, resume: bool) -> Path:
    """``runs/<name>``, new or to be resumed.

    Raises:
        RunError: It exists and ``resume`` is not set, or the other way round.
    """
    run_dir = Path(recipe.launch.run_dir) / recipe.name
    exists = (run_dir / "config.json").is_file()
    if exists and not resume:
        raise RunError(
            f"a run named {recipe.name!r} exists in {run_dir}: continue it with --resume, or choose another with name=NEW"
        )
    if resume:
        checkpoint = latest_checkpoint(run_dir / "checkpoints")
        if checkpoint is None:
            raise RunError(f"nothing to resume: {run_dir / 'checkpoints'} holds no complete checkpoint")
        step = read_state(checkpoint)["step"]
        if step >= recipe.trainer.total_steps:
            raise RunError(f"run {recipe.name!r} has done its {step} steps; give it more with trainer.total_steps=N")
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def find_model(recipe: Recipe, console: Console) -> ResolvedModel:
    """Resolve the model's name and check that it can chat."""
    model = resolve_model(recipe.model.name)
    require_chat_template(model.path)
    console.print(f"model   {model.source}", highlight=False)
    return model


def check_disk(recipe: Recipe, model: Path, run_dir: Path) -> None:
    """Refuse a run whose checkpoints cannot fit.

    Raises:
        RunError: Too little space.
    """
    parameters = sum(f.stat().st_size for f in model.glob("*.safetensors"))
    checkpoints = 3 * parameters * (recipe.trainer.keep_checkpoints + 1)  # parameters and two moments; one more while writing
    needed = checkpoints + parameters
    free = shutil.disk_usage(run_dir).free
    if free < needed:
        raise RunError(
            f"{run_dir} has {free / 1e9:.1f} GB free, checkpoints and the exported model need up to {needed / 1e9:.1f} GB: "
            "free some space, or choose another place with launch.run_dir=DIR"
        )


def _train(recipe: Recipe, model: Path, run_dir: Path, supervisor: Supervisor, view: LiveView, *, resume: bool) -> None:
    shared_env = {SECRET_ENV: secrets.token_urlsafe(24), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    processes = run_dir / "processes"
    shutil.rmtree(processes, ignore_errors=True)
    processes.mkdir()
    view.state("starting the inference server")
    urls = list(recipe.inference.urls) or start_servers(recipe, model, processes, supervisor)
    view.state("starting the controller")
    ready = processes / "controller.json"
    controller = supervisor.start(
        "controller", commands.controller(recipe, model, run_dir, urls, ready, resume), env=shared_env
    )
    announced = supervisor.wait_ready(controller, ready, recipe.inference.start_timeout)
    view.state(f"data: {announced['data']}")
    trainer = supervisor.start(
        "trainer",
        commands.trainer(recipe, model, run_dir, announced["url"], resume),
        env={**shared_env, **commands.CPU_ENV},
    )
    follow = MetricsTail(run_dir / "metrics.jsonl")

    def poll() -> None:
        for record in follow.new():
            view.update(record)

    supervisor.wait([controller, trainer], poll)
    poll()


def start_servers(recipe: Recipe, model: Path, processes: Path, supervisor: Supervisor) -> list[str]:
    """Start the recipe's servers and return their URLs when all are ready."""
    inference = recipe.inference
    beside_trainer = recipe.trainer.type is not None and recipe.launch.device != "cuda"
    niceness = inference.niceness if beside_trainer else 0
    waiting: list[tuple[Child, Path | str]] = []
    for index in range(inference.servers):
        name = f"server-{index}"
        if inference.engine == "embedded":
            ready = processes / f"{name}.json"
            command = commands.embedded_server(recipe, model, ready, index)
            waiting.append((supervisor.start(name, command, env=commands.CPU_ENV, niceness=niceness), ready))
        else:
            port = free_port()
            command = commands.sglang_server(recipe, model, port)
            waiting.append((supervisor.start(name, command), f"http://127.0.0.1:{port}"))
    urls: list[str] = []
    for child, where in waiting:
        if isinstance(where, Path):
            urls.append(supervisor.wait_ready(child, where, inference.start_timeout)["url"])
        else:
            _wait_http(supervisor, child, where, inference.start_timeout)
            urls.append(where)
    return urls


def free_port() -> int:
    """A loopback port that is free now; for servers that cannot pick one themselves."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_http(supervisor: Supervisor, child: Child, url: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        supervisor.check()
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/ready", timeout=5.0, trust_env=False).status_code == 200:
                return
        if child.process.poll() is not None or time.monotonic() > deadline:
            raise ChildFailed(f"{child.name} did not come up at {url}; the end of {child.log}:\n{child.tail()}")
        time.sleep(1.0)


class MetricsTail:
    """Reads a growing ``metrics.jsonl``.

    Args:
        path: The file; it may not exist yet. What stands in it already is skipped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.is_file() else 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Records that were completed since the last call."""
        if not self._path.is_file():
            return
        with open(self._path, encoding="utf-8") as file:
            file.seek(self._offset)
            while (line := file.readline()).endswith("\n"):
                self._offset = file.tell()
                yield json.loads(line)


def _report(run_dir: Path, console: Console, seconds: float) -> None:
    evaluations = sorted(run_dir.glob("eval-[0-9]*.json"))
    if len(evaluations) >= 2:
        before, after = (json.loads(p.read_text()) for p in (evaluations[0], evaluations[-1]))
        console.print(summary_table(before, after))
    console.print(f"done in {seconds / 60:.1f} min; outputs in {run_dir}: reward.png, metrics.jsonl, episodes.jsonl, model/")


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
