"""Workers in the test's own process, whose calls to the controller are calls of functions."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

from agentrl.core.episode import Episode, Node, StopReason, Task, Trajectory
from agentrl.rollout.episode_runs import Ages, Cancelled, EpisodeOrder
from agentrl.rollout.worker_loop import ControllerGone, WorkerLoop, WorkerRefused
from agentrl.rollout.worker_processes import WorkerLost, WorkerProcesses
from agentrl.rollout.worker_wire import Ended, ended_from_bytes, ended_to_bytes, to_json


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def order(number: int, **data: Any) -> EpisodeOrder:
    """The first episode of a task."""
    return EpisodeOrder(Task(id=f"train/{number}", data={"n": number, **data}), f"g{number}", 0, number, version=2)


def episode(given: EpisodeOrder) -> Episode:
    """The record of an episode of one answer."""
    said = Node(
        parent=None, message={"role": "assistant", "content": "4"}, token_ids=[given.seed], loss_mask=[1],
        logprobs=[-0.5], versions=[2], finish_reason="stop",
    )  # fmt: skip
    return Episode(
        group_id=given.group_id, task_id=given.task.id, index=given.index, seed=given.seed, reward=1.0,
        stop_reason=StopReason.TERMINATED, trajectories={"assistant": Trajectory(nodes=[said])},
    )  # fmt: skip


class Runs:
    """Runs episodes as the test says: each waits for its event, if it has one.

    Attributes:
        begun: Orders in the order in which they began.
        held: Event of each task that waits.
        closed: Tasks whose cancelled episodes have closed their environments.
        closing: What a cancelled episode waits for before it has closed its environment.
        abandoned: What is told of abandoned episodes.
        oldest: Version of the oldest token of each task's episode.
        asked_ages: Served versions with which ages were asked for.
        in_flight: Nothing.
    """

    in_flight: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        self.begun: list[EpisodeOrder] = []
        self.held: dict[str, asyncio.Event] = {}
        self.closed: list[str] = []
        self.closing: asyncio.Event | None = None
        self.abandoned = 0
        self.oldest: dict[str, int] = {}
        self.asked_ages: list[int] = []
        self.error: Exception | None = None
        self.changed = asyncio.Condition()

    async def run(self, given: EpisodeOrder, cancelled: Cancelled | None = None) -> Episode:
        """Run one episode."""
        self.begun.append(given)
        await self._changed()
        try:
            if given.task.id in self.held:
                await self.held[given.task.id].wait()
        except asyncio.CancelledError:
            if self.closing is not None:
                await self.closing.wait()
            self.closed.append(given.task.id)
            if cancelled is not None:
                cancelled(episode(given).model_copy(update={"stop_reason": StopReason.CANCELLED, "reward": None}))
            raise
        if self.error is not None:
            raise self.error
        return episode(given)

    def ages(self, served: int, tell: Callable[[Ages], None]) -> None:
        """Tell the ages that the test says."""
        self.asked_ages.append(served)
        tell([(one, self.oldest[one.task.id]) for one in self.begun if one.task.id in self.oldest])

    async def until_begun(self, count: int) -> None:
        """Wait until so many episodes have begun here."""
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(lambda: len(self.begun) >= count), 10)

    async def _changed(self) -> None:
        async with self.changed:
            self.changed.notify_all()


class DirectLink:
    """Calls a :class:`WorkerProcesses` as HTTP would: everything is bytes in between.

    Attributes:
        lose: Calls by name whose answer is lost, once each, although they were carried out.
        dead: Whether the worker's process was killed: no call gets through, and none comes back.
    """

    def __init__(self, workers: WorkerProcesses, name: str) -> None:
        self.workers, self.name = workers, name
        self.number = workers.join(name, 100)
        self.lose: list[str] = []
        self.dead = False
        self.reports: list[tuple[str, int, str]] = []

    async def poll(self, seen: int, servers_seen: int, seconds: float) -> dict[str, Any]:
        return json.loads(await self._call("poll", lambda: self.workers.poll(self.number, seen, servers_seen, seconds)))

    async def ended(self, ended: list[Ended], abandoned: int) -> None:
        async def take() -> dict[str, Any]:
            delivered, more = ended_from_bytes(ended_to_bytes(ended, abandoned=abandoned))
            self.workers.ended(self.number, delivered, more["abandoned"])
            return {}

        await self._call("ended", take)

    async def ages(self, ages: Mapping[int, int]) -> None:
        async def take() -> dict[str, Any]:
            self.workers.aged(self.number, ages)
            return {}

        await self._call("ages", take)

    async def report(self, url: str, number: int, reason: str) -> None:
        self.reports.append((url, number, reason))

    async def leave(self) -> None:
        if not self.dead:
            try:
                self.workers.leave(self.number)
            except WorkerLost as error:
                raise WorkerRefused(str(error)) from error

    async def _call(self, name: str, call: Callable[[], Awaitable[Any]]) -> bytes:
        if self.dead:
            await asyncio.Event().wait()
        try:
            answer = to_json(await call())
        except WorkerLost as error:
            raise WorkerRefused(str(error)) from error
        if self.dead:
            await asyncio.Event().wait()
        if name in self.lose:
            self.lose.remove(name)
            raise ControllerGone(f"the answer to {name} was lost")
        return answer


class Worker:
    """A worker whose loop runs in this process."""

    def __init__(self, workers: WorkerProcesses, name: str) -> None:
        self.runs = Runs()
        self.link = DirectLink(workers, name)
        self.followed: list[list[dict[str, Any]]] = []
        self.loop = WorkerLoop(self.link, self.runs, self.followed.append)
        self.serving = asyncio.create_task(self.loop.serve())

    def kill(self) -> None:
        """End the worker as ``kill -9`` does: its connection breaks, and nothing is closed or said."""
        self.link.dead = True
        self.link.workers.cut_off(self.link.number)

    async def end(self) -> None:
        """End the worker's tasks."""
        if self.runs.closing is not None:
            self.runs.closing.set()
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
