"""The kind ``openai``: any OpenAI-compatible API, used through text, for evaluation.

Guarantees: the API key is read from the environment and written nowhere; recorded trajectories have no token ids and
hold every answer, each of ``n`` as a branch of its own; an agent gets answers in the one shape of
:mod:`agentrl.core.message_shape`, whatever shape the API answered in. Messages are sent as the agent gave them: an API
may read more than text.
"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from openai import APIError, AsyncOpenAI
from openai.types.chat import ChatCompletionMessage

from agentrl.core.episode import Message, Trajectory
from agentrl.core.message_shape import MessageError, in_shape
from agentrl.core.valid_text import valid_data
from agentrl.inference.backend import InferenceError
from agentrl.inference.client import EpisodeDoor, EpisodeLLM
from agentrl.inference.completions import CompletionStream
from agentrl.inference.kinds.kind import Capabilities, ServerKind, TextApi
from agentrl.inference.random_streams import stream_seed
from agentrl.inference.text_record import TextRecord

RETRIES = 3  # of one request, by the openai client


class OpenAISession:
    """A conversation with an OpenAI-compatible API: text only, recorded without ids.

    Args:
        client: Client of the ``openai`` package.
        model: Name of the model at the API.
        defaults: Request options used where the agent sets nothing.
        seed: Seed of the episode's sampling; ``None`` sends no seed unless the agent does.
        role: Role in the episode; each role draws random numbers of its own.
        door: Door of the episode, which is shut at its end.
    """

    def __init__(
        self,
        client: AsyncOpenAI,
        model: str,
        defaults: dict[str, Any],
        seed: int | None = None,
        role: str = "assistant",
        door: EpisodeDoor | None = None,
    ) -> None:
        self._client = client
        self._model = model
        self._defaults = defaults
        self._seed, self._role = seed, role
        self._door = door or EpisodeDoor()
        self._calls = 0
        self._record = TextRecord()
        self.last_sampled: int | None = None

    @property
    def trajectory(self) -> Trajectory:
        """The recorded trajectory, without token ids."""
        return self._record.trajectory

    @property
    def chat(self) -> "OpenAISession":
        """``openai``'s namespace."""
        return self

    @property
    def completions(self) -> "OpenAISession":
        """``openai``'s namespace."""
        return self

    async def create(self, *, messages: list[Message], stream: Any = False, **options: Any) -> Any:
        """Pass the call on and record the answers.

        With ``stream=True`` the API is asked for the whole answer, which comes as a stream of one chunk, as in
        training: a stream that breaks, or that the agent does not read to its end, would lose what was sampled.

        Raises:
            InferenceError: The API failed; the message names the URL.
        """
        asked = valid_data({**self._defaults, **options, **self._seeded(options)})
        shown = asked.pop("stream_options", None)
        sent = [valid_data(message) for message in messages]
        await self._door.check()
        answer = await self._asked({**asked, "messages": sent, "model": self._model})
        await self._door.check()
        parent = self._record.add_prompt([_recorded(message) for message in sent], options.get("tools"))
        for choice in answer.choices:
            message = choice.message.model_dump(exclude_none=True)
            finish = choice.finish_reason or "stop"  # some servers leave it out
            self.last_sampled = self._record.add_answer(parent, message, finish)
        if stream is True:
            usage = isinstance(shown, Mapping) and bool(shown.get("include_usage"))
            return CompletionStream(answer, include_usage=usage)
        return answer

    async def _asked(self, arguments: dict[str, Any]) -> Any:
        """Returns the API's answer, its messages in the one shape."""
        url = f"{str(self._client.base_url).rstrip('/')}/chat/completions"
        try:
            answer = await self._client.chat.completions.create(**arguments)
        except APIError as error:
            raise InferenceError(f"{url}: {type(error).__name__}: {error}") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InferenceError(f"{url}: the answer is no JSON: {error}") from error
        if not getattr(answer, "choices", None):
            raise InferenceError(f"{url}: the answer holds no choices: {str(answer)[:200]}")
        for choice in answer.choices:
            choice.message = _one_shape(choice.message, url)
        return answer

    def _seeded(self, options: Mapping[str, Any]) -> dict[str, int]:
        """Gives each call a seed of its own, also where the agent names the same seed each time."""
        call, self._calls = self._calls, self._calls + 1
        given = options.get("seed", self._seed)
        if not isinstance(given, int):  # none, or openai's own sign for none
            return {}
        return {"seed": stream_seed(self._seed, given, self._role, call)}


def _one_shape(message: Any, url: str) -> ChatCompletionMessage:
    """Returns an API's answer in the one shape: parts as their text, a refusal as text, arguments as text.

    Raises:
        InferenceError: The answer holds what is not text.
    """
    try:
        return ChatCompletionMessage.construct(**in_shape(message))
    except (MessageError, TypeError) as error:
        raise InferenceError(f"{url}: the answer cannot be read: {error}") from error


def _recorded(message: Any) -> Message:
    """Returns a message that was sent, as data; one that holds more than text is recorded as it was."""
    try:
        return in_shape(message)
    except MessageError:
        return dict(message) if isinstance(message, dict) else message.model_dump(exclude_none=True)


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
        door = EpisodeDoor()

        def session(role: str) -> OpenAISession:
            return OpenAISession(self._client, self._model, self._defaults, seed, role, door)

        return EpisodeLLM(session, door), lambda: setattr(door, "open", False)


class OpenAI(ServerKind):
    """The kind ``openai``: an API that is running already, named by its URL."""

    capabilities = Capabilities(
        structured_output=True,
        reasons={"scoring": "that API takes no token ids and returns no logprobs of given text"},
    )

    def text_client(self, api: TextApi) -> OpenAIClient:
        """Client that uses the ``openai`` package."""
        return OpenAIClient(api)
