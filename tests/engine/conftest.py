"""A tiny engine in this process, and a real HTTP server over it."""

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
import uvicorn
from transformers import AutoModelForCausalLM

from agentrl.engine.engine import Engine
from agentrl.engine.model import load_model
from agentrl.engine.runner import ModelRunner
from agentrl.engine.server import build_app
from agentrl.engine.service import Service
from tests.engine.driving import SECONDS, Driver
from tests.tiny import build_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return build_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def reference(tiny: Path) -> torch.nn.Module:
    """The plain Hugging Face model."""
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture
def engine(tiny: Path) -> Iterator[Engine]:
    started = Engine(
        lambda: ModelRunner(load_model(str(tiny), "float32", "cpu"), 8),
        max_running=8,
        max_waiting=64,
        seed=0,
        threads=1,
    ).start()
    started.ready.result(SECONDS)
    yield started
    assert started.stop(timeout=SECONDS)


@pytest.fixture
def driver(engine: Engine) -> Driver:
    return Driver(engine)


@pytest.fixture
def client(engine: Engine, tiny: Path) -> Iterator[httpx.Client]:
    """A client of a real server over the engine."""
    config = uvicorn.Config(
        build_app(Service(engine, str(tiny))), port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    socket.listen()  # who is told the address may connect at once
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{socket.getsockname()[1]}", timeout=SECONDS) as opened:
        yield opened
    server.should_exit = True
    thread.join(SECONDS)
    socket.close()
