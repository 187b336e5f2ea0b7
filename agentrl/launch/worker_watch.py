"""Starts a run's rollout workers, and starts them again when they end.

Guarantees: a run begins with all of its workers: one that refuses what the recipe asks for, or ends before it can take
orders, ends the run. One that ends later is started again after a pause that doubles with each death; more than
``MOST_DEATHS`` within ``WINDOW_SECONDS`` end the run, with how the worker ended and the tail of its log. What a dead
worker left in its session is killed. A worker that the controller has given up is killed: it may be stopped or blocked,
and does not come back by itself.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agentrl.launch.supervisor import Child, ChildFailed, Supervisor

LOST_WORKERS = "lost-workers.json"  # in the run's processes/: name and process id of workers that were given up
READY = "worker-{}.json"  # in the run's processes/: the worker can take orders
MOST_DEATHS = 5
WINDOW_SECONDS = 600.0
FIRST_PAUSE = 1.0


class RestartRule:
    """Decides when a worker is started again.

    Args:
        clock: Function that returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.deaths: list[float] = []

    def died(self) -> float | None:
        """Takes a death into account; returns the time of the next start, ``None`` if there were too many deaths."""
        now = self._clock()
        self.deaths = [at for at in self.deaths if now - at < WINDOW_SECONDS] + [now]
        return None if len(self.deaths) > MOST_DEATHS else now + FIRST_PAUSE * 2 ** (len(self.deaths) - 1)


class WorkerWatch:
    """The worker processes of a run on this host.

    Args:
        supervisor: Supervisor that starts them.
        numbers: Numbers of the workers in the run; empty for none.
        command: Returns the command line of a worker, given its index.
        env: Environment variables, added to those of this process.
        processes: Folder of the files by which the run's processes find each other.
        clock: Function that returns monotonic seconds.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        numbers: Sequence[int],
        command: Callable[[int], Sequence[str]],
        env: Mapping[str, str],
        processes: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervisor = supervisor
        self._command = command
        self._env = env
        self._processes = processes
        self._clock = clock
        self._rules = {number: RestartRule(clock) for number in numbers}
        self._children: dict[int, Child] = {}  # by index; absent while a worker waits for its next start
        self._due: dict[int, float] = {}

    def start(self) -> None:
        """Start all workers."""
        for index in self._rules:
            self._start(index)

    def wait_ready(self, seconds: float) -> None:
        """Wait until all workers can take orders; the ends of those that can are looked after here.

        Args:
            seconds: Longest wait for each.

        Raises:
            ChildFailed: A worker or another process ended, or is not ready in time.
        """
        for index, child in self._children.items():
            self._supervisor.wait_ready(child, self._processes / READY.format(index), seconds)
            child.replaceable = True

    def _start(self, index: int, *, replaceable: bool = False) -> None:
        self._children[index] = self._supervisor.start(
            f"worker-{index}", self._command(index), env=self._env, replaceable=replaceable
        )

    def poll(self) -> list[str]:
        """Start workers again that are due, and kill those that were given up; returns what a user should know.

        Raises:
            ChildFailed: A worker ended too often.
        """
        said: list[str] = []
        lost = self._processes / LOST_WORKERS
        given_up = json.loads(lost.read_bytes()) if lost.is_file() else {}
        for index, child in list(self._children.items()):
            if child.process.poll() is None and child.process.pid == given_up.get(child.name):
                child.process.kill()
                child.process.wait()
            if child.process.poll() is not None:
                said += self._ended(index, child)
        for index, due in list(self._due.items()):
            if self._clock() >= due:
                del self._due[index]
                self._start(index, replaceable=True)
        return said

    def _ended(self, index: int, child: Child) -> list[str]:
        how, rule = self._supervisor.end_message(child), self._rules[index]
        due = rule.died()
        if due is None:
            raise ChildFailed(
                f"a rollout worker (rollout.workers={len(self._rules)}) ended {len(rule.deaths)} times within "
                f"{WINDOW_SECONDS:g} s, the last time so: {how}"
            )
        self._supervisor.forget(child)
        del self._children[index]
        self._due[index] = due
        if child.process.poll() == 0:
            return []  # the controller told it that the run is over, and ends itself before the next start is due
        first = how.partition(";")[0]
        return [f"{first}; it is started again, and its episodes are tried again (log: {child.log})"]
