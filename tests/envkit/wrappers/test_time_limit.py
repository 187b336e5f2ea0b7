"""TimeLimit: turns and seconds."""

from typing import Any

import pytest

from agentrl.wrappers import ContextLimit, ScaleReward, TimeLimit, ToolBudget
from tests.envkit.wrappers.games import Echo, Shop, buy, say


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


class Judged(Echo):
    """Unfinished, the last word is worth something; ``unclear`` has no reward."""

    async def judge_unfinished(self) -> tuple[float | None, dict[str, Any]]:
        assert self.task is not None
        return (None if self.task["word"] == "unclear" else 0.25), {"metrics": {"unfinished": 1.0}}


@pytest.mark.parametrize("limit", [lambda env: TimeLimit(env, 1), lambda env: ContextLimit(env, 1)])
@pytest.mark.parametrize(("word", "said", "reward"), [("a", "b", 0.75), ("unclear", "b", None), ("a", "nothing", None)])
async def test_what_a_limit_ends_is_judged_as_it_stands(limit: Any, word: str, said: str, reward: Any) -> None:
    env = ScaleReward(limit(limit(Judged())), 2.0)
    await env.reset(options={"word": word})
    _, found, terminated, truncated, info = await env.step(say(said))
    assert (found, terminated, truncated) == (None if reward is None else 2 * reward, False, True)
    assert info["metrics"]["unfinished"] == 1.0 and info["metrics"]["length"] == len(said)
    with pytest.raises(RuntimeError, match="after the episode's end"):
        await env.judge_unfinished()


async def test_a_budget_that_truncates_lets_the_answer_be_judged_as_empty() -> None:
    class Generous(Shop):
        def reward(self, task: dict[str, Any], answer: str) -> float:
            return 0.5 if answer == "" else 1.0

    env = ToolBudget(Generous(), 0, truncate=True)
    await env.reset(options={"question": "?"})
    assert (await env.step(buy("a")))[1:4] == (0.5, False, True)


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
