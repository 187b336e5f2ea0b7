"""The model as workflows see it: one handle per episode, one recorded session per role.

Guarantees: everything sampled through a handle is in its trajectories; an episode stays on one server (its prefix
cache), groups are spread over servers by load.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from agentrl.core.episode import Message, Node, Trajectory
from agentrl.inference.drift import Drift
from agentrl.inference.messages import essence, plain
from agentrl.inference.router import Router
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate, TemplateError

ASSISTANT = "assistant"  # the role of a workflow that names none


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


class EpisodeLLM:
    """A workflow's ``llm``: chat sessions by role, and a method for step rewards."""

    def __init__(self, make_session: Callable[[], Session]) -> None:
        self._make_session = make_session
        self.sessions: dict[str, Session] = {}
        self._credited: dict[str, float] = {}  # role -> sum of its own rewards

    def session(self, role: str = ASSISTANT) -> Session:
        """The session of ``role`` in this episode."""
        if role not in self.sessions:
            self.sessions[role] = self._make_session()
        return self.sessions[role]

    def reward(self, value: float, role: str | None = None, *, message: Message | None = None) -> None:
        """Credit the last message sampled by a role; several rewards for one message add up.

        Args:
            value: The reward.
            role: Role whose own reward this is; ``None``: a part of the shared reward, earned by ``assistant``.
            message: The message that was acted on. If it is one of the last call's samples, that one is credited.
        """
        session = self.session(role or ASSISTANT)
        if session.last_sampled is None:
            raise ValueError(f"role {role or ASSISTANT!r} has sampled nothing that a reward could be for")
        node = _acted_on(session.trajectory.nodes, session.last_sampled, message)
        node.reward = (node.reward or 0.0) + float(value)
        if role is not None:
            self._credited[role] = self._credited.get(role, 0.0) + float(value)

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
            ``special``: 1 where special tokens differ, else 0; ``text``: the share of ids that do.
        """
        found: list[Drift] = []
        for session in self.sessions.values():
            if isinstance(session, ChatSession):
                try:
                    drift = session.drift()
                except TemplateError:
                    continue  # messages of the agent's own that the template does not take: nothing to compare with
                if drift is not None:
                    found.append(drift)
        if not found:
            return {}
        return {
            "special": float(any(drift.special for drift in found)),
            "text": max(drift.text for drift in found),
        }

    def trajectories(self) -> dict[str, Trajectory]:
        """Recorded trajectories by role, without roles that never sampled."""
        return {role: s.trajectory for role, s in self.sessions.items() if s.trajectory.nodes}


def _acted_on(nodes: Sequence[Node], last: int, message: Message | None) -> Node:
    """The node of a message among the samples of the last call; the last of them if it is none of them."""
    first = last
    while first > 0 and nodes[first - 1].parent == nodes[last].parent and nodes[first - 1].finish_reason is not None:
        first -= 1
    if message is None or first == last:
        return nodes[last]
    key = essence(plain(message))
    return next((node for node in nodes[first:last] if essence(node.message) == key), nodes[last])


class Client(Protocol):
    """Model access of the episodes: hands out one handle for each."""

    def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
        """A handle for an episode, and the call that releases it.

        Args:
            evaluation: Whether to use the evaluation's sampling parameters or the training's.
            seed: Seed of the episode's sampling.
        """
        ...


class ChatClient:
    """Token-exact sessions on servers of the same policy.

    Args:
        router: The servers.
        template: The model's chat template.
        training: Settings of training sessions.
        evaluation: Settings of evaluation sessions.
    """

    def __init__(
        self, router: Router, template: ChatTemplate, training: SessionSettings, evaluation: SessionSettings
    ) -> None:
        self.router = router
        self._template = template
        self._settings = {False: training, True: evaluation}

    def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
        """A handle with a place on one server, and the call that gives its place back."""
        lease = self.router.lease()
        settings = self._settings[evaluation]
        settings = replace(settings, sampling=replace(settings.sampling, seed=seed))
        return EpisodeLLM(lambda: ChatSession(lease, self._template, settings)), lease.release
