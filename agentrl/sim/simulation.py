"""Runs the real controller with simulated servers, environments and trainer, under a virtual clock.

Guarantees: controller, router and weight transaction are those of a real run; the simulated parts only wait. Each task
is drawn once. The trainer makes the calls of a real one, in their order: batch, update, ready, publish, record.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config.recipe import Recipe
from agentrl.core.columns import Columns
from agentrl.core.episode import Task
from agentrl.core.weight_manifest import WeightManifest
from agentrl.core.workflow import LLM, Outcome
from agentrl.inference.router import Router
from agentrl.rollout.controller import Controller
from agentrl.rollout.episode_runs import EpisodeOrder, InProcess
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.step_records import Write
from agentrl.rollout.tasks import TaskStream
from agentrl.sim.account import Account, AccountingJournal, Step
from agentrl.sim.device import Speed
from agentrl.sim.episodes import Shapes, SimClient, SimWorkflow
from agentrl.sim.faults import Faults, NoFaults
from agentrl.sim.server import SimServer
from agentrl.weights.transaction import Committed, WeightPushError, WeightTransaction

PUSHES = 20  # tries of a push, as of a trainer that is started again
READY_SECONDS = 5.0
ENDLESS = 10**12  # tasks, which cost nothing: how many a run draws depends on how many groups are left out


@dataclass(frozen=True)
class Devices:
    """The simulated machine.

    Attributes:
        inference: Inference servers, of one device each.
        training: Devices that train.
        speed: Speed of an inference device.
        train_seconds: Seconds that an update takes on one device, in all; half of it on two, and so on.
        token_seconds: Seconds that each trained token adds, on one device.
        push_seconds: Seconds for which servers pause while they load new weights.
        step_seconds: Seconds between an update and its push, however many devices train: weights are gathered.
        slots: Most requests that a server decodes at a time; ``None``: any number.
    """

    inference: int
    training: int
    speed: Speed = field(default_factory=Speed)
    train_seconds: float = 80.0
    token_seconds: float = 0.0
    push_seconds: float = 0.0
    step_seconds: float = 0.0
    slots: int | None = None

    def training_time(self, tokens: float) -> float:
        """Returns the seconds of an update with so many tokens."""
        return (self.train_seconds + self.token_seconds * tokens) / self.training


class _Workflow(SimWorkflow):
    """Counts what episodes sample, also of those that are cancelled between two turns."""

    def __init__(self, shapes: Shapes, faults: Faults, account: Account) -> None:
        super().__init__(shapes, faults)
        self._account = account

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        try:
            return await super().arun_episode(task, llm, seed=seed)
        finally:
            session: Any = llm.session()
            self._account.made(task.id, sum(sum(node.token_ids) for node in session.trajectory.nodes))


class Simulation:
    """One simulated run.

    Args:
        recipe: Recipe; its rollout section, seed and pause mode are used.
        devices: The machine.
        shapes: Source of the episodes' shapes.
        steps: Steps of the trainer.
        faults: Faults of all simulated parts.
        folder: Folder for the journal; ``None`` writes nothing.
        episodes: Whether to write the episodes there too.
        epochs: Number of passes over ``tasks`` tasks, after which the run ends; ``None``: no task is drawn twice.
        tasks: Number of tasks; by default there are always more.
        after_step: Called with each step instead of keeping it: memory does not grow with the steps then.
        evaluated: Episodes of each evaluation that ``eval.every`` makes due; 0: an evaluation takes no time.
        write: Takes a step's record.
    """

    def __init__(
        self,
        recipe: Recipe,
        devices: Devices,
        shapes: Shapes,
        steps: int,
        *,
        faults: Faults | None = None,
        folder: Path | None = None,
        episodes: bool = False,
        epochs: int | None = None,
        tasks: int | None = None,
        after_step: Callable[[Step], None] | None = None,
        evaluated: int = 0,
        write: Write | None = None,
    ) -> None:
        self._devices = devices
        self._faults = faults or NoFaults()
        self._steps = steps
        self.account = Account()
        self.steps: list[Step] = []
        self._after_step = after_step or self.steps.append
        self.servers = [
            SimServer(
                f"sim://{index}",
                devices.speed,
                slots=devices.slots,
                load_seconds=devices.push_seconds,
                faults=self._faults,
            )
            for index in range(devices.inference)
        ]
        self.router = Router(
            self.servers, probe_seconds=recipe.inference.probe_seconds, patience=recipe.inference.patience
        )
        self.weights = WeightTransaction(
            self.router, Committed(0, "/sim"), recipe.weights.pause_mode, recipe.weights.lease_seconds
        )
        self.journal = AccountingJournal(self.account, folder, episodes=episodes)
        rollout = recipe.rollout
        self.stream = TaskStream(SimTasks(tasks or ENDLESS), recipe.seed, shuffle=False, epochs=epochs)
        self.controller = Controller(
            recipe,
            self.stream,
            _Workflow(shapes, self._faults, self.account),
            SimClient(self.router),
            self.weights,
            self.journal,
            write or no_metrics,
            self._evaluate,
        )
        self._evaluated = evaluated
        self._evaluation = InProcess(SimWorkflow(shapes, self._faults), SimClient(self.router), rollout)

    async def run(self) -> list[Step]:
        """Run all steps, or until the tasks are exhausted; returns them.

        Raises:
            RolloutError: The controller ended the run.
        """
        self.router.rejoin = self.weights.join
        self.router.start()
        self.controller.start()
        try:
            await self._train()
        finally:
            await self.controller.close()
            await self.router.close()
            self.journal.close()
        return self.steps

    async def _train(self) -> None:
        version, last = 0, False
        while not last and version < self._steps:
            last = await self._step(version)
            version += 1
        if last:
            await self._evaluation_over()

    async def _evaluation_over(self) -> None:
        while not await self.controller.ready(READY_SECONDS):
            pass

    async def _evaluate(self, version: int) -> dict[str, float]:
        """Plays the episodes of an evaluation, all at once."""
        orders = [
            EpisodeOrder(Task(id=f"eval/{index}", data={}), f"eval-{version}", index, index, version, evaluation=True)
            for index in range(self._evaluated)
        ]
        found = await asyncio.gather(*(self._evaluation.run(order) for order in orders))
        return {"eval/judged": float(sum(not episode.failed for episode in found))}

    async def _step(self, version: int) -> bool:
        """Makes one step; returns whether it was the last one of the tasks."""
        now = asyncio.get_running_loop().time
        start = now()
        columns, facts = Columns.from_bytes(await self._batch(version))
        waited = now() - start
        if not columns.episodes:  # the tasks are exhausted, and no group of the rest was kept
            await self._evaluation_over()
            self.controller.record(version, {}, final=True)
            return True
        tokens, oldest = self.account.trained(columns)
        training = self._devices.training_time(tokens)
        await asyncio.sleep(training + self._devices.step_seconds)
        while not await self.controller.ready(READY_SECONDS, version=version + 1, final=facts["last"]):
            pass
        await self._publish(version + 1, final=facts["last"])
        self.controller.record(version + 1, {}, final=facts["last"])
        groups = len({record.group_id for record in columns.episodes})
        ages = [version - found for found in oldest]
        generated = sum(server.device.tokens for server in self.servers)
        thrown = self.account.thrown + sum(server.device.cancelled for server in self.servers)
        self._after_step(Step(now(), waited, training, groups, tokens, ages, thrown, generated))
        return facts["last"]

    async def _batch(self, step: int) -> bytes:
        """Asks for a batch; a trainer that lost the answer asks once more, and must get the same one."""
        kind = await self._trainer_waits("next_batch")
        batch = await self.controller.next_batch(step)
        if kind == "duplicate" and await self.controller.next_batch(step) != batch:
            raise RolloutError(f"step {step} got another batch when it asked again")
        return batch

    async def _publish(self, version: int, *, final: bool) -> None:
        kind = await self._trainer_waits("publish")
        for left in reversed(range(2 if kind == "duplicate" else 1)):
            await self._push(version, final=final and not left)

    async def _push(self, version: int, *, final: bool) -> None:
        """Pushes a version, again after a failure, as a trainer that is resumed does."""
        for left in reversed(range(PUSHES)):
            try:
                await self.controller.publish(manifest(version), final=final)
                return
            except WeightPushError:
                if not left:
                    raise
                await asyncio.sleep(READY_SECONDS)

    async def _trainer_waits(self, place: Any) -> str:
        """A trainer that is slow; one that crashes or hangs is started again and makes the call once more."""
        kind = self._faults.decide(place)
        durations = self._faults.durations
        seconds = {"slow": durations.slow, "late": durations.late, "hang": durations.late, "crash": durations.slow}
        if kind in seconds:
            await asyncio.sleep(seconds[kind])
        return kind


class SimTasks(Sequence[Task]):
    """Tasks with nothing but a name, made when they are asked for."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return Task(id=f"sim/{index}", data={})


async def no_evaluation(version: int) -> dict[str, float]:
    """Evaluates nothing."""
    return {}


def no_metrics(step: int, metrics: dict[str, float]) -> None:
    """Writes nothing."""


def manifest(version: int) -> WeightManifest:
    """Returns the manifest of a version without weights."""
    return WeightManifest(version=version, transport="disk", path="/sim", dtype="F32", nbytes=0, fingerprints={})
