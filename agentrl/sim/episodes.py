"""Simulated episodes: their shape, and the client, session and workflow that play them.

Guarantees: an episode's shape depends on its task and its seed alone, so every split of the devices and every bound is
tried with the same episodes. What an episode samples is recorded as a real session records it, with one entry for each
stretch of tokens (:mod:`agentrl.sim.server`); an answer that a push aborted is continued.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.core.episode import Node, Task, Trajectory
from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow
from agentrl.inference.backend import Generation, SamplingParams
from agentrl.inference.client import EpisodeDoor, EpisodeLLM
from agentrl.inference.router import Lease, Router
from agentrl.sim.faults import Faults, NoFaults, suffer

QUESTION = {"role": "user", "content": "simulated"}
ANSWER = {"role": "assistant", "content": "simulated"}
PLAIN = dict(Node(parent=None, message=ANSWER, finish_reason="stop"))  # fields of an answer, without its tokens


@dataclass(frozen=True)
class Turn:
    """One answer, and what follows it.

    Attributes:
        tokens: Tokens of the answer, at least 1.
        outside: Seconds until the next request, or the episode's end: environment, tools, verifier.
    """

    tokens: int
    outside: float = 0.0


@dataclass(frozen=True)
class Shape:
    """What happens in an episode.

    Attributes:
        turns: Its answers in order.
        reward: Its reward.
        before: Seconds before its first request.
    """

    turns: tuple[Turn, ...]
    reward: float = 0.0
    before: float = 0.0

    @property
    def tokens(self) -> int:
        """Sampled tokens of the whole episode."""
        return sum(turn.tokens for turn in self.turns)


class Shapes(Protocol):
    """Source of episode shapes."""

    def of(self, task: str, seed: int) -> Shape:
        """Returns the shape of the episode with this seed of a task; the same for the same arguments."""
        ...

    def mean(self) -> float:
        """Returns the mean number of tokens of an episode."""
        ...

    def turns(self) -> float:
        """Returns the mean number of answers of an episode."""
        ...


class SimSession:
    """Session of a simulated episode.

    Args:
        lease: The episode's place on the servers.
        door: Door of the episode.
    """

    def __init__(self, lease: Lease, door: EpisodeDoor) -> None:
        self._lease = lease
        self._door = door
        self._trajectory = Trajectory.of_checked({"nodes": [], "tools": []})
        self.last_sampled: int | None = None

    @property
    def trajectory(self) -> Trajectory:
        """The recorded trajectory."""
        return self._trajectory

    @property
    def chat(self) -> Any:
        """Simulated episodes have no messages."""
        raise TypeError("a simulated session samples with sample(tokens)")

    def client(self) -> Any:
        """Simulated episodes have no messages."""
        raise TypeError("a simulated session samples with sample(tokens)")

    async def sample(self, tokens: int) -> None:
        """Sample an answer of ``tokens`` tokens."""
        left, ids, versions = tokens, [], []
        while left > 0:
            await self._door.check()
            part: Generation = await self._lease.generate([], SamplingParams(max_new_tokens=left), request_id="")
            await self._door.check()
            ids += part.token_ids
            versions += part.versions
            left -= sum(part.token_ids)
        nodes = self._trajectory.nodes
        self.last_sampled = len(nodes)
        nodes.append(
            Node.of_checked(
                {
                    **PLAIN,
                    "parent": self.last_sampled - 1 if self.last_sampled else None,
                    "token_ids": ids,
                    "loss_mask": [1] * len(ids),
                    "logprobs": [-1.0] * len(ids),
                    "versions": versions,
                }
            )
        )


class SimClient:
    """Gives simulated episodes sessions on the router's servers.

    Args:
        router: Router of the simulated servers.
    """

    def __init__(self, router: Router) -> None:
        self.router = router

    def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
        """Returns a handle with a lease on one server, and the function that ends the lease."""
        lease, door = self.router.lease(), EpisodeDoor()

        def release() -> None:
            door.open = False
            lease.release()

        return EpisodeLLM(lambda _: SimSession(lease, door), door), release


class SimWorkflow(RolloutWorkflow):
    """Plays episodes of given shapes.

    Args:
        shapes: Source of the shapes.
        faults: Faults of the environment.
    """

    def __init__(self, shapes: Shapes, faults: Faults | None = None) -> None:
        self._shapes = shapes
        self._faults = faults or NoFaults()

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        """Sample each answer, and wait as long as the environment takes."""
        shape = self._shapes.of(task.id, seed)
        session: Any = llm.session()
        if shape.before:
            await asyncio.sleep(shape.before)
        for turn in shape.turns:
            await session.sample(turn.tokens)
            await suffer(self._faults, "environment")
            if turn.outside:
                await asyncio.sleep(turn.outside)
        return Outcome(reward=shape.reward)
