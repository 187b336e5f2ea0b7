"""An environment that is made as a test is closed, within a time limit."""

import asyncio
from typing import Any

import pytest

from agentrl.core.environment import Environment
from agentrl.envkit import make
from agentrl.envkit.make import discard


class Closing(Environment[Any, Any]):
    """Closes as it is told to."""

    def __init__(self, how: str) -> None:
        self.how, self.closed = how, False

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        raise NotImplementedError

    async def step(self, action: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        while self.how == "hangs":
            await asyncio.Event().wait()
        if self.how == "raises":
            raise TimeoutError("its own")
        self.closed = True


async def test_an_environment_is_closed_inside_a_running_event_loop() -> None:
    env = Closing("well")
    discard(env)
    assert env.closed


def test_a_close_that_hangs_or_raises_is_reported_before_any_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeoutError, match=r"^its own$"):
        discard(Closing("raises"))
    monkeypatch.setattr(make, "CLOSE_SECONDS", 0.02)
    with pytest.raises(TimeoutError, match=r"Closing\.close \(test_make\.py:\d+\) .* did not end within 0\.02 s"):
        discard(Closing("hangs"))
