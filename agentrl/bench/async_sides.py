"""What ``agentrl bench async`` measures: a simulated cluster, a server that sleeps, instant episodes, and a crowd.

Guarantees: each side runs the real controller with its router and weight transaction; only servers, episodes and
trainer are simulated. CPU seconds are those of this process.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.config.rollout import RolloutConfig
from agentrl.core.episode import Task
from agentrl.core.workflow import LLM, Outcome
from agentrl.inference.backend import Generation, SamplingParams
from agentrl.inference.router import Router
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.controller import Controller
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from agentrl.rollout.journal import Journal
from agentrl.rollout.tasks import TaskStream
from agentrl.sim.device import Speed
from agentrl.sim.episodes import Shape, SimClient, SimWorkflow, Turn
from agentrl.sim.server import SimServer
from agentrl.sim.simulation import Devices, SimTasks, Simulation, manifest, no_evaluation, no_metrics
from agentrl.weights.transaction import Committed, WeightTransaction

HAS_STALE = "stale" in RolloutConfig.model_fields  # whether the recipe can drop what is too old


def recipe_of(*settings: str, bound: int = 1) -> Recipe:
    """Makes a recipe for a side; what is too old is dropped where the recipe can say so."""
    own = [f"rollout.max_staleness={bound}", "rollout.episode_timeout=1e6", "rollout.max_failure_rate=1"]
    own += ["rollout.stale=drop"] if HAS_STALE else []
    return load_recipe("arithmetic_grpo", [*own, "inference.probe_seconds=1e4", *settings], device="cpu")


class Sleeping(SimServer):
    """A server whose answers take a second for every thousand tokens, for at most ``slots`` requests at a time.

    Args:
        url: Name in messages.
        slots: Requests at a time.
    """

    def __init__(self, url: str, slots: int) -> None:
        super().__init__(url, Speed())
        self._places = asyncio.Semaphore(slots)

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        """Sleep, and answer."""
        async with self._places:
            await asyncio.sleep(params.max_new_tokens / 1000)
        return Generation([params.max_new_tokens], [-1.0], [self.device.version], "stop")


class Instant(SimServer):
    """A server that answers at once."""

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        """Answer."""
        return Generation([params.max_new_tokens], [-1.0], [self.device.version], "stop")


@dataclass(frozen=True)
class Same:
    """Episodes that are all alike but for their reward.

    Attributes:
        answers: Answers of an episode.
    """

    answers: int = 1

    def of(self, task: str, seed: int) -> Shape:
        """Returns the shape."""
        return Shape((Turn(100),) * self.answers, float(seed % 2))

    def mean(self) -> float:
        """Returns the tokens of an episode."""
        return 100.0 * self.answers

    def turns(self) -> float:
        """Returns the answers of an episode."""
        return float(self.answers)


def with_servers(simulation: Simulation, servers: list[SimServer]) -> Simulation:
    """Puts other servers into a simulation that has not begun."""
    simulation.servers = servers
    for old in list(simulation.router.backends):
        simulation.router.remove(old.url)
    for server in servers:
        simulation.router.admit(server)
    return simulation


async def realtime(shapes: Any, recipe: Recipe, slots: int, train_seconds: float, steps: int) -> float:
    """Returns the mean seconds of a step in real time, the first two left out."""
    simulation = Simulation(recipe, Devices(1, 1, train_seconds=train_seconds), shapes, steps + 2)
    done = await with_servers(simulation, [Sleeping("sleeping", slots)]).run()
    return (done[-1].end - done[1].end) / steps


@dataclass(frozen=True)
class Used:
    """CPU seconds and memory at the end of a step.

    Attributes:
        episodes: Episodes trained so far.
        cpu: CPU seconds of this process since the start.
        rss: Resident memory in bytes.
    """

    episodes: int
    cpu: float
    rss: int


async def instant(folder: Path, episodes: int, *, with_episodes: bool = False) -> list[Used]:
    """Runs instant episodes through the controller with the journal on; returns what was used, step by step.

    Serialized batches are taken and thrown away: what the trainer does with them is not the controller's work.
    """
    import psutil

    process, groups, group = psutil.Process(), 16, 8
    recipe = recipe_of(f"rollout.batch_size={groups}", f"rollout.group_size={group}", "rollout.max_concurrent=256")
    steps = episodes // (groups * group)
    router = Router([Instant("instant", Speed())])
    weights = WeightTransaction(router, Committed(0, "/sim"), "in_place", 600.0)
    journal = Journal(folder, episodes=with_episodes)
    tasks = TaskStream(SimTasks(2 * groups * (steps + 4)), 0, shuffle=False)
    client, workflow = SimClient(router), SimWorkflow(Same())
    controller = Controller(recipe, tasks, workflow, client, weights, journal, no_metrics, no_evaluation)
    found, start = [], time.process_time()
    controller.start()
    for step in range(steps):
        await controller.next_batch(step)
        await controller.publish(manifest(step + 1))
        controller.record(step + 1, {}, final=False)
        trained = (step + 1) * groups * group
        found.append(Used(trained, time.process_time() - start, process.memory_info().rss))
    await controller.close()
    journal.close()
    return found


class Yielding(SimWorkflow):
    """Plays episodes, and lets others run after each answer, as one that waits for a tool does."""

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        """Sample each answer."""
        session: Any = llm.session()
        for turn in self._shapes.of(task.id, seed).turns:
            await session.sample(turn.tokens)
            await asyncio.sleep(0)
        return Outcome(reward=1.0)


async def crowd(episodes: int, turns: int, *, at_once: bool) -> float:
    """Returns the CPU seconds of episodes that run at once, or one after the other."""
    client, workflow = SimClient(Router([Instant("instant", Speed())])), Yielding(Same(turns))
    left, limits, task = Abandoned(), Limits(1e6, 30.0), Task(id="crowd", data={})

    def one(index: int) -> Any:
        return run_episode(
            workflow, task, client, group_id="g", index=index, seed=index, limits=limits, left=left, evaluation=True
        )

    start = time.process_time()
    if at_once:
        await asyncio.gather(*(one(index) for index in range(episodes)))
    else:
        for index in range(episodes):
            await one(index)
    return time.process_time() - start
