"""Real ``openai`` clients whose requests end in a session, in this process, for agents written with an SDK.

Guarantees: a request opens no connection; it is recorded as a call of ``chat.completions.create`` is, with exact
tokens. What the session refuses comes as the HTTP error that ``openai`` maps to its own exception, and is not tried
again; the response's ``extensions`` keep the session's own error, so that the episode ends with that
(:func:`agentrl.core.agent.inference_error`).
"""

import asyncio
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import openai
from openai import APIStatusError, APITimeoutError, AsyncOpenAI

from agentrl.core.agent import ORIGINAL_ERROR, ContextOverflow, InferenceError

# openai 2 is built on httpx, openai 3 on httpx2: the one whose client openai derives its own from.
httpx: Any = sys.modules[openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0]]

BASE_URL = "http://session.agentrl.invalid/v1"
_NO_ENDPOINT = (
    "{} {} is not supported by a session's client: it answers POST /chat/completions and GET /models. An SDK that uses "
    "the Responses API has a class or a setting for chat completions (OpenAIChatCompletionsModel, OpenAIChatModel)."
)
_CLIENT_ONLY = (
    "a session has chat.completions.create alone; session.client() is a real openai.AsyncOpenAI, which has {!r} too"
)


@asynccontextmanager
async def within(seconds: float | None) -> AsyncIterator[None]:
    """Limits a call as ``openai``'s client does.

    Args:
        seconds: The limit; ``None`` for none.

    Raises:
        openai.APITimeoutError: The body took longer; it was cancelled.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise APITimeoutError(httpx.Request("POST", f"{BASE_URL}/chat/completions")) from error


class OpenAINames(ABC):
    """The names of ``openai.AsyncOpenAI`` that lead to ``create``; base class of sessions."""

    @property
    def chat(self) -> Self:
        """``openai``'s namespace; there is nothing else in it."""
        return self

    @property
    def completions(self) -> Self:
        """``openai``'s namespace; there is nothing else in it."""
        return self

    @abstractmethod
    async def create(self, *, messages: Any, **options: Any) -> Any:
        """Samples an answer."""

    def client(self) -> AsyncOpenAI:
        """Returns a new ``openai.AsyncOpenAI`` whose requests end in this session; nothing has to be closed."""
        http_client = httpx.AsyncClient(transport=SessionTransport(self), timeout=None, trust_env=False)
        return AsyncOpenAI(base_url=BASE_URL, api_key="none", http_client=http_client, max_retries=0, timeout=None)

    def __getattr__(self, name: str) -> Any:
        if name in _CLIENT_NAMES:
            raise AttributeError(_CLIENT_ONLY.format(name))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_CLIENT_NAMES = frozenset(
    [
        "parse",
        "stream",
        "with_raw_response",
        "with_streaming_response",
        "with_options",
        "copy",
        "responses",
        "beta",
        "models",
        "embeddings",
        "base_url",
        "api_key",
    ]
)


class SessionTransport(httpx.AsyncBaseTransport):
    """Answers the requests of an ``openai`` client with a session.

    Args:
        session: Session, or anything else with ``openai``'s ``chat.completions.create``.
    """

    def __init__(self, session: Any) -> None:
        self._session = session

    async def handle_async_request(self, request: Any) -> Any:
        """Answers a request; a read timeout of the request limits the session's call."""
        path = request.url.path.removeprefix("/v1")
        if request.method == "GET" and (path == "/models" or path.startswith("/models/")):
            return _models(path)
        if (request.method, path) != ("POST", "/chat/completions"):
            return _error(404, _NO_ENDPOINT.format(request.method, path))
        try:
            async with within((request.extensions.get("timeout") or {}).get("read")):
                return await self._complete(json.loads(await request.aread()))
        except APITimeoutError as error:  # of the transport, openai expects the exception that it makes that from
            raise httpx.ReadTimeout(str(error), request=request) from error

    async def _complete(self, body: dict[str, Any]) -> Any:
        try:
            answer = await self._session.chat.completions.create(**body)
        except ContextOverflow as error:
            return _error(400, str(error), code="context_length_exceeded", original=error)
        except InferenceError as error:
            cause = error.__cause__
            status = cause.status_code if isinstance(cause, APIStatusError) else 503
            return _error(status, str(error), kind="server_error", original=error)
        except (TypeError, ValueError) as error:  # options and messages that the session refuses, and its template
            return _error(400, str(error), original=error)
        if not body.get("stream"):
            return _json(200, answer.model_dump_json(exclude_unset=True))
        events = [f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n" async for chunk in answer]
        content = "".join([*events, "data: [DONE]\n\n"]).encode()
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=content)


def _models(path: str) -> Any:
    model = {"id": path.removeprefix("/models").strip("/") or "policy", "object": "model", "created": 0}
    model["owned_by"] = "agentrl"
    return _json(200, json.dumps(model if path.strip("/") != "models" else {"object": "list", "data": [model]}))


def _json(status: int, text: str, extensions: Mapping[str, Any] | None = None) -> Any:
    headers = {"content-type": "application/json", "x-should-retry": "false"}
    return httpx.Response(status, headers=headers, content=text.encode(), extensions=dict(extensions or {}))


def _error(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    code: str | None = None,
    original: Exception | None = None,
) -> Any:
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return _json(status, json.dumps(body), {ORIGINAL_ERROR: original} if original is not None else None)
