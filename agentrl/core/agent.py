"""The agent contract: an agent maps observations to actions.

Guarantees: an agent sees a chat client in ``openai``'s shape and nothing of the training; the same agent runs under
evaluation against any server.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol

from agentrl.core.episode import Message


class Chat(Protocol):
    """The part of ``openai.AsyncOpenAI`` that agents use: ``await chat.completions.create(messages=...)``.

    Unset sampling arguments are the recipe's. The reply is an ``openai`` ``ChatCompletion``.
    """

    @property
    def chat(self) -> Any:
        """Namespace with ``completions.create``."""
        ...


class Agent(ABC):
    """Maps observations to actions; holds the conversation."""

    def __init__(self, llm: Chat) -> None:
        self.llm = llm

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:  # noqa: B027
        """Begin a new episode."""

    @abstractmethod
    async def step(self, observation: list[Message], info: dict[str, Any]) -> Message:
        """Answer the new messages with one assistant message."""
