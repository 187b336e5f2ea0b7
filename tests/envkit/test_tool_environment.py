"""Tool environments: what a subclass of thirty lines gets."""

import asyncio
import threading
from typing import Any

import pytest

from agentrl import Message, SingleTurnEnvironment, ToolEnvironment, tool
from agentrl.envkit.tools.tool_calls import ToolEvent, ToolEventKind


class Shop(ToolEnvironment):
    """The total must be that of the price list."""

    prices = {"pen": 2, "book": 7}  # noqa: RUF012

    @tool
    def price(self, item: str) -> int:
        """Price of one item.

        Args:
            item: What is bought.
        """
        return self.prices[item]

    def prompt(self, task: dict[str, Any]) -> list[Message]:
        return [{"role": "user", "content": task["question"]}]

    def reward(self, task: dict[str, Any], answer: str) -> Any:
        return float(answer == task["answer"]), {"said": float(bool(answer))}


TASK = {"question": "What do a pen and a book cost?", "answer": "9"}


def calling(*items: str, name: str = "price") -> Message:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": {"item": item}}}
        for i, item in enumerate(items)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


async def test_calls_are_answered_and_the_message_without_one_is_judged() -> None:
    env = Shop()
    observation, info = await env.reset(options=TASK)
    assert observation == [{"role": "user", "content": TASK["question"]}]
    (schema,) = info["tools"]
    assert schema["function"]["name"] == "price"
    assert schema["function"]["parameters"]["properties"]["item"]["description"] == "What is bought."
    observation, reward, terminated, truncated, info = await env.step(calling("pen", "book"))
    assert [message["content"] for message in observation] == ["2", "7"]
    assert [message["tool_call_id"] for message in observation] == ["c0", "c1"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    observation, reward, terminated, truncated, info = await env.step({"role": "assistant", "content": "9"})
    assert (observation, reward, terminated, truncated) == ([], 1.0, True, False)
    assert info["metrics"] == {"said": 1.0, "tool_calls": 2.0, "tool_calls_ok": 1.0, "tool_used": 1.0}
    with pytest.raises(RuntimeError, match="before reset, or after the episode's end"):
        await env.step(calling("pen"))


async def test_calls_that_cannot_run_are_answered_and_counted() -> None:
    env = Shop()
    await env.reset(options=TASK)
    wrong = calling("pen", name="cost")
    observation, *_, info = await env.step(wrong)
    assert "no tool is called" in observation[0]["content"]
    observation, *_ = await env.step(calling("car"))
    assert "KeyError" in observation[0]["content"]
    *_, info = await env.step({"role": "assistant", "content": ""})
    assert info["metrics"] == {"said": 0.0, "tool_calls": 2.0, "tool_calls_ok": 0.0, "tool_used": 0.0}


async def test_an_episode_of_calls_only_is_truncated_without_a_reward() -> None:
    env = Shop(max_tool_turns=2)
    await env.reset(options=TASK)
    assert (await env.step(calling("pen")))[1:4] == (0.0, False, False)
    assert (await env.step(calling("pen")))[1:4] == (0.0, False, True)
    with pytest.raises(RuntimeError):
        await env.step(calling("pen"))
    await env.reset(options=TASK)
    *_, info = await env.step({"role": "assistant", "content": "9"})
    assert info["metrics"]["tool_calls"] == 0.0, "counts of the last episode"


async def test_a_reward_may_be_async_and_calls_may_earn_one() -> None:
    class Kind(Shop):
        def call_reward(self, task: dict[str, Any], events: list[ToolEvent]) -> float:
            return 0.1 * sum(event.kind is ToolEventKind.OK for event in events)

        async def reward(self, task: dict[str, Any], answer: str) -> float:
            return 0.5

    env = Kind()
    await env.reset(options=TASK)
    assert (await env.step(calling("pen", "car")))[1] == pytest.approx(0.1)
    assert (await env.step({"role": "assistant", "content": "x"}))[1] == 0.5


async def test_the_first_good_message_of_calls_earns_its_reward_once_per_episode() -> None:
    class Paid(Shop):
        first_call_reward = 0.2

    env = Paid()
    for _ in range(2):
        await env.reset(options=TASK)
        rewards = [(await env.step(calling(*items)))[1] for items in (["pen", "car"], ["pen", "book"], ["pen"])]
        assert rewards == [0.0, 0.2, 0.0], "one bad call among good ones earns nothing"


@pytest.mark.parametrize("base", [SingleTurnEnvironment, ToolEnvironment])
async def test_a_blocking_reward_runs_beside_the_loop_and_is_given_up_on_time(base: Any) -> None:
    release, entered = threading.Event(), threading.Event()

    class Slow(base):
        blocking = True

        def prompt(self, task: dict[str, Any]) -> list[Message]:
            return []

        def judge(self, task: dict[str, Any], answer: str) -> float:
            entered.set()
            release.wait()
            return 1.0

        reward = judge

    env = Slow()
    await env.reset(options=TASK)
    step = asyncio.create_task(env.step({"role": "assistant", "content": ""}))
    assert await asyncio.to_thread(entered.wait, 30), "the loop is free while it judges"
    release.set()
    assert (await step)[1] == 1.0
    release.clear()
    env.reward_timeout = 0.01
    await env.reset(options=TASK)
    with pytest.raises(TimeoutError, match=r"judge took over 0\.01 s in a thread"):
        await env.step({"role": "assistant", "content": ""})
    release.set()


async def test_a_reset_without_a_task_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"Shop\.reset needs options"):
        await Shop().reset()


def test_a_tool_that_cannot_be_described_is_an_error_when_the_environment_is_made() -> None:
    class Untyped(Shop):
        @tool
        def weigh(self, item):  # type: ignore[no-untyped-def]
            return 1

    with pytest.raises(TypeError, match="weigh"):
        Untyped()
