"""Lets in only the person who started the view, and lets the page load nothing from elsewhere.

Guarantees: a link's token works once and becomes a cookie that scripts cannot read; a request without the cookie, or
with a ``Host`` that is not this machine's loopback name, gets nothing of a run. Every answer forbids scripts and styles
that are not ours, connections to others, and frames.
"""

import hmac
import secrets
from collections.abc import Callable
from http.cookies import SimpleCookie
from urllib.parse import parse_qs, urlencode

from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "agentrl_view"
HOSTS = ("127.0.0.1", "localhost", "[::1]")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
REFUSED = (
    "This page belongs to the person who started it.\n"
    "Open the link that `agentrl view` printed; each link works once, and the terminal shows the next one.\n"
)


class Keys:
    """The cookie's secret and the token of the next link.

    Args:
        used: Called with the next token when one was used.
    """

    def __init__(self, used: Callable[[str], None] | None = None) -> None:
        self._session = secrets.token_urlsafe(24)
        self.token = secrets.token_urlsafe(24)
        self._used = used

    def spend(self, token: str) -> str | None:
        """Returns the cookie's value for the right token, which is worth nothing afterwards; else ``None``."""
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return None
        self.token = secrets.token_urlsafe(24)
        if self._used is not None:
            self._used(self.token)
        return self._session

    def knows(self, cookie: str) -> bool:
        """Whether a cookie's value is this session's."""
        return hmac.compare_digest(cookie.encode(), self._session.encode())


class Door:
    """Middleware that checks each request, and adds the headers to each answer.

    Args:
        app: The application behind it.
        keys: Token and cookie.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        if not _is_local(headers.get("host", "")):
            return await PlainTextResponse("wrong host\n", 421)(scope, receive, guarded)
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if "token" in query and (session := self._keys.spend(query.pop("token")[0])) is not None:
            return await self._enter(session, scope, query)(scope, receive, guarded)
        if not self._keys.knows(_cookie(headers, self._name(headers))):
            return await PlainTextResponse(REFUSED, 403)(scope, receive, guarded)
        await self._app(scope, receive, guarded)

    def _enter(self, session: str, scope: Scope, query: dict[str, list[str]]) -> RedirectResponse:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        rest = urlencode(query, doseq=True)
        answer = RedirectResponse(scope["path"] + (f"?{rest}" if rest else ""), 303)
        answer.set_cookie(self._name(headers), session, httponly=True, samesite="strict", path="/")
        return answer

    @staticmethod
    def _name(headers: dict[str, str]) -> str:
        """Returns the cookie's name: one for each port, because browsers do not tell ports apart."""
        port = headers.get("host", "").rpartition(":")[2]
        return f"{COOKIE}_{port}" if port.isdigit() else COOKIE


def _is_local(host: str) -> bool:
    name = host if host.endswith("]") or ":" not in host else host.rpartition(":")[0]
    return name in HOSTS


def _cookie(headers: dict[str, str], name: str) -> str:
    jar = SimpleCookie()
    jar.load(headers.get("cookie", ""))
    return jar[name].value if name in jar else ""
