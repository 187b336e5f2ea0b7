"""The agent contract: an agent maps observations to actions.

Guarantees: an agent gets a chat client with ``openai``'s interface and does not depend on training, so the same agent
also runs in an evaluation and against any server.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol

from agentrl.core.episode import Message

ORIGINAL_ERROR = "agentrl.error"  # key of a session's error in the `extensions` of an HTTP response


class InferenceError(RuntimeError):
    """The server refused a request, answered nonsense, or could not be reached.

    Attributes:
        status: HTTP status of a refusal, else 0.
    """

    status: int = 0


class ContextOverflow(InferenceError):
    """The prompt does not fit the model's context."""


def inference_error(error: BaseException | None) -> InferenceError | None:
    """Finds the session's error behind an exception of an SDK; ``None`` if there is none.

    It is the exception itself, one that it was raised from, or what the HTTP response of one of them was made for.
    What an agent raised while it handled such an error is a fault of its own, unless it was raised ``from`` it.

    Args:
        error: An exception that an agent let through.
    """
    for _ in range(100):  # a chain may be a circle
        if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        original = getattr(getattr(error, "response", None), "extensions", {}).get(ORIGINAL_ERROR, error)
        if isinstance(original, InferenceError):
            return original
        if error is None or error.__cause__ is None:
            return None
        error = error.__cause__
    return None


class Chat(Protocol):
    """The part of ``openai.AsyncOpenAI`` that agents use: ``await chat.completions.create(messages=...)``.

    Sampling arguments that are not given come from the recipe. The reply is an ``openai`` ``ChatCompletion``. A prompt
    that leaves no room for an answer raises :class:`ContextOverflow`; an agent may shorten its conversation and go on,
    else the episode ends with what it earned.
    """

    @property
    def chat(self) -> Any:
        """Namespace with ``completions.create``."""
        ...

    def client(self) -> Any:
        """Returns a real ``openai.AsyncOpenAI`` whose requests end in this session, for agents written with an SDK."""
        ...


class Agent(ABC):
    """Maps observations to actions; holds the conversation.

    Args:
        llm: Chat client of the episode. In a run it is the :class:`~agentrl.LLM` of the workflow: an agent that speaks
            in several roles gets the client of each with ``llm.session("planner")``.
    """

    def __init__(self, llm: Chat) -> None:
        self.llm = llm

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:  # noqa: B027
        """Begins a new episode."""

    @abstractmethod
    async def step(self, observation: list[Message], info: dict[str, Any]) -> Message:
        """Answers the observation's new messages with one assistant message."""
