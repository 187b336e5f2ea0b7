"""A controller whose episodes take no real time: a virtual clock, a model without a server, workflows from a script."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from agentrl.config.load import load_recipe
from agentrl.core.columns import Columns
from agentrl.core.episode import Node, Task, Trajectory
from agentrl.core.weight_manifest import WeightManifest
from agentrl.core.workflow import RolloutWorkflow
from agentrl.core.writer_thread import Writer
from agentrl.data.datasets import LoadedTasks
from agentrl.inference.client import EpisodeDoor, EpisodeLLM
from agentrl.inference.router import Router
from agentrl.launch.controller_process import make_stream
from agentrl.rollout.controller import Controller
from agentrl.rollout.failed_episodes import FailedEpisodes
from agentrl.rollout.journal import Journal
from agentrl.weights.transaction import Committed, WeightTransaction
from tests.inference.fakes import FakeBackend, answer

T = TypeVar("T")
TASKS = [Task(id=f"train/{i}", data={"n": i}) for i in range(12)]


class _Sleepless(selectors.SelectSelector):
    """Waits for nothing: the clock jumps to what comes next."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None and not (found := super().select(0)):
            raise AssertionError("everything waits, and nothing will ever happen")
        if timeout is None:
            return found
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is virtual; one that waits for ever fails at once.

    What is for a thread runs in place.
    """

    def __init__(self) -> None:
        self._sleepless = _Sleepless()
        super().__init__(self._sleepless)

    def time(self) -> float:
        return self._sleepless.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        found = self.create_future()
        found.set_result(func(*args))
        return found


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine under a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class Said:
    """A session that samples without a server."""

    def __init__(self, client: "InstantClient", role: str) -> None:
        self.client_ = client
        self.trajectory = Trajectory()
        self.last_sampled: int | None = None

    def say(self, tokens: int) -> None:
        """Samples a message of so many tokens."""
        nodes = self.trajectory.nodes
        version = self.client_.version()
        parent = len(nodes) - 1 if nodes else None
        self.last_sampled = len(nodes)
        nodes.append(
            Node(
                parent=parent, message={"role": "assistant", "content": "x"}, token_ids=[5] * tokens,
                loss_mask=[1] * tokens, logprobs=[-1.0] * tokens, versions=[version] * tokens, finish_reason="stop",
            )
        )  # fmt: skip


class InstantClient:
    """Counts the handles that were given out and not released."""

    def __init__(self) -> None:
        self.open = self.most = 0
        self.version: Callable[[], int] = lambda: 0

    def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
        self.open += 1
        self.most = max(self.most, self.open)
        door = EpisodeDoor()

        def release() -> None:
            assert door.open, "released twice"
            door.open = False
            self.open -= 1

        return EpisodeLLM(lambda role: Said(self, role), door), release  # type: ignore[arg-type, return-value]


class Instant:
    """A controller with a workflow, and a trainer that only takes batches and publishes versions."""

    def __init__(
        self,
        folder: Path,
        workflow: RolloutWorkflow,
        *settings: str,
        tasks: list[Task] = TASKS,
        writer: Writer | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        defaults = [
            "rollout.batch_size=2",
            "rollout.group_size=3",
            "rollout.max_staleness=1",
            "rollout.episode_timeout=60",
        ]
        recipe = load_recipe("arithmetic_grpo", [*defaults, *settings], device="cpu")
        self.folder, self.recipe = folder, recipe
        self.client = InstantClient()
        self.journal = Journal(folder, episodes=True, writer=writer)
        self.failed = FailedEpisodes(folder, writer)
        self.written: list[dict[str, float]] = []
        self.batches: list[Columns] = []
        router = Router([FakeBackend(lambda ids, params: answer([5]))])
        self.controller = Controller(
            recipe,
            make_stream(recipe, LoadedTasks(tasks, "")),
            workflow,
            self.client,
            WeightTransaction(router, Committed(0, "/start"), "retract", 10.0),
            self.journal,
            lambda step, metrics: self.written.append(metrics),
            self._evaluate,
            failed=self.failed,
        )
        self.client.version = lambda: self.controller.gate.version

    async def _evaluate(self, version: int) -> dict[str, float]:
        return {}

    async def step(self, step: int) -> Columns:
        """One trainer step."""
        self.batches.append(Columns.from_bytes(await self.controller.next_batch(step))[0])
        assert await self.controller.ready(1.0)
        version = step + 1
        manifest = WeightManifest(
            version=version, path=f"/v{version}", transport="disk", dtype="F32", nbytes=0, fingerprints={}
        )
        await self.controller.publish(manifest)
        self.controller.record(version, {}, final=False)
        return self.batches[-1]

    async def close(self) -> None:
        """Ends the rollouts and closes the files."""
        await self.controller.close()
        self.journal.close()
        self.failed.close()
