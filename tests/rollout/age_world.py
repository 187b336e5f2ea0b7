"""A real controller with a scripted world around it: answers end when the test says so, in any order."""

import asyncio
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.core.columns import Columns
from agentrl.core.episode import Node, StopReason, Task, Trajectory
from agentrl.core.weight_manifest import WeightManifest
from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow
from agentrl.inference.client import EpisodeLLM
from agentrl.rollout.controller import Controller
from agentrl.rollout.episode_runs import EpisodeRuns
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.journal import Journal
from agentrl.rollout.tasks import TaskStream


@cache
def recipe_of(*settings: str) -> Recipe:
    return load_recipe("arithmetic_grpo", list(settings), device="cpu")


def node(parent: int | None, versions: list[int]) -> Node:
    count = max(1, len(versions))
    return Node(
        parent=parent,
        message={},
        token_ids=[3] * count,
        loss_mask=[1] * count if versions else [0],
        logprobs=[-0.5] * count if versions else [0.0],
        versions=versions or [-1],
        finish_reason="stop" if versions else None,
    )


class Answers:
    """A session whose answers end when the world says so; each has a token of each version that it ran under."""

    def __init__(self, world: "World", seed: int) -> None:
        self.world, self.seed = world, seed
        self.trajectory = Trajectory(nodes=[])
        self.last_sampled: int | None = None

    async def ask(self) -> None:
        nodes, world = self.trajectory.nodes, self.world
        nodes.append(node(len(nodes) - 1 if nodes else None, []))
        asked, answer = world.stamp(), asyncio.get_running_loop().create_future()
        world.asked.append(asked)
        if self.seed not in world.slow:
            world.pending.append(answer)
        try:
            await answer
        except asyncio.CancelledError:
            world.aborted += not world.over  # at the end of a run all that still runs is cancelled
            raise
        finally:
            if answer in world.pending:
                world.pending.remove(answer)
        nodes.append(node(len(nodes) - 1, list(range(asked, world.stamp() + 1))))
        self.last_sampled = len(nodes) - 1


class Weights:
    """A weight transaction that changes the served version at once."""

    def __init__(self, world: "World") -> None:
        self.world = world

    async def push(self, manifest: WeightManifest) -> dict[str, float]:
        self.world.version = manifest.version
        return {}


