"""Model access for workflows: one handle per episode, one recorded session per role.

Guarantees: everything sampled through a handle is in its trajectories; an episode stays on one server, for its prefix
cache; episodes are spread over servers by load. A reward goes to the message that was acted on, also if others were
sampled with it or after it. When an episode is over, a task that it left gets no answers and changes no record.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from agentrl.core.contract import finite
from agentrl.core.episode import Message, Trajectory
from agentrl.core.valid_text import valid_text
from agentrl.inference.acted_on import node_of
from agentrl.inference.backend import Generation, InferenceError, SamplingParams
from agentrl.inference.concurrency import Waits
from agentrl.inference.drift import Drift
from agentrl.inference.router import Lease, Router
from agentrl.inference.sdk_client import OpenAINames
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.inference.traffic import EpisodeTraffic, TrafficLog

ASSISTANT = "assistant"  # the role of a workflow that names none
REFUSAL_SECONDS = 1.0  # before a late call is refused: an agent that asks again at once must not fill the event loop


class Session(Protocol):
    """A recorded conversation: a :class:`~agentrl.core.agent.Chat` with its trajectory."""

    last_sampled: int | None

    @property
    def trajectory(self) -> Trajectory:
        """The recorded trajectory."""
        ...

    @property
    def chat(self) -> Any:
        """Namespace with ``completions.create``."""
        ...

    def client(self) -> Any:
        """Returns an ``openai.AsyncOpenAI`` whose requests end in this session."""
        ...


class EpisodeDoor:
    """Whether an episode takes calls, and how long it waited; it is shut when the episode is over."""

    def __init__(self) -> None:
        self.open = True
        self.waits = Waits()

    async def check(self) -> None:
        """Does nothing while the episode goes on.

        Raises:
            InferenceError: The episode is over.
        """
        if not self.open:
            await asyncio.sleep(REFUSAL_SECONDS)
            raise InferenceError(OVER)


OVER = "the episode is over: the calls and rewards of a task that it left do not count"


class EpisodeLLM(OpenAINames):
    """A workflow's ``llm``: chat sessions by role, and a method for step rewards.

    It is a chat client itself, that of the role ``assistant``.

    Args:
        make_session: Function of a role that makes its session.
        door: Door of the episode; without one, rewards are taken for ever.
        sampling: Sampling set-up of the run, for the record.
    """

    def __init__(
        self,
        make_session: Callable[[str], Session],
        door: EpisodeDoor | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.sampling = dict(sampling or {})
        self._make_session = make_session
        self._door = door or EpisodeDoor()
        self.sessions: dict[str, Session] = {}
        self._credited: dict[str, float] = {}  # role -> sum of its own rewards
        self._shared: list[float] = []  # parts of the shared reward
        self._latest: dict[str, tuple[int, int]] = {}  # role -> node of its latest reward, number of nodes then
        self.out_of_time = False  # set when the episode is cancelled at its deadline and may still be judged

    def session(self, role: str = ASSISTANT) -> Session:
        """The session of ``role`` in this episode."""
        role = valid_text(role)
        if role not in self.sessions:
            self.sessions[role] = self._make_session(role)
        return self.sessions[role]

    async def create(self, **given: Any) -> Any:
        """Samples an answer in the session of the role ``assistant``."""
        return await self.session().chat.completions.create(**given)

    def reward(self, value: float, role: str | None = None, *, message: Message | None = None) -> None:
        """Credit a message sampled by a role; several rewards for one message add up.

        Args:
            value: The reward.
            role: Role whose own reward this is; ``None``: a part of the shared reward, see :meth:`earner`.
            message: The message that was acted on; it is found by its content, see :mod:`agentrl.inference.acted_on`.
                Without it, the last sampled message is credited, or the one of the latest reward if nothing was
                sampled since.

        Raises:
            TypeError: ``value`` is not a number.
            ValueError: ``value`` is not finite, or the role has sampled nothing.
            InferenceError: The episode is over.
        """
        if not self._door.open:
            raise InferenceError(OVER)
        name = valid_text(role or self.earner(message))
        session = self.session(name)
        if session.last_sampled is None:
            raise ValueError(f"role {name!r} has sampled no message that could get a reward")
        place = f"the workflow's call of llm.reward(role={name!r})"
        reward = finite(value, place)
        nodes = session.trajectory.nodes
        credited, seen = self._latest.get(name, (session.last_sampled, 0))
        index = node_of(nodes, message, since=seen)
        if index is None:
            index = session.last_sampled if session.last_sampled >= seen else credited
        self._latest[name] = index, len(nodes)
        node = nodes[index]
        node.reward = finite((node.reward or 0.0) + reward, place)
        if role is None:
            self._shared.append(reward)
        else:
            self._credited[name] = finite(self._credited.get(name, 0.0) + reward, place)

    def earner(self, message: Message | None) -> str:
        """Returns the role whose message a part of the shared reward is credited to.

        It is a role that sampled ``message``. Where none did, or no message is given, it is ``assistant``, or if that
        sampled nothing the role that was opened last among those that sampled.
        """
        spoke = [role for role, session in self.sessions.items() if session.last_sampled is not None]
        spoke.sort(key=ASSISTANT.__eq__)  # the last one comes first below
        if len(spoke) > 1 and message is not None:
            for role in reversed(spoke):
                _, seen = self._latest.get(role, (0, 0))
                if node_of(self.sessions[role].trajectory.nodes, message, since=seen) is not None:
                    return role
        return spoke[-1] if spoke else ASSISTANT

    @property
    def waited(self) -> float:
        """Seconds that the episode waited for a server that refused it or was busy."""
        return self._door.waits.seconds

    @property
    def sampled(self) -> bool:
        """Whether the policy has sampled a message in this episode."""
        return any(session.last_sampled is not None for session in self.sessions.values())

    def earned(self) -> float:
        """Returns the sum of the parts of the shared reward so far."""
        return sum(self._shared)

    def role_rewards(self, given: Mapping[str, float]) -> dict[str, float]:
        """Own rewards by role: the sum of what was credited to a role, or what the workflow gave for the episode.

        Args:
            given: Role -> reward of the episode, from the workflow's outcome.

        Raises:
            ValueError: A role in ``given`` has no session.
        """
        for role in given:
            if role not in self.sessions:
                known = ", ".join(self.sessions) or "none"
                raise ValueError(f"Outcome.rewards has role {role!r}, but the episode's roles are: {known}")
        return self._credited | dict(given)

    def drift(self) -> dict[str, float]:
        """Measure the drift between stored ids and the template's render; empty if nothing can be compared.

        Returns:
            ``special``: 1 where special tokens differ, else 0; ``text``: the share of all ids that differ.
        """
        found: list[Drift] = []
        for session in self.sessions.values():
            if isinstance(session, ChatSession):
                try:
                    drift = session.drift()
                except TemplateError:
                    continue  # the template cannot render the agent's messages, so there is nothing to compare with
                if drift is not None:
                    found.append(drift)
        if not found:
            return {}
        return {
            "special": float(any(drift.special for drift in found)),
            "text": max(drift.text for drift in found),
        }

    def trajectories(self) -> dict[str, Trajectory]:
        """Recorded trajectories by role, without roles that never sampled; a later call does not change them."""
        found = {role: session.trajectory for role, session in self.sessions.items()}
        return {
            role: Trajectory.of_checked({"nodes": list(one.nodes), "tools": list(one.tools)})
            for role, one in found.items()
            if one.nodes
        }


class Client(Protocol):
    """Model access of the episodes; gives each episode a handle."""

    def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
        """Returns a handle for an episode, and the function that releases it.

        Args:
            evaluation: Whether to use the sampling parameters of evaluation instead of training.
            seed: Seed of the episode's sampling.
        """
        ...


class EvaluationClient(Client, Protocol):
    """A client that can tell how its requests fare."""

    @property
    def problem(self) -> str:
        """Why no episode can succeed any more, which ends an evaluation; empty while they can."""
        ...

    @property
    def notes(self) -> list[str]:
        """Notes about the requests so far, for a person."""
        ...

    async def close(self) -> None:
        """Closes its connections, in the event loop in which they were made."""
        ...


class ChatClient:
    """Gives episodes token-exact sessions on servers of one policy.

    Args:
        router: Router of the servers.
        template: The model's chat template.
        training: Settings of training sessions.
        evaluation: Settings of evaluation sessions.

    Attributes:
        traffic: Log of all requests; ``None``: they are not recorded.
    """

    problem = ""  # servers may come back
    notes: list[str] = []  # noqa: RUF012 - never changed

    def __init__(
        self, router: Router, template: ChatTemplate, training: SessionSettings, evaluation: SessionSettings
    ) -> None:
        self.router = router
        self._template = template
        self._settings = {False: training, True: evaluation}
        self.traffic: TrafficLog | None = None
        self._records = {of: settings.as_record() for of, settings in self._settings.items()}  # made once

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template."""
        return self._template

    async def close(self) -> None:
        """Closes the router's connections."""
        await self.router.close()

    def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
        """Returns a handle with a lease on one server, and the function that ends the lease."""
        lease = self.router.lease(evaluation=evaluation)
        settings = self._settings[evaluation]
        door = EpisodeDoor()
        log = None if self.traffic is None else self.traffic.episode(seed, evaluation=evaluation)
        sampler = _EpisodeSampler(lease, door, log)

        def release() -> None:
            door.open = False
            lease.release()

        def make_session(role: str) -> ChatSession:
            seeded = replace(settings, sampling=replace(settings.sampling, seed=seed))
            return ChatSession(sampler, self._template, seeded, role)

        return EpisodeLLM(make_session, door, self._records[evaluation]), release


class _EpisodeSampler:
    """Sampler of one episode; it gives no answer once the episode is over, also to a call that waits for one."""

    def __init__(self, lease: Lease, door: EpisodeDoor, log: EpisodeTraffic | None) -> None:
        self._lease = lease
        self._door = door
        self._log = log

    @property
    def url(self) -> str:
        """URL of the episode's current server."""
        return self._lease.url

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        """Sample a continuation."""
        await self._door.check()
        try:
            answer = await self._lease.generate(token_ids, params, request_id=request_id)
        except InferenceError as error:
            if self._log is not None:
                self._log.add(token_ids, params, error)
            raise
        if self._log is not None:
            self._log.add(token_ids, params, answer)
        await self._door.check()
        return answer
