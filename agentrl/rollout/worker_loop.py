"""The loop of a worker process: takes orders from the controller, runs the episodes, and sends them back.

Guarantees: each order is answered once, by its episode, by what there was when it was cancelled, or by an error;
answers are sent until the controller has confirmed them. No more orders run here than the controller has given. When
the controller ends, has given this worker up or cannot be reached for ``GIVE_UP_SECONDS``, all episodes are cancelled,
their environments are closed, the controller is told, and the loop ends.
"""

import asyncio
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from agentrl.core.episode import Episode
from agentrl.core.valid_text import valid_text
from agentrl.rollout.episode_runs import Ages, EpisodeOrder, EpisodeRuns
from agentrl.rollout.worker_wire import Ended, order_from_json, packed

T = TypeVar("T")
MOST_AT_ONCE = 64  # ended orders in one message
POLL_SECONDS = 20.0  # longest wait within one call for orders
GIVE_UP_SECONDS = 60.0
LONGEST_PAUSE = 2.0  # between two attempts to reach the controller
CANCELLED = "the episode was cancelled, and there is no record of it"


class ControllerGone(RuntimeError):
    """The controller did not answer; the same call may be made again."""


class WorkerRefused(RuntimeError):
    """The controller does not take this worker: a wrong secret, or it was given up."""


class Link(Protocol):
    """A worker's calls to its controller. Each raises :class:`ControllerGone` or :class:`WorkerRefused`."""

    async def poll(self, seen: int, servers_seen: int, seconds: float) -> dict[str, Any]:
        """Waits for orders, see :meth:`WorkerProcesses.poll`."""
        ...

    async def ended(self, ended: list[Ended], abandoned: int) -> None:
        """Sends ended orders."""
        ...

    async def ages(self, ages: Mapping[int, int]) -> None:
        """Tells the versions of the oldest tokens of running episodes, by order."""
        ...

    async def report(self, url: str, number: int, reason: str) -> None:
        """Says that an inference server is dead."""
        ...

    async def leave(self) -> None:
        """Says that this worker ends: its environments are closed."""
        ...


class WorkerLoop:
    """Runs the orders of one controller.

    Args:
        link: Calls to the controller.
        runs: Where the episodes run.
        follow: Takes what the controller says of the inference servers.
    """

    def __init__(self, link: Link, runs: EpisodeRuns, follow: Callable[[list[dict[str, Any]]], None]) -> None:
        self._link = link
        self._runs = runs
        self._follow = follow
        self._jobs: dict[int, asyncio.Task[Ended]] = {}
        self._numbers: dict[EpisodeOrder, int] = {}  # of the orders that run
        self._ended: deque[Ended] = deque()
        self._some_ended = asyncio.Event()
        self._said: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()  # other calls, to be made in turn

    @property
    def running(self) -> int:
        """Number of episodes that run here."""
        return len(self._jobs)

    def report(self, url: str, number: int, reason: str) -> None:
        """Tell the controller that an inference server is dead."""
        self._said.put_nowait(lambda: self._link.report(url, number, reason))

    def _tell(self, ages: Ages) -> None:
        """Tell the controller how old the running episodes are."""
        known = {self._numbers[order]: version for order, version in ages}
        self._said.put_nowait(lambda: self._link.ages(known))

    async def serve(self) -> None:
        """Run until the controller says that the run is over.

        Raises:
            ControllerGone: It cannot be reached.
            WorkerRefused: It does not take this worker.
        """
        parts = [asyncio.create_task(part) for part in (self._take_orders(), self._send(), self._say())]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            others = [*parts, *self._jobs.values()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            with suppress(ControllerGone, WorkerRefused):  # it may have ended before this worker
                await self._link.leave()

    async def _take_orders(self) -> None:
        """Obeys the controller's commands until it ends."""
        seen = servers_seen = 0
        while True:
            poll = self._link.poll
            answer = await insist(lambda: poll(seen, servers_seen, POLL_SECONDS))  # noqa: B023 - awaited at once
            if "servers" in answer:
                self._follow(answer["servers"])
                servers_seen = answer["servers_at"]
            for sequence, command in answer["commands"]:  # all later than `seen`, which the next call confirms
                self._obey(command)
                seen = sequence
            if answer["end"]:
                return

    def _obey(self, command: dict[str, Any]) -> None:
        if "run" in command:
            number, order = order_from_json(command["run"])
            job = self._jobs[number] = asyncio.create_task(self._episode(number, order), name=f"order-{number}")
            self._numbers[order] = number
            job.add_done_callback(lambda done: self._over(number, order, done))
        elif "ages" in command:
            self._runs.ages(command["ages"], self._tell)
        elif (job := self._jobs.get(command["cancel"])) is not None:  # else its end is on the way
            job.cancel()

    async def _episode(self, number: int, order: EpisodeOrder) -> Ended:
        left: list[Episode] = []
        try:
            return Ended(number, packed(await self._runs.run(order, left.append)))
        except asyncio.CancelledError:
            return Ended(number, packed(left[0])) if left else Ended(number, error=CANCELLED)

    def _over(self, number: int, order: EpisodeOrder, job: "asyncio.Task[Ended]") -> None:
        """Puts the end of an episode into the next message."""
        del self._jobs[number], self._numbers[order]
        if job.cancelled():  # before it began
            self._ended.append(Ended(number, error=CANCELLED))
        elif (error := job.exception()) is not None:
            self._ended.append(Ended(number, error=valid_text("".join(traceback.format_exception(error)))))
        else:
            self._ended.append(job.result())
        self._some_ended.set()

    async def _send(self) -> None:
        """Sends what has ended, all that there is in one message."""
        while True:
            await self._some_ended.wait()
            batch = [self._ended[index] for index in range(min(len(self._ended), MOST_AT_ONCE))]
            ended = self._link.ended
            await insist(lambda: ended(batch, self._runs.abandoned))  # noqa: B023 - awaited at once
            for _ in batch:
                self._ended.popleft()
            if not self._ended:
                self._some_ended.clear()

    async def _say(self) -> None:
        while True:
            await insist(await self._said.get())


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """Returns a call's result; makes it again while the controller does not answer.

    Raises:
        ControllerGone: It did not answer for ``GIVE_UP_SECONDS`` after the first failure.
    """
    now = asyncio.get_running_loop().time
    failed_at, pause = None, 0.05
    while True:
        try:
            return await call()
        except ControllerGone:
            failed_at = now() if failed_at is None else failed_at
            if now() - failed_at > GIVE_UP_SECONDS:
                raise
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
