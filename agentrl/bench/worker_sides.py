"""Sides of ``agentrl bench workers``: episodes in the controller's process, and in a worker process.

Guarantees: both sides run the same environment with real sessions on the same server, another process that answers at
once; both journal each episode and make its columns. A worker is a real one: its process, its HTTP calls.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from starlette.applications import Starlette

from agentrl import LanguageEnvironment, Message
from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.core.episode import Task
from agentrl.core.sent_episode import columns_of
from agentrl.host.process import write_json
from agentrl.inference.client import ChatClient
from agentrl.launch import commands
from agentrl.launch.controller_process import make_workers
from agentrl.launch.run_folders import CONTROLLER
from agentrl.launch.supervisor import Child, Supervisor
from agentrl.rollout.assemble import make_client, make_workflow
from agentrl.rollout.episode_runs import EpisodeOrder, EpisodeRuns, InProcess
from agentrl.rollout.journal import Journal
from agentrl.rollout.worker_api import worker_routes

READY_SECONDS = 120.0


class Talk(LanguageEnvironment):
    """Says a sentence after each answer.

    Args:
        turns: Answers of an episode.
    """

    def __init__(self, turns: int) -> None:
        self._turns = self._left = turns

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Begin the talk."""
        self._left = self._turns
        return [{"role": "user", "content": "Let us talk about the weather. What do you think of it?"}], {}

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, dict[str, Any]]:
        """Say the next sentence."""
        self._left -= 1
        if not self._left:
            return [], 1.0, True, False, {"metrics": {"accuracy": 1.0}}
        text = f"I see. It may be different tomorrow: there are {self._left} more things to say of it. And then?"
        return [{"role": "user", "content": text}], 0.0, False, False, {}


def recipe_of(model: str, turns: int) -> Recipe:
    """Makes the recipe of both sides."""
    settings = [f"env.id={__file__}:Talk", f"env.kwargs.turns={turns}", "workflow.id=agent_env"]
    settings += [f"workflow.kwargs.max_turns={turns + 1}"]
    settings += [f"model.name={model}", "inference.context_length=1000000", "rollout.episode_timeout=3600"]
    return load_recipe(
        "arithmetic_grpo", [*settings, "rollout.workers=1", "model.chat_template=chatml_tools"], device="cpu"
    )


def instant_server(supervisor: Supervisor) -> str:
    """Starts the server; returns its URL."""
    child = supervisor.start("server", commands.tethered(sys.executable, "-m", "agentrl.bench.instant_server"))
    until(lambda: child.log.read_text().startswith("http"), child)
    return child.log.read_text().strip()


def until(condition: Any, child: Child) -> None:
    """Waits for what another process does.

    Raises:
        RuntimeError: It ended, or takes too long.
    """
    deadline = time.monotonic() + READY_SECONDS
    while not condition():
        if child.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{child.name} is not ready:\n{child.tail()}")
        time.sleep(0.05)


def in_process(recipe: Recipe, model: Path, url: str) -> tuple[InProcess, ChatClient]:
    """Makes the place of ``rollout.workers=0``."""
    client = make_client(recipe, model, [url])
    return InProcess(make_workflow(recipe), client, recipe.rollout), client


@asynccontextmanager
async def one_worker(
    recipe: Recipe, client: ChatClient, model: Path, folder: Path, supervisor: Supervisor
) -> AsyncIterator[tuple[EpisodeRuns, psutil.Process]]:
    """Context with a worker process; gives the place where its episodes run, and the process."""
    (folder / "processes").mkdir()
    write_json(folder / "config.json", recipe.model_dump(mode="json"))
    workers = make_workers(recipe, client.router, folder / "processes")
    config = uvicorn.Config(
        Starlette(routes=worker_routes(workers, client.router, "")),
        host="127.0.0.1", port=0, log_level="warning", lifespan="off", timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]  # the command handles signals
    socket = config.bind_socket()
    socket.listen()  # who is told the address may connect at once
    serving = asyncio.create_task(server.serve([socket]))
    write_json(folder / CONTROLLER, {"url": f"http://127.0.0.1:{socket.getsockname()[1]}"})
    child = supervisor.start("worker-0", commands.rollout_worker(model, folder, 0), env={**os.environ})
    workers.start()
    try:
        yield workers, psutil.Process(child.process.pid)
    finally:
        await workers.close()
        server.should_exit = True
        await serving


async def play(runs: EpisodeRuns, journal: Journal, episodes: int, at_once: int) -> float:
    """Runs episodes, ``at_once`` at a time; returns the CPU seconds of this process for one.

    Raises:
        RuntimeError: An episode failed.
    """
    places, task = asyncio.Semaphore(at_once), Task(id="bench/0", data={"question": "", "answer": ""})

    async def one(index: int) -> None:
        async with places:
            found = await runs.run(EpisodeOrder(task, f"g{index}", 0, index, version=0))
        if found.failed:
            raise RuntimeError(f"the benchmark's episode went wrong: {found.stop_reason} {found.error}")
        columns_of([journal.episode(found)])

    start = time.process_time()
    await asyncio.gather(*map(one, range(episodes)))
    return (time.process_time() - start) / episodes