class World(RolloutWorkflow):
    """A controller and all that it touches; also the workflow, and the client, of its episodes.

    Attributes:
        pending: Answers that are being sampled, oldest first.
        asked: Version that was served when each answer was asked for.
        trained: Batches by step.
        stamp: Version that the servers write on a token that they sample now.
    """

    def __init__(
        self,
        folder: Path,
        *settings: str,
        tasks: int = 8,
        seed: int = 0,
        eventful: bool = True,
        runs: EpisodeRuns | None = None,
    ) -> None:
        self.recipe = recipe_of("trainer.epochs=1", "eval.every=0", "rollout.max_failure_rate=1", *settings)
        self.tasks = tasks
        self.version = 0
        self.stamp: Callable[[], int] = lambda: self.version
        self.pending: list[asyncio.Future[None]] = []
        self.asked: list[int] = []
        self.aborted = 0
        self.eventful = eventful
        self.slow: set[int] = set()  # seeds of episodes whose answers never end
        self.gates: dict[int, asyncio.Event] = {}  # by seed: what an episode waits for before it asks
        self.turns: Callable[[Task, int], int] = lambda task, seed: 1 + seed % 3 if eventful else 1
        self.trained: dict[int, Columns] = {}
        self.facts: dict[str, Any] = {"last": False}
        self.written: dict[int, dict[str, float]] = {}
        self.journal = Journal(folder, episodes=True)
        self.folder = folder
        self.step = 0  # step that the trainer asks for next
        self.before = 0  # groups that were trained before a resume
        self.asking: asyncio.Task[bytes] | None = None
        self.over = False
        self.ends: list[dict[str, Any]] = []  # the journal at the end
        self.stale: list[dict[str, Any]] = []  # records of cancelled episodes at the end
        self.error = ""  # why the run ended early
        stream = TaskStream([Task(id=f"t{i}", data={}) for i in range(tasks)], seed, epochs=1)
        self.controller = Controller(
            self.recipe, stream, self, self, Weights(self), self.journal,  # type: ignore[arg-type]
            lambda step, metrics: self.written.setdefault(step, {}).update(metrics), self._evaluate,
            runs=runs,
        )  # fmt: skip

    async def _evaluate(self, version: int) -> dict[str, float]:
        return {}

    def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
        return EpisodeLLM(lambda role: Answers(self, seed)), lambda: None  # type: ignore[arg-type, return-value]

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        if seed in self.gates:
            await self.gates[seed].wait()
        for _ in range(self.turns(task, seed)):
            await llm.session().ask()  # type: ignore[attr-defined]
        if self.eventful and seed % 7 == 0:
            raise RuntimeError("a tool is broken")
        return Outcome(reward=float(seed % 2))

    async def settle(self) -> None:
        for _ in range(40):
            await asyncio.sleep(0)

    async def act(self, event: str, number: int) -> None:
        """One event of a schedule; one that cannot happen now does nothing."""
        if event == "answer" and self.pending:
            answer = self.pending[number % len(self.pending)]
            if not answer.done():
                answer.set_result(None)
        elif event == "newest":  # what was asked for first is slow
            for answer in self.pending[number:]:
                answer.set_result(None)
        elif event == "batch" and self.asking is None and self.step not in self.trained and not self.over:
            self.asking = asyncio.create_task(self.controller.next_batch(self.step))
        elif event == "publish" and self.step in self.trained:
            await self.publish()
        await self.settle()
        if self.asking is not None and self.asking.done():
            failed = self.asking.exception()
            if isinstance(failed, RolloutError):
                self.error, self.over = str(failed), True
            else:
                self._take(self.asking.result())
            self.asking = None
        self._check_accounts()

    def _check_accounts(self) -> None:
        """No capacity leaks: what the gate counts is what runs, waits and was trained."""
        controller = self.controller
        running = {
            int(task.get_name()[6:]) for task in controller.rollouts._groups if task.get_name().startswith("group-")
        }
        trained = sum(len({one.group_id for one in columns.episodes}) for columns in self.trained.values())
        assert controller.gate.running == len(running)
        assert controller.gate.accepted == self.before + trained + len(controller._buffer)
        assert set(controller._flight._groups) <= running

    def _take(self, batch: bytes) -> None:
        columns, self.facts = Columns.from_bytes(batch)
        if columns.episodes:
            self.trained[self.step] = columns
        else:
            self.over = True

    async def publish(self) -> None:
        self.step += 1
        self.over = self.facts["last"]
        assert await self.controller.ready(1.0)
        await self.controller.publish(self._manifest(), final=self.over)
        self.controller.record(self.step, {}, final=self.over)

    async def resume(self, step: int, state: bytes) -> None:
        """Start from a checkpoint instead of from the beginning."""
        self.step = self.version = step
        self.before = step * self.recipe.rollout.batch_size
        self.controller.restore(step, state)
        self.controller.start()
        await self.controller.publish(self._manifest())
        await self.settle()

    def _manifest(self) -> WeightManifest:
        return WeightManifest(version=self.step, path="/v", transport="disk", dtype="F32", nbytes=0, fingerprints={})

    async def step_on(self) -> None:
        """A step of the run: answers but the oldest one end, a batch is handed out, and the next version is served."""
        for _ in range(10):
            await self.act("newest", 1)
        await self.act("batch", 0)
        await self.act("publish", 0)

    async def drain(self) -> None:
        """Let everything end that can, as a run does that nobody disturbs; fails if it gets stuck."""
        for _ in range(400):
            if self.over:
                return
            before = (self.step, len(self.asked), len(self.pending), self.asking is not None)
            await self.act("batch", 0)
            for _ in range(len(self.pending)):
                await self.act("answer", 0)
            await self.act("publish", 0)
            after = (self.step, len(self.asked), len(self.pending), self.asking is not None)
            assert self.over or before != after, f"nothing moves any more at step {self.step}"
        raise AssertionError(f"no end after 400 rounds: step {self.step}")

    async def close(self) -> None:
        await self.controller.close()
        self.journal.close()

    def outcomes(self) -> list[dict[str, Any]]:
        """Ends of all groups so far."""
        file = self.folder / "journal.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        return [line for line in lines if line["outcome"] not in ("admitted", "checkpoint", "resumed")]

    def ages(self) -> list[int]:
        """Ages of all trained episodes, by their oldest token."""
        return [
            step - min(int(columns.versions[first:end].min()) for first, end in [span])
            for step, columns in self.trained.items()
            for span in columns.sampled_ranges()
        ]

    def episodes(self) -> list[dict[str, Any]]:
        file = self.folder / "episodes.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    def stale_episodes(self) -> list[dict[str, Any]]:
        return [one for one in self.episodes() if one["stop_reason"] == StopReason.STALE]
