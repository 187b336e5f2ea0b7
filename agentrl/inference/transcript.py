"""Plays recorded conversations back, so that an environment can judge saved episodes again.

Guarantees: no model is asked; an answer is given only to the very prompt that it was sampled for, and a workflow that
asks anything else, or more, gets an error that says so and fails that episode alone.
"""

from collections.abc import Callable
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from agentrl.core.agent import InferenceError
from agentrl.core.episode import Episode, Node, Trajectory
from agentrl.core.valid_text import valid_data
from agentrl.inference.client import EpisodeDoor, EpisodeLLM
from agentrl.inference.concurrency import Waits
from agentrl.inference.kinds.openai import OpenAISession, recorded
from agentrl.inference.messages import essence


class TranscriptClient:
    """Client whose episodes get the answers of saved ones.

    Args:
        episode_of: Function of an episode's seed that returns the saved episode, ``None`` without one.
    """

    problem = ""
    notes: list[str] = []  # noqa: RUF012 - never changed

    def __init__(self, episode_of: Callable[[int], Episode | None]) -> None:
        self._episode_of = episode_of

    async def close(self) -> None:
        """Does nothing: there is no connection."""

    def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
        """Returns a handle whose sessions answer as those of the saved episode with this seed did."""
        saved = self._episode_of(seed)
        door = EpisodeDoor()

        def session(role: str) -> OpenAISession:
            found = saved.trajectories.get(role) if saved is not None else None
            calls = TranscriptCalls(found or Trajectory(), role)
            return OpenAISession(calls, "transcript", {}, None, role, door)

        return EpisodeLLM(session, door, saved.sampling if saved is not None else {}), lambda: None


class TranscriptCalls:
    """Answers the calls of a role in the order in which a saved trajectory has them.

    Args:
        saved: The saved trajectory.
        role: Name of the role.

    Attributes:
        url: Name for messages.
    """

    url = "transcript"

    def __init__(self, saved: Trajectory, role: str) -> None:
        self._saved = saved
        self._role = role
        nodes = enumerate(saved.nodes)
        self._answers = [index for index, node in nodes if node.finish_reason is not None or any(node.loss_mask)]
        self._next = 0

    async def ask(self, arguments: dict[str, Any], waits: Waits) -> ChatCompletion:
        """Returns the saved answers to the next call.

        Raises:
            InferenceError: The saved conversation ended, or its prompt was another.
        """
        count = arguments.get("n") or 1
        found = self._answers[self._next : self._next + count]
        if len(found) < count:
            raise InferenceError(f"the transcript of {self._role} ends after {self._next} answers, and more are asked")
        parent = self._saved.nodes[found[0]].parent
        path = [] if parent is None else self._saved.path(parent)
        before = [self._saved.nodes[index].message for index in path]
        now = [recorded(message) for message in valid_data(arguments["messages"])]
        for place, (one, other) in enumerate(zip(before, now, strict=False)):
            if essence(one) != essence(other):
                raise InferenceError(
                    f"message {place} of the prompt is not that of the transcript: {str(other)[:200]}, was "
                    f"{str(one)[:200]}"
                )
        if len(before) != len(now):
            raise InferenceError(f"the prompt has {len(now)} messages, and that of the transcript {len(before)}")
        self._next += count
        return _completion([self._saved.nodes[index] for index in found])


def _completion(nodes: list[Node]) -> ChatCompletion:
    choices = [
        Choice.construct(
            index=index,
            finish_reason=node.finish_reason or "stop",
            message=ChatCompletionMessage.construct(**node.message),
            logprobs=None,
        )
        for index, node in enumerate(nodes)
    ]
    return ChatCompletion.construct(
        id="transcript", object="chat.completion", created=0, model="transcript", choices=choices
    )
