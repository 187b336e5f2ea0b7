"""TimeLimit: turns and seconds."""

import pytest

from agentrl.wrappers import TimeLimit
from tests.envkit.wrappers.games import Echo, say


async def test_the_last_turn_counts_and_truncates() -> None:
    env = TimeLimit(Echo(), 2)
    for _ in range(2):
        await env.reset()
        assert (await env.step(say("a")))[1:4] == (0.5, False, False)
        _, reward, terminated, truncated, info = await env.step(say("a"))
        assert (reward, terminated, truncated) == (0.5, False, True)
        assert info["truncated_by"] == "TimeLimit(max_turns=2)"
        with pytest.raises(RuntimeError):
            await env.step(say("a"))


async def test_a_task_that_ends_with_the_last_turn_is_not_truncated() -> None:
    env = TimeLimit(Echo(), 1)
    await env.reset()
    assert (await env.step(say("bye")))[1:4] == (1.0, True, False)


async def test_seconds_are_those_of_the_given_clock() -> None:
    now = 100.0
    env = TimeLimit(Echo(), max_seconds=10, clock=lambda: now)
    await env.reset()
    now = 109.0
    assert not (await env.step(say("a")))[3]
    now = 110.0
    result = await env.step(say("a"))
    assert result[3] and result[4]["truncated_by"] == "TimeLimit(max_seconds=10)"
    await env.reset()
    assert not (await env.step(say("a")))[3], "the clock of the last episode"


@pytest.mark.parametrize("limits", [{}, {"max_turns": 0}, {"max_seconds": -1.0}, {"max_seconds": float("nan")}])
def test_wrong_limits_are_errors(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="TimeLimit"):
        TimeLimit(Echo(), **limits)  # type: ignore[arg-type]
