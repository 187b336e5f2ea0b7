"""Serves the page on this machine's loopback until Ctrl-C.

Guarantees: only the loopback is listened on; a port that is in use is said with what to do, and with the default port
the next free one is taken; the link is printed once the page answers.
"""

import asyncio
import contextlib
import socket
import webbrowser
from collections.abc import Callable

import uvicorn

from agentrl.config.errors import UserError
from agentrl.view.access import Keys
from agentrl.view.index_process import read_newest, reading
from agentrl.view.page_app import application
from agentrl.view.shown_runs import ShownRun

HOST = "127.0.0.1"
PORT = 8720
TRIED = 20  # ports after the default one


def listen(port: int | None) -> socket.socket:
    """Opens the port to listen on.

    Args:
        port: The port; 0 for any; ``None`` for the first free one from :data:`PORT` on.

    Raises:
        UserError: It is in use.
    """
    wanted = [port] if port is not None else [*range(PORT, PORT + TRIED), 0]
    for one in wanted:
        found = socket.socket()
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((HOST, one))
            found.listen(64)
        except OSError as error:
            found.close()
            if port is not None:
                raise UserError(
                    f"port {port} cannot be used: {error.strerror}; leave --port out, and a free one is taken"
                ) from error
            continue
        return found
    raise UserError(f"no free port on {HOST}")


def serve(
    runs: list[ShownRun], port: int | None, say: Callable[[str], None], *, browser: bool = False, path: str = "/"
) -> None:
    """Serve the page until Ctrl-C.

    Args:
        runs: The shown runs.
        port: Port, see :func:`listen`.
        say: Prints a line for the user.
        browser: Whether to open the link in the user's browser.
        path: First page.
    """
    with listen(port) as opened:
        base = f"http://{HOST}:{opened.getsockname()[1]}"
        keys = Keys(used=lambda token: say(f"the link was used; for another browser: {base}{path}?token={token}"))
        link = f"{base}{path}?token={keys.token}"
        config = uvicorn.Config(
            application(runs, keys), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        read_newest(runs)
        with reading(runs), contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how a user ends it
            asyncio.run(_serve(uvicorn.Server(config), opened, lambda: _ready(link, say, browser)))


def _ready(link: str, say: Callable[[str], None], browser: bool) -> None:
    say(f"open {link}\n(works once, on this machine only; Ctrl-C ends it)")
    if browser:
        webbrowser.open(link)


async def _serve(server: uvicorn.Server, opened: socket.socket, ready: Callable[[], None]) -> None:
    serving = asyncio.ensure_future(server.serve(sockets=[opened]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        ready()
    await serving
