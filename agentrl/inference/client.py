"""Model access for workflows: one handle per episode, one recorded session per role.

Guarantees: everything sampled through a handle is in its trajectories; an episode stays on one server, for its prefix
cache; episodes are spread over servers by load.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from agentrl.core.contract import finite
from agentrl.core.episode import Message, Node, Trajectory
from agentrl.core.message_shape import in_shape
from agentrl.inference.drift import Drift
from agentrl.inference.messages import essence
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
    """A workflow's ``llm``: chat sessions by role, and a method for step rewards.

    Args:
        make_session: Function of a role that makes its session.
    """

    def __init__(self, make_session: Callable[[str], Session]) -> None:
        self._make_session = make_session
        self.sessions: dict[str, Session] = {}
        self._credited: dict[str, float] = {}  # role -> sum of its own rewards
        self._shared: list[float] = []  # parts of the shared reward

    def session(self, role: str = ASSISTANT) -> Session:
        """The session of ``role`` in this episode."""
        if role not in self.sessions:
            self.sessions[role] = self._make_session(role)
        return self.sessions[role]

    @property
    def chat(self) -> Any:
        """The ``chat`` of the session of the role ``assistant``."""
        return self.session().chat

    def reward(self, value: float, role: str | None = None, *, message: Message | None = None) -> None:
        """Credit the last message sampled by a role; several rewards for one message add up.

        Args:
            value: The reward.
            role: Role whose own reward this is; ``None``: a part of the shared reward, see :meth:`earner`.
            message: The message that was acted on. If it is one of the last call's samples, that one is credited.

        Raises:
            TypeError: ``value`` is not a number.
            ValueError: ``value`` is not finite, or the role has sampled nothing.
        """
        earner = role or self.earner(message)
        session = self.session(earner)
        if session.last_sampled is None:
            raise ValueError(f"role {earner!r} has sampled no message that could get a reward")
        place = f"the workflow's call of llm.reward(role={earner!r})"
        reward = finite(value, place)
        node = _acted_on(session.trajectory.nodes, session.last_sampled, message)
        node.reward = finite((node.reward or 0.0) + reward, place)
        if role is None:
            self._shared.append(reward)
        else:
            self._credited[role] = finite(self._credited.get(role, 0.0) + reward, place)

    def earner(self, message: Message | None) -> str:
        """Returns the role whose message a part of the shared reward is credited to.

        It is the role that sampled ``message`` in its last call. Where none did, or no message is given, it is
        ``assistant``, or if that sampled nothing the role that was opened last among those that sampled.
        """
        spoke = [role for role, session in self.sessions.items() if session.last_sampled is not None]
        spoke.sort(key=ASSISTANT.__eq__)  # the last one comes first below
        if len(spoke) > 1 and message is not None:
            key = essence(in_shape(message))
            for role in reversed(spoke):
                session = self.sessions[role]
                assert session.last_sampled is not None
                node = _acted_on(session.trajectory.nodes, session.last_sampled, message)
                if essence(node.message) == key:
                    return role
        return spoke[-1] if spoke else ASSISTANT

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
        """Recorded trajectories by role, without roles that never sampled."""
        return {role: s.trajectory for role, s in self.sessions.items() if s.trajectory.nodes}


def _acted_on(nodes: Sequence[Node], last: int, message: Message | None) -> Node:
    """The node of a message among the samples of the last call; the last of them if it is none of them."""
    first = last
    while first > 0 and nodes[first - 1].parent == nodes[last].parent and nodes[first - 1].finish_reason is not None:
        first -= 1
    if message is None or first == last:
        return nodes[last]
    key = essence(in_shape(message))
    return next((node for node in reversed(nodes[first : last + 1]) if essence(node.message) == key), nodes[last])


class Client(Protocol):
    """Model access of the episodes; gives each episode a handle."""

    def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
        """Returns a handle for an episode, and the function that releases it.

        Args:
            evaluation: Whether to use the sampling parameters of evaluation instead of training.
            seed: Seed of the episode's sampling.
        """
        ...


class ChatClient:
    """Gives episodes token-exact sessions on servers of one policy.

    Args:
        router: Router of the servers.
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
        """Returns a handle with a lease on one server, and the function that ends the lease."""
        lease = self.router.lease()
        settings = self._settings[evaluation]
        settings = replace(settings, sampling=replace(settings.sampling, seed=seed))
        return EpisodeLLM(lambda role: ChatSession(lease, self._template, settings, role)), lease.release
