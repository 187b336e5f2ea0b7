"""The controller's port for rollout workers on other machines.

Guarantees: it answers the calls of rollout workers alone, none without the run's secret; it listens at the head's
address, not on all interfaces, and speaks TLS where ``launch.tls`` gives a certificate. All other calls to the
controller stay on the head's loopback interface.
"""

import asyncio
import contextlib
import socket
from collections.abc import Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route

from agentrl.config.errors import UserError
from agentrl.config.recipe import Recipe

AFTER_PORT = 2  # launch.port is the ranks', the next one the door's
GRACE_SECONDS = 1  # for calls that are in flight when the controller stops


class WorkerPort:
    """A second listener of the controller; it serves from its start to its close.

    Args:
        recipe: Recipe with ``rollout.nodes`` and the head's address.
        routes: Routes of the workers' calls.

    Raises:
        UserError: The port is taken, or the address is of another machine.
    """

    def __init__(self, recipe: Recipe, routes: Sequence[Route]) -> None:
        tls, address = recipe.launch.tls, str(recipe.launch.head)
        port = recipe.launch.port + AFTER_PORT if recipe.launch.port else 0
        config = uvicorn.Config(
            Starlette(routes=list(routes)),
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=GRACE_SECONDS,
            ssl_certfile=tls.certificate,
            ssl_keyfile=tls.key,
        )
        try:
            found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(found[4][:2], family=found[0])
        except OSError as error:
            raise UserError(
                f"the controller cannot listen at launch.head={address}, port {port}, for the workers of "
                f"rollout.nodes={recipe.rollout.nodes}: {error.strerror or error}"
            ) from error
        host = f"[{address}]" if ":" in address else address
        self.url = f"{'https' if tls.certificate else 'http'}://{host}:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]  # the controller has them
        self._serving = asyncio.create_task(self._server.serve([self._socket]), name="port of rollout workers")

    async def close(self) -> None:
        """Stops listening, and waits for calls that are in flight."""
        self._server.should_exit = True
        await self._serving
