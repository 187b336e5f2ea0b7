"""The kind ``openai``: any OpenAI-compatible API, used through text, for evaluation.

Guarantees: the API key is read from the environment and written nowhere; recorded trajectories have no token ids.
"""

import os
from collections.abc import Callable
from typing import Any

from openai import APIError, AsyncOpenAI

from agentrl.core.episode import Message, Node, Trajectory
from agentrl.inference.backend import InferenceError
from agentrl.inference.client import EpisodeLLM
from agentrl.inference.kinds.kind import Capabilities, ServerKind, TextApi

RETRIES = 3  # of one request, by the openai client


class OpenAISession:
    """A conversation with an OpenAI-compatible API: text only, recorded without ids.

    Args:
        client: Client of the ``openai`` package.
        model: Name of the model at the API.
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
        """The recorded trajectory, without token ids."""
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
        url = str(self._client.base_url).rstrip("/")
        try:
            answer = await self._client.chat.completions.create(**arguments)
        except APIError as error:
            raise InferenceError(f"{url}/chat/completions: {type(error).__name__}: {error}") from error
        if not getattr(answer, "choices", None):
            raise InferenceError(f"{url}/chat/completions: the answer holds no choices: {str(answer)[:200]}")
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
        api: Address and options of the API; the URL goes up to and including ``/v1``. Local servers need no key.
    """

    def __init__(self, api: TextApi) -> None:
        key = os.environ.get(api.api_key_env) or "none"
        self._client = AsyncOpenAI(base_url=api.url, api_key=key, timeout=api.timeout, max_retries=RETRIES)
        self._model = api.model
        self._defaults = api.defaults

    def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
        """Returns a handle; ``seed`` is sent with each request, and servers may ignore it."""
        defaults = {**self._defaults, "seed": seed}
        return EpisodeLLM(lambda: OpenAISession(self._client, self._model, defaults)), lambda: None


class OpenAI(ServerKind):
    """The kind ``openai``: an API that is running already, named by its URL."""

    capabilities = Capabilities(
        structured_output=True,
        reasons={"scoring": "that API takes no token ids and returns no logprobs of given text"},
    )

    def text_client(self, api: TextApi) -> OpenAIClient:
        """Client that uses the ``openai`` package."""
        return OpenAIClient(api)
