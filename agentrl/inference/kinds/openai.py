"""The kind ``openai``: any OpenAI-compatible API, used through text, for evaluation.

Guarantees: the API key is read from the environment and written nowhere; recorded trajectories have no token ids; an
agent gets answers in the one shape of :mod:`agentrl.core.message_shape`, whatever shape the API answered in. Messages
are sent as the agent gave them: an API may read more than text.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from openai import APIError, AsyncOpenAI
from openai.types.chat import ChatCompletionMessage

from agentrl.core.episode import Message, Node, Trajectory
from agentrl.core.message_shape import MessageError, in_shape
from agentrl.inference.backend import InferenceError
from agentrl.inference.client import EpisodeLLM
from agentrl.inference.kinds.kind import Capabilities, ServerKind, TextApi
from agentrl.inference.random_streams import stream_seed

RETRIES = 3  # of one request, by the openai client


class OpenAISession:
    """A conversation with an OpenAI-compatible API: text only, recorded without ids.

    Args:
        client: Client of the ``openai`` package.
        model: Name of the model at the API.
        defaults: Request options used where the agent sets nothing.
        seed: Seed of the episode's sampling; ``None`` sends no seed unless the agent does.
        role: Role in the episode; each role draws random numbers of its own.
    """

    def __init__(
        self,
        client: AsyncOpenAI,
        model: str,
        defaults: dict[str, Any],
        seed: int | None = None,
        role: str = "assistant",
    ) -> None:
        self._client = client
        self._model = model
        self._defaults = defaults
        self._seed, self._role = seed, role
        self._calls = 0
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
        arguments = {**self._defaults, **options, **self._seeded(options), "messages": messages, "model": self._model}
        url = str(self._client.base_url).rstrip("/")
        try:
            answer = await self._client.chat.completions.create(**arguments)
        except APIError as error:
            raise InferenceError(f"{url}/chat/completions: {type(error).__name__}: {error}") from error
        if not getattr(answer, "choices", None):
            raise InferenceError(f"{url}/chat/completions: the answer holds no choices: {str(answer)[:200]}")
        for choice in answer.choices:
            choice.message = _one_shape(choice.message, url)
        self._record(messages, answer.choices[0])
        return answer

    def _seeded(self, options: Mapping[str, Any]) -> dict[str, int]:
        """Gives each call a seed of its own, also where the agent names the same seed each time."""
        call, self._calls = self._calls, self._calls + 1
        given = options.get("seed", self._seed)
        if not isinstance(given, int):  # none, or openai's own sign for none
            return {}
        return {"seed": stream_seed(self._seed, given, self._role, call)}

    def _record(self, messages: list[Message], choice: Any) -> None:
        nodes = self.trajectory.nodes
        parent = len(nodes) - 1 if nodes else None
        for message in messages[len(nodes) :]:
            nodes.append(Node(parent=parent, message=_recorded(message)))
            parent = len(nodes) - 1
        message = choice.message.model_dump(exclude_none=True)
        nodes.append(Node(parent=parent, message=message, finish_reason=choice.finish_reason))
        self.last_sampled = len(nodes) - 1


def _one_shape(message: Any, url: str) -> ChatCompletionMessage:
    """Returns an API's answer in the one shape: parts as their text, a refusal as text, arguments as text.

    Raises:
        InferenceError: The answer holds what is not text.
    """
    try:
        return ChatCompletionMessage.construct(**in_shape(message))
    except (MessageError, TypeError) as error:
        raise InferenceError(f"{url}/chat/completions: the answer cannot be read: {error}") from error


def _recorded(message: Any) -> Message:
    """Returns a message that was sent, as data; one that holds more than text is recorded as it was."""
    try:
        return in_shape(message)
    except MessageError:
        return message if isinstance(message, dict) else message.model_dump(exclude_none=True)


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
        """Returns a handle; each call sends a seed that follows from ``seed``, and servers may ignore it."""

        def session(role: str) -> OpenAISession:
            return OpenAISession(self._client, self._model, self._defaults, seed, role)

        return EpisodeLLM(session), lambda: None


class OpenAI(ServerKind):
    """The kind ``openai``: an API that is running already, named by its URL."""

    capabilities = Capabilities(
        structured_output=True,
        reasons={"scoring": "that API takes no token ids and returns no logprobs of given text"},
    )

    def text_client(self, api: TextApi) -> OpenAIClient:
        """Client that uses the ``openai`` package."""
        return OpenAIClient(api)
