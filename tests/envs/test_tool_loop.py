"""The agent with tools of its own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from agentrl.agents.tool_loop import OVER, ToolLoopAgent

USER = {"role": "user", "content": "What is 6 * 7?"}


async def times(a: int, b: int) -> int:
    """Multiply."""
    return a * b


class Scripted:
    """A chat client that says what it is told to, and remembers what it was asked."""

    def __init__(self, *said: Any) -> None:
        self.said = list(said)
        self.asked: list[list[dict[str, Any]]] = []
        self.tools: list[str] = []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, *, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> ChatCompletion:
        self.asked.append(list(messages))
        self.tools = [tool["function"]["name"] for tool in tools]
        said = self.said.pop(0)
        message: dict[str, Any] = {"role": "assistant", "content": said if isinstance(said, str) else None}
        if not isinstance(said, str):
            message["tool_calls"] = [
                {"id": f"c{i}", "type": "function", "function": {"name": "times", "arguments": arguments}}
                for i, arguments in enumerate(said)
            ]
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return ChatCompletion.model_validate(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )


async def test_it_calls_its_tools_until_it_has_an_answer() -> None:
    llm = Scripted(['{"a": 6, "b": 7}'], ["{}"], "42")
    agent = ToolLoopAgent(llm, [times], system="Be brief.")
    await agent.reset()
    action = await agent.step([USER], {})
    assert action == {"role": "assistant", "content": "42"} and llm.tools == ["times"]
    roles = [message["role"] for message in agent.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert agent.messages[3]["content"] == "42" and agent.messages[5]["content"].startswith("Not run: times:")
    await agent.reset()
    assert len(agent.messages) == 1


async def test_calls_run_out_and_what_it_calls_then_is_no_part_of_the_action() -> None:
    call = ['{"a": 1, "b": 1}']
    llm = Scripted(call, call, call, call)
    agent = ToolLoopAgent(llm, [times], max_calls=2)
    await agent.reset()
    action = await agent.step([USER], {})
    assert action == {"role": "assistant", "content": ""}
    assert [message["content"] for message in agent.messages if message["role"] == "tool"] == ["1", "1", OVER, OVER]
    llm = Scripted(call * 3, "so")
    agent = ToolLoopAgent(llm, [times], max_calls=2)
    await agent.reset()
    assert (await agent.step([USER], {}))["content"] == "so"
    answers = [message for message in agent.messages if message["role"] == "tool"]
    assert [message["content"] for message in answers] == ["1", "1", OVER], "calls within the budget are run"
    assert [message["tool_call_id"] for message in answers] == ["c0", "c1", "c2"]


async def test_tools_may_be_named_by_path(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("def half(x: float) -> float:\n    return x / 2\n")
    agent = ToolLoopAgent(Scripted(), [f"{tmp_path / 'tools.py'}:half"])
    assert [tool.name for tool in agent.tools] == ["half"]
    with pytest.raises(TypeError, match="type hint"):
        (tmp_path / "bad.py").write_text("def half(x):\n    return x / 2\n")
        ToolLoopAgent(Scripted(), [f"{tmp_path / 'bad.py'}:half"])
