"""The kind ``openai``: any OpenAI-compatible API, used through text, for evaluation.

Guarantees: the API key is read from the environment and written nowhere; recorded trajectories have no token ids and
hold every answer, each of ``n`` as a branch of its own; an agent gets answers in the one shape of
:mod:`agentrl.core.message_shape`, whatever shape the API answered in. Messages are sent as the agent gave them, with
images in OpenAI's form: an API may read more than text. Requests are repeated as :mod:`agentrl.inference.api_calls`
says. An answer that the API calls a refusal is recorded with the finish reason ``refusal``.
"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from openai import AsyncOpenAI, DefaultAioHttpClient, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletionMessage

from agentrl.core.episode import Message, Trajectory
from agentrl.core.message_shape import MessageError, for_api, in_shape
from agentrl.core.valid_text import valid_data
from agentrl.inference.api_calls import ApiCalls
from agentrl.inference.backend import InferenceError
from agentrl.inference.client import EpisodeDoor, EpisodeLLM
from agentrl.inference.completions import CompletionStream
from agentrl.inference.concurrency import Waits
from agentrl.inference.kinds.kind import Capabilities, ServerKind, TextApi
from agentrl.inference.options import is_given
from agentrl.inference.random_streams import stream_seed
from agentrl.inference.sdk_client import OpenAINames, httpx
from agentrl.inference.text_record import TextRecord

_SAMPLING = (
    *("temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "seed", "n", "tool_choice"),
    *("response_format", "reasoning_effort", "frequency_penalty", "presence_penalty", "logit_bias", "extra_body"),
)  # options of a call that are recorded with its answer
_SPARE = 4  # connections beside those of the answers: the list of models
_FINISHES = {  # finish reasons of other APIs, in small letters -> OpenAI's
    **dict.fromkeys(("max_tokens", "max_output_tokens", "max_length", "model_length", "token_limit"), "length"),
    **dict.fromkeys(("safety", "recitation", "prohibited_content", "blocklist", "spii", "sensitive"), "content_filter"),
}
REFUSED = "refusal"  # finish reason of an answer that the API calls a refusal


class Calls(Protocol):
    """Source of the answers to a session's calls: an API, or a transcript.

    Attributes:
        url: URL for messages.
    """

    url: str

    async def ask(self, arguments: dict[str, Any], waits: Waits) -> Any:
        """Returns the answer to a call with these arguments of ``chat.completions.create``."""
        ...


class OpenAISession(OpenAINames):
    """A conversation with an OpenAI-compatible API, recorded without ids.

    Args:
        calls: Sends requests to the API.
        model: Name of the model at the API.
        defaults: Request options used where the agent sets nothing.
        seed: Seed of the episode's sampling; ``None`` sends no seed unless the agent does.
        role: Role in the episode; each role draws random numbers of its own.
        door: Door of the episode, which is shut at its end.
    """

    def __init__(
        self,
        calls: Calls,
        model: str,
        defaults: dict[str, Any],
        seed: int | None = None,
        role: str = "assistant",
        door: EpisodeDoor | None = None,
    ) -> None:
        self._api = calls
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

    async def create(self, *, messages: list[Message], stream: Any = False, **options: Any) -> Any:
        """Pass the call on and record the answers.

        With ``stream=True`` the API is asked for the whole answer, which comes as a stream of one chunk, as in
        training: a stream that breaks, or that the agent does not read to its end, would lose what was sampled.

        Raises:
            ContextOverflow: The prompt does not fit the model's context.
            InferenceError: The API failed; the message names the URL.
            MessageError: An image cannot be read.
            openai.APITimeoutError: The answer took longer than the call's ``timeout``.
        """
        asked = valid_data({**self._defaults, **options, **self._seeded(options)})
        shown = asked.pop("stream_options", None)
        sent = [valid_data(for_api(message)) for message in messages]
        await self._door.check()
        parent = self._record.add_prompt([recorded(message) for message in sent], options.get("tools"))
        answer, refused = await self._asked({**asked, "messages": sent, "model": self._model})
        await self._door.check()
        usage = _usage(answer)
        for choice, is_refusal in zip(answer.choices, refused, strict=True):
            message = choice.message.model_dump(exclude_none=True)
            choice.finish_reason = _finish(choice.finish_reason)
            finish = REFUSED if is_refusal else choice.finish_reason
            self.last_sampled = self._record.add_answer(parent, message, finish, _set_by_call(options), usage)
            usage = None  # the numbers are of the whole call
        if stream is True:
            usage = isinstance(shown, Mapping) and bool(shown.get("include_usage"))
            return CompletionStream(answer, include_usage=usage)
        return answer

    async def _asked(self, arguments: dict[str, Any]) -> tuple[Any, list[bool]]:
        """Returns the API's answer, its messages in the one shape, and which of them are refusals."""
        url = self._api.url
        answer = await self._api.ask(arguments, self._door.waits)
        refused = [bool(getattr(choice.message, "refusal", None)) for choice in answer.choices]
        for choice in answer.choices:
            choice.message = _one_shape(choice.message, url)
        return answer, refused

    def _seeded(self, options: Mapping[str, Any]) -> dict[str, int]:
        """Gives each call a seed of its own, also where the agent names the same seed each time."""
        call, self._calls = self._calls, self._calls + 1
        given = options.get("seed", self._seed)
        if not isinstance(given, int):  # none, or openai's own sign for none
            return {}
        return {"seed": stream_seed(self._seed, given, self._role, call)}


