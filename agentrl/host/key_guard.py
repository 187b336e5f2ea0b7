"""Refuses requests without the server's key; also runs another server's module with that guard.

``python .../key_guard.py -m MODULE ARGUMENTS...`` runs a server that uses uvicorn (SGLang's and vLLM's do) as
``python -m MODULE`` does, with the guard around its application. Their own keys leave calls open: vLLM's that of
``/pause`` and ``/collective_rpc``, SGLang's ``/ready`` and ``/metrics``, and its log shows the key.

Guarantees: with a key, no call is answered without it, whatever its path; the comparison takes the same time wherever
the texts differ; the key comes from the environment and stands in no command line. This file imports nothing of ours,
because the server's interpreter may be another.
"""

import hmac
import os
import runpy
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

KEY_ENV = "AGENTRL_SERVER_KEY"  # the servers' key, in the environment of servers and of their clients
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
_REFUSAL = b'{"error": {"message": "wrong or missing key"}}'


class KeyGuard:
    """ASGI application that passes on what carries the key as a bearer token, and answers 401 to the rest.

    Args:
        app: Guarded application.
        key: The key.
    """

    def __init__(self, app: App, key: str) -> None:
        self._app = app
        self._wanted = b"Bearer " + key.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers one request; start and end of the application are passed on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        if hmac.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # the handshake
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})


def guard_uvicorn(key: str) -> None:
    """Puts the guard around every application that uvicorn serves in this process."""
    import uvicorn

    load = uvicorn.Config.load

    def guarded(config: uvicorn.Config) -> None:
        load(config)
        config.loaded_app = KeyGuard(cast(Any, config.loaded_app), key)

    uvicorn.Config.load = guarded  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as python -m has it, instead of this folder
    guard_uvicorn(os.environ[KEY_ENV])
    _, _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
