"""An environment with tools in one class: ``@tool`` methods, a prompt and a reward.

Guarantees: the tool calls of a message run at the same time and each is answered, whatever is wrong with it; the
message without a tool call is the answer that is judged; an episode in which the tool turns run out is truncated
unjudged. What became of the calls is logged apart from the reward.
"""

from abc import abstractmethod
from functools import cached_property
from typing import Any

from agentrl.core.environment import Info
from agentrl.core.episode import Message
from agentrl.envkit.language import LanguageEnvironment, spoken
from agentrl.envkit.tools.tool import Tool, collect_tools
from agentrl.envkit.tools.tool_calls import ToolEvent, ToolEventKind, run_tool_calls


class ToolEnvironment(LanguageEnvironment):
    """Ask, let the model call tools, judge its answer: subclasses write ``prompt``, ``reward`` and ``@tool`` methods.

    Args:
        max_tool_turns: Messages with tool calls before the episode is truncated.
        tool_timeout: Seconds one call may take, where the tool sets no limit of its own.
        max_result_chars: Characters of a tool's answer that the model sees.
    """

    max_tool_turns: int = 8
    tool_timeout: float = 30.0
    max_result_chars: int = 4000
    _task: dict[str, Any] | None = None
    _turns = 0
    _kinds: tuple[ToolEventKind, ...] = ()

    def __init__(self, *, max_tool_turns: int = 8, tool_timeout: float = 30.0, max_result_chars: int = 4000) -> None:
        self.max_tool_turns = max_tool_turns
        self.tool_timeout = tool_timeout
        self.max_result_chars = max_result_chars
        _ = self.tools  # one that cannot be described is an error now, not in an episode

    @cached_property
    def tools(self) -> list[Tool]:
        """The ``@tool`` methods, bound to this environment."""
        return collect_tools(self)

    @abstractmethod
    def prompt(self, task: dict[str, Any]) -> list[Message]:
        """Messages that put the task to the model."""

    @abstractmethod
    def reward(self, task: dict[str, Any], answer: str) -> Any:
        """Judge the final answer; may be ``async``.

        Returns:
            The reward, ``(reward, metrics)`` where metrics are numbers to log apart from it, or a verdict of
            :mod:`agentrl.rewards`. A reward of ``None`` is missing: the episode is counted and not trained on.
        """

    def call_reward(self, task: dict[str, Any], events: list[ToolEvent]) -> float:
        """Reward of a message with tool calls, from what became of them; 0 unless a subclass says otherwise."""
        return 0.0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """Start with ``options`` as the task; ``info["tools"]`` are the tools' schemas."""
        self._task, self._turns, self._kinds = self.choose_task(seed, options), 0, ()
        return self.prompt(self._task), {"tools": [tool.schema() for tool in self.tools]}

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        """Answer the message's tool calls, or judge it as the final answer."""
        if self._task is None:
            raise RuntimeError(f"{type(self).__name__}.step called before reset, or after the episode's end")
        answer = spoken(action, self)
        events = await run_tool_calls(action, self.tools, timeout=self.tool_timeout, max_chars=self.max_result_chars)
        task = self._task
        if not events:
            self._task = None
            reward, metrics = await self.judged(self.reward, task, answer)
            return [], reward, True, False, {"metrics": metrics | self._call_metrics()}
        self._turns += 1
        self._kinds += tuple(event.kind for event in events)
        answers = [event.message for event in events]
        over = self._turns >= self.max_tool_turns
        if over:
            self._task = None
        said = [{"kind": event.kind.value, "name": event.name, "call_id": event.call_id} for event in events]
        info: Info = {"events": said, "metrics": self._call_metrics()}
        return answers, self.call_reward(task, events), False, over, info

    def _call_metrics(self) -> dict[str, float]:
        """Tool calls of the episode so far, and whether any was there, and the share of them that ran well."""
        calls = len(self._kinds)
        good = sum(kind is ToolEventKind.OK for kind in self._kinds)
        metrics = {"tool_calls": float(calls), "tool_used": float(good > 0)}
        return metrics | ({"tool_calls_ok": good / calls} if calls else {})