def _finish(reason: Any) -> Any:
    """Returns a finish reason by OpenAI's name, where it has one; some servers leave it out."""
    name = str(reason or "stop")
    if name.lower().startswith("content_filter"):  # Google puts its own reason behind
        return "content_filter"
    return _FINISHES.get(name.lower(), name)


def _one_shape(message: Any, url: str) -> ChatCompletionMessage:
    """Returns an API's answer in the one shape: parts as their text, a refusal as text, arguments as text.

    Raises:
        InferenceError: The answer holds what is not text.
    """
    if _is_plain(message):
        return message
    try:
        shaped = in_shape(message)
        if isinstance(shaped.get("reasoning"), str):  # the newer name of it
            shaped.setdefault("reasoning_content", shaped.pop("reasoning"))
        return ChatCompletionMessage.construct(**shaped)
    except (MessageError, TypeError) as error:
        raise InferenceError(f"{url}: the answer cannot be read: {error}") from error


def _is_plain(message: Any) -> bool:
    """Whether an answer is a text and nothing else: it has the one shape already, and needs no copy."""
    return (
        type(message) is ChatCompletionMessage
        and message.role == "assistant"
        and isinstance(message.content, str)
        and valid_data(message.content) is message.content
        and not (message.tool_calls or message.function_call or message.refusal or message.audio)
        and not message.model_extra
    )


def recorded(message: Any) -> Message:
    """Returns a message that was sent, as data; one that holds more than text is recorded as it was."""
    try:
        return in_shape(message, images=True)
    except MessageError:
        return dict(message) if isinstance(message, dict) else message.model_dump(exclude_none=True)


def _usage(answer: Any) -> dict[str, int] | None:
    """Returns the numbers of tokens of a call, as the API says them; an answer may hold anything there.

    Some APIs count thoughts beside the answer's tokens, which only their total tells: all are paid for as sampled ones.
    """
    usage = getattr(answer, "usage", None)
    found = {
        "prompt": getattr(usage, "prompt_tokens", None),
        "completion": getattr(usage, "completion_tokens", None),
        "cached": getattr(getattr(usage, "prompt_tokens_details", None), "cached_tokens", None),
        "reasoning": getattr(getattr(usage, "completion_tokens_details", None), "reasoning_tokens", None),
    }
    known = {name: count for name, count in found.items() if isinstance(count, int) and count >= 0}
    if {"prompt", "completion", "reasoning"} <= known.keys():
        beside = known["prompt"] + known["completion"] + known["reasoning"]
        if getattr(usage, "total_tokens", None) == beside:
            known["completion"] += known["reasoning"]
    return known or None


def _set_by_call(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the options of a call that change how an answer is sampled, as plain data; ``None`` without any."""
    found = {key: options[key] for key in _SAMPLING if is_given(options.get(key))}
    return json.loads(json.dumps(found, default=repr)) if found else None


class OpenAIClient:
    """Text-only sessions on any OpenAI-compatible API; for evaluation.

    Args:
        api: Address and options of the API; the URL goes up to and including ``/v1``. Local servers need no key.
    """

    def __init__(self, api: TextApi) -> None:
        key = os.environ.get(api.api_key_env) or "none"
        connections = _connections(api.timeout, api.max_concurrent)
        client = AsyncOpenAI(base_url=api.url, api_key=key, timeout=api.timeout, max_retries=0, http_client=connections)
        self._client = client
        no_key = f"; ${api.api_key_env} holds no key" if not os.environ.get(api.api_key_env) else ""
        self._calls = ApiCalls(client, api.max_concurrent, api.retry_seconds, no_key, api.defaults)
        self._model = api.model
        self._defaults = api.defaults

    async def close(self) -> None:
        """Closes its connections, in the event loop in which they were made."""
        await self._client.close()

    @property
    def problem(self) -> str:
        """Why no episode can succeed any more; empty while they can."""
        return self._calls.problem

    @property
    def notes(self) -> list[str]:
        """Notes about the requests, for a person."""
        return self._calls.notes

    def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
        """Returns a handle; each call sends a seed that follows from ``seed``, and servers may ignore it."""
        door = EpisodeDoor()

        def session(role: str) -> OpenAISession:
            return OpenAISession(self._calls, self._model, self._defaults, seed, role, door)

        sampling = {"model": self._model, **self._defaults}
        return EpisodeLLM(session, door, sampling), lambda: setattr(door, "open", False)


def _connections(timeout: float, most: int) -> Any:
    """Returns an HTTP client for many requests at a time.

    ``openai``'s own keeps 100 connections, and each request beyond makes one anew, with its TLS handshake. On aiohttp,
    which version 3 uses where it is installed, a request takes half of the processor's time.

    Args:
        timeout: Most seconds of a request.
        most: Largest number of requests at a time.
    """
    limits = httpx.Limits(max_connections=most + _SPARE, max_keepalive_connections=most)
    try:
        return DefaultAioHttpClient(timeout=timeout, limits=limits)
    except RuntimeError:  # version 2 has that in a package of its own
        return DefaultAsyncHttpxClient(timeout=timeout, limits=limits)


class OpenAI(ServerKind):
    """The kind ``openai``: an API that is running already, named by its URL."""

    capabilities = Capabilities(
        structured_output=True,
        reasons={"scoring": "that API takes no token ids and returns no logprobs of given text"},
    )

    def text_client(self, api: TextApi) -> OpenAIClient:
        """Client that uses the ``openai`` package."""
        return OpenAIClient(api)
