"""A real embedded server in the test process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from agentrl.engine.engine import Engine
from agentrl.engine.make_runner import make_runner
from agentrl.engine.model import load_model
from agentrl.engine.server import build_app
from agentrl.engine.service import Service

SECONDS = 60  # longest wait for its start or end


@contextmanager
def served(folder: Path, slots: int = 8) -> Iterator[str]:
    """URL of a server of the model in ``folder``, in float32."""
    engine = Engine(
        lambda: make_runner(load_model(str(folder), dtype="float32", device="cpu"), slots), max_running=slots, threads=1
    ).start()
    engine.ready.result(SECONDS)
    config = uvicorn.Config(
        build_app(Service(engine, str(folder))), port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    socket.listen()  # who is told the address may connect at once
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        socket.close()
        engine.stop(SECONDS)
