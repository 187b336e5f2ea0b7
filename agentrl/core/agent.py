"""The agent contract: an agent maps observations to actions.

Guarantees: an agent gets a chat client with ``openai``'s interface and does not depend on training, so the same agent
also runs in an evaluation and against any server.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol

from agentrl.core.episode import Message


class Chat(Protocol):
    """The part of ``openai.AsyncOpenAI`` that agents use: ``await chat.completions.create(messages=...)``.

    Sampling arguments that are not given come from the recipe. The reply is an ``openai`` ``ChatCompletion``.
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
        """Begins a new episode."""

    @abstractmethod
    async def step(self, observation: list[Message], info: dict[str, Any]) -> Message:
        """Answers the observation's new messages with one assistant message."""
