"""Tool environments: what a subclass of thirty lines gets."""

import asyncio
import threading
from typing import Any

import pytest

from agentrl import EndEpisode, Message, SingleTurnEnvironment, ToolEnvironment, tool
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


async def test_an_episode_of_calls_only_is_truncated_and_judged_with_an_empty_answer() -> None:
    env = Shop(max_tool_turns=2)
    await env.reset(options=TASK)
    assert (await env.step(calling("pen")))[1:4] == (0.0, False, False)
    *_, info = step = await env.step(calling("pen"))
    assert step[1:4] == (0.0, False, True)
    assert info["metrics"]["said"] == 0.0, "it was judged"
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


class Counter(Shop):
    """A shop with a counter: paying ends the episode, and so does an answer that is handed in."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.paid = False

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.paid = False
        return await super().reset(seed=seed, options=options)

    @tool
    def checkout(self) -> None:
        """Pay."""
        self.paid = True
        raise EndEpisode

    @tool
    async def hand_in(self, item: str) -> None:
        """Give the answer.

        Args:
            item: The answer.
        """
        raise EndEpisode(item)

    def call_reward(self, task: dict[str, Any], events: list[ToolEvent]) -> float:
        return 0.1 * sum(event.kind is ToolEventKind.OK for event in events)

    def reward(self, task: dict[str, Any], answer: str) -> Any:
        return (None if answer == "unclear" else float(self.paid or answer == task["answer"])), {"paid": self.paid}


def checking_out(*more: dict[str, Any]) -> Message:
    call = {"id": "end", "type": "function", "function": {"name": "checkout", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call, *more]}


async def test_a_tool_ends_the_episode_and_the_state_is_judged() -> None:
    env = Counter()
    await env.reset(options=TASK)
    other = calling("pen")["tool_calls"]
    observation, reward, terminated, truncated, info = await env.step(checking_out(*other))
    assert [message["tool_call_id"] for message in observation] == ["end", "c0"], "every call is answered"
    assert (reward, terminated, truncated) == (pytest.approx(1.2), True, False), "calls 0.1 each, and the judged 1"
    assert info["metrics"] == {"paid": 1.0, "tool_calls": 2.0, "tool_calls_ok": 1.0, "tool_used": 1.0}
    with pytest.raises(RuntimeError, match="after the episode's end"):
        await env.step(checking_out())


@pytest.mark.parametrize(("answer", "reward"), [("9", pytest.approx(1.1)), ("8", 0.1), ("unclear", None)])
async def test_a_tool_may_hand_in_the_answer_also_in_the_last_turn(answer: str, reward: Any) -> None:
    env = Counter(max_tool_turns=1)
    await env.reset(options=TASK)
    assert (await env.step(calling(answer, name="hand_in")))[1:4] == (reward, True, False)


async def test_of_two_tools_that_end_the_episode_the_first_counts() -> None:
    env = Counter()
    await env.reset(options=TASK)
    assert (await env.step(calling("9", "8", name="hand_in")))[1] == pytest.approx(1.2)


def test_a_reward_in_place_of_an_answer_is_refused_and_said() -> None:
    with pytest.raises(TypeError, match=r"EndEpisode\(1\.0\): want the answer as text"):
        EndEpisode(1.0)  # type: ignore[arg-type]


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
