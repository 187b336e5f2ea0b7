"""ToolBudget and ContextLimit."""

import asyncio
from typing import Any

import pytest

from agentrl.wrappers import ContextLimit, ToolBudget
from tests.envkit.wrappers.games import Echo, Shop, buy, say

TASK = {"question": "?"}


async def test_calls_beyond_the_budget_are_answered_and_not_run() -> None:
    inner = Shop()
    env = ToolBudget(inner, 3)
    await env.reset(options=TASK)
    await env.step(buy("a"))
    action = buy("b", "c", "d", "e")
    observation, reward, terminated, truncated, info = await env.step(action)
    assert len(action["tool_calls"]) == 4, "the agent's own message"
    assert [message["tool_call_id"] for message in observation] == ["c0", "c1", "c2", "c3"]
    assert [message["content"][:7] for message in observation] == ["bbbbbbb", "ccccccc", "Not run", "Not run"]
    assert "budget of 3 tool calls is used up" in observation[2]["content"] and observation[2]["name"] == "price"
    assert (reward, terminated, truncated, inner.asked) == (0.0, False, False, 3)
    assert info["metrics"]["tool_calls"] == 3.0
    assert (info["metrics"]["tool_budget_used"], info["metrics"]["tool_calls_refused"]) == (3.0, 2.0)


async def test_a_message_of_refused_calls_is_not_the_final_answer() -> None:
    env = ToolBudget(Shop(), 0)
    await env.reset(options=TASK)
    observation, reward, terminated, truncated, _ = await env.step(buy("a") | {"content": "9"})
    assert [message["role"] for message in observation] == ["tool"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert (await env.step(say("9")))[1:3] == (1.0, True)


async def test_the_budget_is_an_episodes() -> None:
    inner = Shop()
    env = ToolBudget(inner, 1)
    for _ in range(2):
        await env.reset(options=TASK)
        await env.step(buy("a", "b"))
    assert inner.asked == 2


async def test_an_episode_may_end_with_the_budget() -> None:
    env = ToolBudget(Shop(), 1, truncate=True)
    await env.reset(options=TASK)
    assert not (await env.step(buy("a")))[3]
    observation, _, _, truncated, info = await env.step(buy("a"))
    assert truncated and len(observation) == 1 and info["truncated_by"] == "ToolBudget(max_calls=1)"
    with pytest.raises(RuntimeError):
        await env.step(say("9"))


@pytest.mark.parametrize("calls", ["text", [None, 3], [{"name": "price"}], [{"id": 7, "function": "x"}], {"id": "a"}])
async def test_calls_that_cannot_be_read_count_too(calls: Any) -> None:
    env = ToolBudget(Shop(), 0)
    await env.reset(options=TASK)
    observation, *_ = await env.step({"role": "assistant", "content": "", "tool_calls": calls})
    assert len(observation) == (len(calls) if isinstance(calls, list) else 1)
    assert all(env.observation_space.message.contains(one) for one in observation)  # type: ignore[attr-defined]


async def test_answers_to_calls_stand_together() -> None:
    class Chatty(Shop):
        async def step(self, action: Any) -> Any:
            observation, *rest = await super().step(action)
            return [*observation, {"role": "user", "content": "go on"}], *rest

    env = ToolBudget(Chatty(), 1)
    await env.reset(options=TASK)
    observation, *_ = await env.step(buy("a", "b"))
    assert [message["role"] for message in observation] == ["tool", "tool", "user"]


def test_the_range_of_rewards_has_room_for_a_refused_message() -> None:
    class Good(Shop):
        reward_range = (0.5, 1.0)

    assert ToolBudget(Good(), 1).reward_range == (0.0, 1.0)
    with pytest.raises(ValueError, match="max_calls=-1"):
        ToolBudget(Good(), -1)


async def test_a_conversation_that_is_too_long_is_truncated() -> None:
    env = ContextLimit(Echo(), 12)
    for _ in range(2):
        await env.reset(options={"word": "ab"})
        _, reward, _, truncated, info = await env.step(say("abcde"))
        assert (truncated, info["metrics"]["context_chars"]) == (False, 12.0)
        _, reward, _, truncated, info = await env.step(say("a"))
        assert (reward, truncated, info["truncated_by"]) == (0.5, True, "ContextLimit(max_chars=12)")
        with pytest.raises(RuntimeError):
            await env.step(say("a"))


async def test_an_answer_that_ends_the_task_is_not_truncated() -> None:
    env = ContextLimit(Echo(), 1)
    await env.reset()
    assert (await env.step(say("bye")))[1:4] == (1.0, True, False)


class Words:
    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


@pytest.mark.parametrize("tokenizer", [Words(), lambda text: len(text.split())])
async def test_tokens_are_counted_by_a_tokenizer_or_a_function(tokenizer: Any) -> None:
    env = ContextLimit(Echo(), max_tokens=4, tokenizer=tokenizer)
    await env.reset(options={"word": "a b"})
    *_, info = await env.step(say("c"))
    assert info["metrics"]["context_tokens"] == 4.0
    assert (await env.step(say("d")))[3]


async def test_tool_calls_count_and_long_results_are_cut() -> None:
    env = ContextLimit(Shop(), max_result_chars=11)
    await env.reset(options=TASK)
    observation, *_, info = await env.step(buy("ab"))
    assert observation[0]["content"] == "ababab\n[189 characters left out]\nbabab"
    assert observation[0]["tool_call_id"] == "c0"
    assert info["metrics"]["context_chars"] > len("go") + len(observation[0]["content"])
    assert (await env.step(say("9" * 50)))[2], "no limit of the conversation"


@pytest.mark.parametrize(
    "limits",
    [
        *({}, {"max_chars": 0}, {"max_tokens": 5}, {"max_chars": 5, "max_tokens": 5, "tokenizer": len}),
        *({"max_chars": 5, "tokenizer": len}, {"max_result_chars": -1}),
    ],
)
def test_wrong_limits_are_errors(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ContextLimit"):
        ContextLimit(Echo(), **limits)


def test_a_tool_environment_works_in_a_loop_of_its_own() -> None:
    async def run() -> Any:
        env = ContextLimit(ToolBudget(Shop(), 1), 1000)
        await env.reset(options=TASK)
        await env.step(buy("a"))
        return await env.step(say("9"))

    assert asyncio.run(run())[1] == 1.0
