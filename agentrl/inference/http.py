"""JSON over HTTP to inference servers: one connection pool per event loop, errors that name the URL.

Guarantees: every failure is an :class:`~agentrl.inference.backend.InferenceError` that names the server, its answer and
what was expected; requests that are safe to repeat, or that never reached their server, are repeated; a request that
may have been carried out is not. Half of a surrogate pair, which UTF-8 cannot hold, is sent as U+FFFD.
"""

import asyncio
import os
import ssl
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import orjson
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_exponential_jitter
from yarl import URL

from agentrl.core.agent import ContextOverflow
from agentrl.core.valid_text import valid_data
from agentrl.host.key_guard import KEY_ENV
from agentrl.inference.backend import InferenceError, ServerUnreachable

ATTEMPTS = 3
CONNECT_SECONDS = 10.0
ALIVE_SECONDS = 10.0  # for the answer to a health probe
SERVER_KEY = KEY_ENV  # environment variable of the servers' key
_JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Access:
    """Key and trust of a server.

    Attributes:
        key: Key that its calls carry as a bearer token; empty for none.
        ca: File of the authority that its certificate is signed by; ``None`` for those of the system.
    """

    key: str = field(default="", repr=False)
    ca: str | None = None

    @classmethod
    def of(cls, key_env: str, ca: str | None) -> "Access":
        """Access with the key of an environment variable; none where it is not set."""
        return cls(os.environ.get(key_env, ""), ca)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of its calls."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    @cached_property
    def trust(self) -> ssl.SSLContext | bool:
        """Trusted certificates, for aiohttp and httpx.

        Raises:
            InferenceError: The file cannot be read.
        """
        if self.ca is None:
            return True
        try:
            return ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise InferenceError(f"launch.tls.ca={self.ca} cannot be read: {error}") from error


OPEN = Access()  # without a key


class _Pool:
    """Connections of one event loop, shared by all its servers."""

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0)
        self.session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), headers=_JSON, trust_env=False
        )
        self.users = 0


_POOLS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Pool] = WeakKeyDictionary()


class ServerHttp:
    """HTTP connection to one server, through the event loop's connection pool.

    Args:
        url: Base URL.
        timeout: Most seconds of one request.
        too_long: Words in lower case; a refusal (400) that has one of them means that the prompt is too long.
        access: The server's key and trust.
    """

    def __init__(self, url: str, timeout: float, too_long: tuple[str, ...] = (), access: Access = OPEN) -> None:
        self.url = url.rstrip("/")
        self._access = access
        self._too_long = too_long
        self._timeout = timeout
        self._urls: dict[str, URL] = {}  # parsed once
        self._timeouts: dict[float, aiohttp.ClientTimeout] = {}
        self._pool: _Pool | None = None

    async def post(
        self, path: str, body: dict[str, Any] | None = None, *, expect_json: bool = True, repeatable: bool = False
    ) -> Any:
        """Send a POST request with JSON and return the answer.

        Args:
            path: Path and query.
            body: JSON object; ``None`` sends an empty body.
            expect_json: Whether to parse the answer as JSON.
            repeatable: Whether the request is idempotent, so that it may be sent again after a broken connection.

        Raises:
            ServerUnreachable: The connection failed or broke, or the request timed out.
            ContextOverflow: The server says that the prompt is too long.
            InferenceError: The server refused, or its answer is not JSON.
        """
        data = b"" if body is None else _encoded(body)
        return await self._request("POST", path, data, self._timeout, expect_json, repeatable)

    async def get(self, path: str, *, expect_json: bool = True) -> Any:
        """Send a GET request and return the JSON answer; errors as in :meth:`post`."""
        return await self._request("GET", path, None, self._timeout, expect_json, True)

    async def answers(self, path: str, timeout: float) -> bool:
        """Whether ``GET path`` succeeds within ``timeout`` seconds; it is not repeated."""
        try:
            await self._once("GET", path, None, timeout, False)
        except InferenceError:
            return False
        return True

    async def close(self) -> None:
        """Leave the pool; the last user closes its connections."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.users -= 1
            if pool.users == 0:
                _POOLS.pop(asyncio.get_running_loop(), None)
                await pool.session.close()

    def _session(self) -> aiohttp.ClientSession:
        if self._pool is None:
            loop = asyncio.get_running_loop()
            if loop not in _POOLS:
                _POOLS[loop] = _Pool()
            self._pool = _POOLS[loop]
            self._pool.users += 1
        return self._pool.session

    async def _request(
        self, method: str, path: str, data: bytes | None, seconds: float, expect_json: bool, repeatable: bool
    ) -> Any:
        def worth_repeating(error: BaseException) -> bool:
            return isinstance(error, ServerUnreachable) and not error.timed_out and (repeatable or error.never_sent)

        try:
            return await self._once(method, path, data, seconds, expect_json)
        except ServerUnreachable as error:
            if not worth_repeating(error):
                raise
        async for attempt in AsyncRetrying(
            stop=stop_after_attempt(ATTEMPTS - 1),
            wait=wait_exponential_jitter(multiplier=0.1, max=2.0),
            retry=retry_if_exception(worth_repeating),
            retry_error_callback=_raise_last,
        ):
            with attempt:
                return await self._once(method, path, data, seconds, expect_json)
        raise AssertionError("a retry loop ends with a result or an error")

    async def _once(self, method: str, path: str, data: bytes | None, seconds: float, expect_json: bool) -> Any:
        where = f"{self.url}{path}"
        try:
            url = self._urls.get(path) or self._urls.setdefault(path, URL(where))
            if seconds not in self._timeouts:
                self._timeouts[seconds] = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
            async with self._session().request(
                method,
                url,
                data=data,
                timeout=self._timeouts[seconds],
                headers=self._access.headers,
                ssl=self._access.trust,
            ) as response:
                status, payload = response.status, await response.read()
        except aiohttp.ClientSSLError as error:  # some of these are a ValueError, too
            raise ServerUnreachable(f"{where}: {error}", never_sent=True) from error
        except (ValueError, aiohttp.NonHttpUrlClientError) as error:
            raise InferenceError(f"{where} is no valid URL; want http://HOST:PORT") from error
        except TimeoutError as error:
            never_sent = isinstance(error, aiohttp.ConnectionTimeoutError)
            raise ServerUnreachable(
                f"{where}: no answer within {CONNECT_SECONDS if never_sent else seconds:g} s",
                never_sent=never_sent,
                timed_out=not never_sent,
            ) from error
        except aiohttp.ClientError as error:
            never_sent = isinstance(error, aiohttp.ClientConnectorError)
            raise ServerUnreachable(
                f"{where}: {type(error).__name__}: {error}".rstrip(": "), never_sent=never_sent
            ) from error
        if status >= 400:
            text = payload[:500].decode(errors="replace")
            too_long = status == 400 and any(words in text.lower() for words in self._too_long)
            kind = ContextOverflow if too_long else InferenceError
            error = kind(f"{where} answered {status}: {text}")
            error.status = status
            raise error
        if not expect_json:
            return None
        try:
            return orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            raise InferenceError(f"{where}: expected JSON, got {payload[:200].decode(errors='replace')!r}") from error


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:
        return orjson.dumps(valid_data(body))  # looked through only now: a prompt has thousands of ids


def _raise_last(state: RetryCallState) -> Any:
    """Raises the last attempt's own error instead of tenacity's ``RetryError``."""
    assert state.outcome is not None
    return state.outcome.result()
