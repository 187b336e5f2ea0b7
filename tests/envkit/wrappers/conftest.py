"""Fixtures of the wrappers' tests."""

import threading
from typing import Any

import pytest

from tests.envkit.wrappers.games import Slow


@pytest.fixture
def slow() -> Any:
    Slow.gate, Slow.entered, Slow.closed = threading.Event(), threading.Event(), threading.Event()
    Slow.made = Slow.running = Slow.most = 0
    yield Slow
    Slow.gate.set()
