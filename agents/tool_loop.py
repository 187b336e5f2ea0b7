"""An agent with its own tools: it calls them until it has an answer, and only the answer is its action.

Guarantees: the environment gets one assistant message per step, without tool calls; the agent's earlier messages of the
step are in the conversation, token by token, and are trained like its answer; calls beyond ``max_calls`` are not run,
and the model is told so.
"""

from typing import Any

from agentrl import Agent, Message
from agentrl.core.agent import Chat
from agentrl.core.registry import load
from agentrl.envkit.tools.tool import Tool
from agentrl.envkit.tools.tool_calls import run_tool_calls

OVER = "Not run: no further tool calls are allowed. Answer now."


class ToolLoopAgent(Agent):
    """Calls its own tools, then answers.

    It is meant for environments without tools; if the environment has tools, use the agent ``chat``.

    Args:
        llm: Chat client of the episode.
        tools: Functions, or their paths (``tools.py:search``); type hints and docstrings describe them to the model.
        system: System prompt, put first in every episode.
        max_calls: Largest number of tool calls per answer.
        tool_timeout: Time limit of one call in seconds.
        max_result_chars: Characters of a tool's answer that the model sees.
    """

    def __init__(
        self,
        llm: Chat,
        tools: list[Any],
        system: str | None = None,
        max_calls: int = 8,
        tool_timeout: float = 30.0,
        max_result_chars: int = 4000,
    ) -> None:
        super().__init__(llm)
        functions = [load("agent", one) if isinstance(one, str) else one for one in tools]
        self.tools = [Tool.from_function(function) for function in functions]
        self.system = system
        self.max_calls = max_calls
        self.tool_timeout = tool_timeout
        self.max_result_chars = max_result_chars
        self.messages: list[Message] = []

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start a new conversation."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    async def step(self, observation: list[Message], info: dict[str, Any]) -> Message:
        """Run the model's tool calls until a message has none; that message is the action.

        If the model still calls tools after it was told to answer, its message without the calls is the action.
        """
        self.messages += observation
        made, told = 0, False
        while True:
            message = await self._say()
            calls = message.get("tool_calls") or []
            self.messages += await self._answers(message, allowed=max(0, self.max_calls - made))
            if not calls or told:
                action = {key: value for key, value in message.items() if key != "tool_calls"}
                return action | {"content": message.get("content") or ""}
            made += len(calls)
            told = made > self.max_calls

    async def _say(self) -> Message:
        schemas = [tool.schema() for tool in self.tools]
        reply = await self.llm.chat.completions.create(messages=self.messages, tools=schemas)
        message: Message = reply.choices[0].message.model_dump(exclude_none=True)
        self.messages.append(message)
        return message

    async def _answers(self, message: Message, *, allowed: int) -> list[Message]:
        calls = message.get("tool_calls") or []
        events = await run_tool_calls(
            {**message, "tool_calls": calls[:allowed]}, self.tools,
            timeout=self.tool_timeout, max_chars=self.max_result_chars,
        )  # fmt: skip
        refused = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": OVER}
            for call in calls[allowed:]
        ]
        return [event.message for event in events] + refused
