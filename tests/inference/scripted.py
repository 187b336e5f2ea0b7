"""A server on a real socket that answers from a script."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.inference.backend import Backend

Handler = Callable[[str, bytes], web.Response | None]
Made = TypeVar("Made", bound=Backend)


@asynccontextmanager
async def scripted(handler: Handler, make: Callable[[str, float], Made], timeout: float = 5.0) -> AsyncIterator[Made]:
    """A backend whose server answers every path with ``handler(path, body)``, and breaks off where that is ``None``."""

    async def answer(request: web.Request) -> web.Response:
        answered = handler(request.path, await request.read())
        if answered is None:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        return answered

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        made = make(f"{server.make_url('')}", timeout)
        try:
            yield made
        finally:
            await made.close()
