"""Has worker processes run the episodes; the controller alone admits, orders and journals them.

Guarantees: an order is given to one worker, the one with the fewest in flight, and ends in exactly one record. Those of
a worker that ends, is killed or falls silent end with the reason ``worker_lost``, a failure of the infrastructure: who
ordered them tries them again. A call that is cancelled cancels its episode in the worker, and returns when that has
closed its environment, or when its time for that is over. No more orders are sent to a worker than it has places; all
others wait here in the order in which they came, and no longer than ``patience`` seconds without any worker.

No clock runs in here: :meth:`WorkerProcesses.look` is called every second with the time.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from agentrl.core.episode import Episode, StopReason
from agentrl.rollout.episode_runs import Ages, Cancelled, EpisodeOrder, without_sampling
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.worker_wire import Delivered, order_as_json

LOOK_SECONDS = 1.0
SILENT_SECONDS = 20.0  # without a sign of life after which a worker is lost; it gives one every BEAT_SECONDS
BEAT_SECONDS = 5.0
AWAY_SECONDS = 2.0  # after its connection broke: a process that was killed does not come back, others do at once
ANSWER_SECONDS = 5.0  # beyond its own limits, for a worker's answer to a cancellation
log = logging.getLogger(__name__)


class WorkerLost(RolloutError):
    """The worker is not known here: it was given up, or the controller is another one; it has to start anew."""


@dataclass(eq=False)
class _Run:
    """An order on its way: it waits for a place, or is with a worker."""

    number: int
    order: EpisodeOrder
    command: dict[str, Any]
    result: "asyncio.Future[Episode]"
    worker: "_Worker | None" = None


@dataclass(eq=False)
class _Worker:
    number: int
    name: str
    pid: int
    heard: float  # time of the latest sign of life
    away: float | None = None  # since when its connection is broken
    running: dict[int, _Run] = field(default_factory=dict)
    outbox: deque[tuple[int, dict[str, Any]]] = field(default_factory=deque)  # by sequence, until it has confirmed them
    sequence: int = 0
    sent: int = 0  # highest sequence that was in an answer
    abandoned: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, command: dict[str, Any]) -> None:
        self.sequence += 1
        self.outbox.append((self.sequence, command))
        self.wake.set()


class WorkerProcesses:
    """The workers of one run, as a place where episodes run.

    Args:
        places: Most episodes in flight in one worker.
        teardown: Most seconds from an episode's cancellation until it has ended or is given up.
        patience: Most seconds that orders wait while there is no worker.
        servers: Function that returns what the workers have to know of the inference servers, as plain data.
        lost: Called with name, process id and reason when a worker is given up, so that its process can be ended.
        clock: Function that returns monotonic seconds.
    """

    def __init__(
        self,
        places: int,
        teardown: float,
        patience: float,
        servers: Callable[[], list[dict[str, Any]]],
        lost: Callable[[str, int, str], None] = lambda name, pid, reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._places = places
        self._teardown = teardown
        self._patience = patience
        self._servers = servers
        self._lost = lost
        self._clock = clock
        self._workers: dict[int, _Worker] = {}
        self._waiting: deque[_Run] = deque()
        self._numbers, self._worker_numbers = count(1), count(1)
        self._servers_at = 1  # changes with what the workers have to know of the servers
        self._looked = self._without_worker = clock()
        self._ends = False
        self._tell: Callable[[Ages], None] = lambda ages: None
        self._watch: asyncio.Task[None] | None = None

    @property
    def abandoned(self) -> int:
        """Number of abandoned episodes whose tasks still run, in all workers that live."""
        return sum(worker.abandoned for worker in self._workers.values())

    @property
    def in_flight(self) -> dict[str, int]:
        """Name of a worker -> its episodes in flight."""
        return {worker.name: len(worker.running) for worker in self._workers.values()}

    async def run(self, order: EpisodeOrder, cancelled: Cancelled | None = None) -> Episode:
        """Run one episode in a worker and return its record.

        Args:
            order: The episode.
            cancelled: Called with a record of what there was, if this call is cancelled.

        Raises:
            RolloutError: There is no worker, the task is no plain data, or the worker failed outside the episode.
        """
        number = next(self._numbers)
        command = {"run": order_as_json(number, order)}
        run = _Run(number, order, command, asyncio.get_running_loop().create_future())
        self._waiting.append(run)
        self._assign()
        try:
            return await asyncio.shield(run.result)
        except asyncio.CancelledError:
            left = await self._cancel(run)
            if cancelled is not None:
                why = "cancelled before its end; its worker has sent nothing of it"
                cancelled(left or without_sampling(order, StopReason.CANCELLED, why))
            raise

    async def _cancel(self, run: _Run) -> Episode | None:
        """Cancels an order where it is, and waits until it has ended there; returns what the worker sent of it."""
        worker = run.worker
        if worker is not None and not run.result.done() and not self._unsent(worker, run):
            worker.say({"cancel": run.number})
            limit = self._teardown + ANSWER_SECONDS
            await asyncio.wait({run.result}, timeout=limit)
            if not run.result.done():
                log.warning("%s did not cancel an episode within %g s", worker.name, limit)
                self._forget(run)
        if run.result.cancel() or run.result.exception() is not None:  # a late result is nobody's
            return None
        return run.result.result()

    def ages(self, served: int, tell: Callable[[Ages], None]) -> None:
        """Ask the workers for the ages of their training episodes; ``tell`` is called with the answer of each."""
        self._tell = tell
        for worker in self._workers.values():
            worker.say({"ages": served})

    def aged(self, number: int, ages: Mapping[int, int]) -> None:
        """Takes the ages of a worker's episodes, by order.

        Raises:
            WorkerLost: The worker is not known.
        """
        running = self.heard(number).running
        self._tell([(running[one].order, version) for one, version in ages.items() if one in running])

    def _unsent(self, worker: _Worker, run: _Run) -> bool:
        """Takes an order back that its worker has not got yet; returns whether it could be taken back."""
        for at, command in worker.outbox:
            if at > worker.sent and command is run.command:
                worker.outbox.remove((at, command))
                self._forget(run)
                return True
        return False

    def _forget(self, run: _Run) -> None:
        """Frees the place of an order."""
        if run.worker is not None:
            run.worker.running.pop(run.number, None)
            run.worker = None
        self._assign()

    def _assign(self) -> None:
        """Gives waiting orders to the workers with the fewest in flight, while they have places."""
        while self._waiting and self._workers and not self._ends:
            worker = min(self._workers.values(), key=lambda one: len(one.running))
            if len(worker.running) >= self._places:
                return
            run = self._waiting.popleft()
            if not run.result.done():
                run.worker = worker
                worker.running[run.number] = run
                worker.say(run.command)

    def join(self, name: str, pid: int) -> int:
        """Takes a worker in; returns the number by which it calls. An earlier one of the same name is lost."""
        for worker in [one for one in self._workers.values() if one.name == name]:
            self._give_up(worker, "it was started anew")
        worker = _Worker(next(self._worker_numbers), name, pid, self._clock())
        self._workers[worker.number] = worker
        log.info("%s joined (process %d)", name, pid)
        self._assign()
        return worker.number

    async def poll(self, number: int, seen: int, servers_seen: int, seconds: float) -> dict[str, Any]:
        """Waits up to ``seconds`` for something to tell a worker, and returns it.

        Args:
            number: Number of the worker.
            seen: Sequence up to which the worker got its commands; later ones are sent again.
            servers_seen: State of the servers that it knows.
            seconds: Longest wait.

        Returns:
            ``commands``: pairs of sequence and order or cancellation; ``servers_at`` and ``servers`` if they changed;
            ``end``: whether the run is over.

        Raises:
            WorkerLost: The worker is not known.
        """
        worker = self.heard(number)
        while worker.outbox and worker.outbox[0][0] <= seen:
            worker.outbox.popleft()
        if not (worker.outbox or servers_seen != self._servers_at or self._ends):
            worker.wake.clear()
            with suppress(TimeoutError):  # an empty answer: the worker asks again
                async with asyncio.timeout(seconds):
                    await worker.wake.wait()
            self.heard(number)  # it may have been given up meanwhile
        answer: dict[str, Any] = {"commands": list(worker.outbox), "end": self._ends}
        worker.sent = max(worker.sent, worker.sequence)
        if servers_seen != self._servers_at:
            answer |= {"servers_at": self._servers_at, "servers": self._servers()}
        return answer

    def heard(self, number: int, abandoned: int | None = None) -> _Worker:
        """Notes a sign of life of a worker, and how many of its abandoned episodes run.

        Raises:
            WorkerLost: The worker is not known.
        """
        worker = self._workers.get(number)
        if worker is None:
            raise WorkerLost(f"worker {number} is not known here; its episodes were given to others: start anew")
        worker.heard, worker.away = self._clock(), None
        if abandoned is not None:
            worker.abandoned = abandoned
        return worker

    def leave(self, number: int) -> None:
        """Takes a worker out that ends by itself, after it has closed its environments; its orders end as lost.

        Raises:
            WorkerLost: The worker is not known.
        """
        self._give_up(self.heard(number), "it was told to end")

    def cut_off(self, number: int) -> None:
        """Notes that the connection on which a worker waited is broken."""
        if number in self._workers:
            self._workers[number].away = self._clock()

    def ended(self, number: int, delivered: Sequence[Delivered], abandoned: int) -> None:
        """Takes ended orders from a worker; those that are not its own any more are dropped.

        Raises:
            WorkerLost: The worker is not known.
        """
        worker = self.heard(number, abandoned)
        for one in delivered:
            run = worker.running.pop(one.number, None)
            if run is None or run.result.done():
                continue  # delivered before: the answer to the worker was lost; or given up
            if one.parts is None:
                run.result.set_exception(RolloutError(f"{worker.name} failed outside the episode:\n{one.error}"))
            else:
                run.result.set_result(one.episode(run.order))
        self._assign()

    def servers_changed(self) -> None:
        """Tells the workers what is known of the inference servers now."""
        self._servers_at += 1
        for worker in self._workers.values():
            worker.wake.set()

    def look(self) -> None:
        """Gives up workers that are silent, and orders that waited too long for a worker; to be called often.

        Time in which this process itself did not run counts for no worker: their signs of life wait in its sockets.
        """
        now = self._clock()
        late = max(0.0, now - self._looked - LOOK_SECONDS)
        self._looked = now
        if self._workers:
            self._without_worker = now
        for worker in list(self._workers.values()):
            worker.heard += late
            if worker.away is not None:
                worker.away += late
            if now - worker.heard > SILENT_SECONDS:
                self._give_up(worker, f"it gave no sign of life for {SILENT_SECONDS:g} s")
            elif worker.away is not None and now - worker.away > AWAY_SECONDS:
                self._give_up(worker, "its process ended or its connection broke")
        if self._waiting and now - self._without_worker > self._patience:
            text = f"no rollout worker (rollout.workers) for {self._patience:g} s: see their logs"
            while self._waiting:
                run = self._waiting.popleft()
                if not run.result.done():
                    run.result.set_exception(RolloutError(text))

    def _give_up(self, worker: _Worker, reason: str) -> None:
        """Takes a worker out; its orders end as lost."""
        del self._workers[worker.number]
        level = logging.WARNING if worker.running else logging.INFO
        said = "%s (process %d) is lost, with %d episodes: %s"
        log.log(level, said, worker.name, worker.pid, len(worker.running), reason)
        worker.wake.set()  # a poll that waits is answered with WorkerLost
        self._lost(worker.name, worker.pid, reason)
        for run in worker.running.values():
            run.worker = None
            if not run.result.done():
                why = f"{worker.name} is lost (rollout.workers): {reason}"
                run.result.set_result(without_sampling(run.order, StopReason.WORKER_LOST, why))
        self._assign()

    def start(self) -> None:
        """Look every second from now on."""
        self._watch = asyncio.create_task(self._look_forever(), name="worker-watch")

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    async def close(self) -> None:
        """Tell the workers that the run is over; waiting orders fail."""
        self._ends = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        for worker in self._workers.values():
            worker.wake.set()
        for run in [*self._waiting, *(run for one in self._workers.values() for run in one.running.values())]:
            if not run.result.done():
                run.result.set_exception(RolloutError("the run is over"))


def places_of(max_concurrent: int, workers: int) -> int:
    """Returns the most episodes in flight in one worker: its share of those of training and of an evaluation."""
    return math.ceil(2 * max_concurrent / workers)
