"""The model as workflows see it: one handle per episode, one recorded session per role.

Guarantees: everything sampled through a handle is in its trajectories; an episode stays on one server (its prefix
cache), groups are spread over servers by load.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from openai import APIError, AsyncOpenAI

from agentrl.core.episode import Message, Node, Trajectory
from agentrl.inference.backend import InferenceError
from agentrl.inference.drift import Drift
from agentrl.inference.router import Router
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate, TemplateError


class Session(Protocol):
    """A recorded conversation: a :class:`~agentrl.core.agent.Chat` with its trajectory."""

    last_sampled: int | None

    @property
    def trajectory(self) -> Trajectory:
        """What was said."""
        ...

    @property
    def chat(self) -> Any:
        """Namespace with ``completions.create``."""
        ...


class EpisodeLLM:
    """What a workflow gets as ``llm``: sessions by role, and a place for step rewards."""

    def __init__(self, make_session: Callable[[], Session]) -> None:
        self._make_session = make_session
        self.sessions: dict[str, Session] = {}

    def session(self, role: str = "assistant") -> Session:
        """The session of ``role`` in this episode."""
        if role not in self.sessions:
            self.sessions[role] = self._make_session()
        return self.sessions[role]

    def reward(self, value: float, role: str = "assistant") -> None:
        """Credit the last message sampled by ``role``; several rewards for one message add up."""
        session = self.session(role)
        if session.last_sampled is None:
            raise ValueError(f"role {role!r} has sampled nothing that a reward could be for")
        node = session.trajectory.nodes[session.last_sampled]
        node.reward = (node.reward or 0.0) + float(value)

    def drift(self) -> dict[str, float]:
        """How far stored ids are from their canonical render; empty where nothing can be compared.

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
        """What was recorded, by role; roles that never spoke are left out."""
        return {role: s.trajectory for role, s in self.sessions.items() if s.trajectory.nodes}


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


class OpenAISession:
    """A conversation with an OpenAI-compatible API: text only, recorded without ids.

    Args:
        client: ``openai``'s own client.
        model: Model name to ask for.
        defaults: Request options used where the agent sets nothing.
    """

    def __init__(self, client: AsyncOpenAI, model: str, defaults: dict[str, Any]) -> None:
        self._client = client
        self._model = model
        self._defaults = defaults
        self._trajectory = Trajectory()
        self.last_sampled: int | None = None

    @property
    def trajectory(self) -> Trajectory:
        """What was said, without ids."""
        return self._trajectory

    @property
    def chat(self) -> "OpenAISession":
        """``openai``'s namespace."""
        return self

    @property
    def completions(self) -> "OpenAISession":
        """``openai``'s namespace."""
        return self

    async def create(self, *, messages: list[Message], **options: Any) -> Any:
        """Pass the call on and record the answer.

        Raises:
            InferenceError: The API failed; the message names the URL.
        """
        arguments = {**self._defaults, **options, "messages": messages, "model": self._model}
        url = self._client.base_url
        try:
            answer = await self._client.chat.completions.create(**arguments)
        except APIError as error:
            raise InferenceError(f"{url}chat/completions: {type(error).__name__}: {error}") from error
        if not getattr(answer, "choices", None):
            raise InferenceError(f"{url}chat/completions: the answer holds no choices: {str(answer)[:200]}")
        self._record(messages, answer.choices[0])
        return answer

    def _record(self, messages: list[Message], choice: Any) -> None:
        nodes = self.trajectory.nodes
        parent = len(nodes) - 1 if nodes else None
        for message in messages[len(nodes) :]:
            nodes.append(Node(parent=parent, message=message))
            parent = len(nodes) - 1
        message = choice.message.model_dump(exclude_none=True)
        nodes.append(Node(parent=parent, message=message, finish_reason=choice.finish_reason))
        self.last_sampled = len(nodes) - 1


class OpenAIClient:
    """Text-only sessions on any OpenAI-compatible API; for evaluation.

    Args:
        base_url: URL up to and including ``/v1``.
        model: Model name.
        api_key_env: Environment variable with the key; local servers need none.
        timeout: Seconds one request may take.
        defaults: Request options (``temperature``, ``max_tokens``).
    """

    def __init__(self, base_url: str, model: str, api_key_env: str, timeout: float, defaults: dict[str, Any]) -> None:
        key = os.environ.get(api_key_env) or "none"
        self._client = AsyncOpenAI(base_url=base_url, api_key=key, timeout=timeout, max_retries=3)
        self._model = model
        self._defaults = defaults

    def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
        """A handle; ``seed`` is sent along, servers may ignore it."""
        defaults = {**self._defaults, "seed": seed}
        return EpisodeLLM(lambda: OpenAISession(self._client, self._model, defaults)), lambda: None

    async def first_model(self) -> str:
        """Name of the first model that the server lists."""
        try:
            models = await self._client.models.list()
        except APIError as error:
            raise InferenceError(f"{self._client.base_url}models: {type(error).__name__}: {error}") from error
        if not models.data:
            raise InferenceError(f"{self._client.base_url}models lists no model; name one with inference.model=NAME")
        return models.data[0].id
