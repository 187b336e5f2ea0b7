"""The plain chat agent: sends the whole conversation to the model; the reply (text or tool calls) is the action.

Guarantees: the history only grows, and contains the model's messages unchanged.
"""

from typing import Any

from agentrl import Agent, Message
from agentrl.core.agent import Chat


class ChatAgent(Agent):
    """Keeps the conversation and asks for the next message.

    Args:
        llm: Chat client of the episode.
        system: System prompt, put first in every episode.
    """

    def __init__(self, llm: Chat, system: str | None = None) -> None:
        super().__init__(llm)
        self.system = system
        self.messages: list[Message] = []
        self.tools: list[dict[str, Any]] = []

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start a new conversation."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self.tools = []

    async def step(self, observation: list[Message], info: dict[str, Any]) -> Message:
        """Add the new messages and ask the model; tools of ``info["tools"]`` are offered from then on."""
        self.messages += observation
        self.tools = info.get("tools", self.tools)
        options = {"tools": self.tools} if self.tools else {}
        reply = await self.llm.chat.completions.create(messages=self.messages, **options)
        message: Message = reply.choices[0].message.model_dump(exclude_none=True)
        self.messages.append(message)
        return message
