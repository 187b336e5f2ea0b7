"""An environment with tools in one class: ``@tool`` methods, a prompt and a reward.

Guarantees: the tool calls of a message run at the same time and each is answered, whatever is wrong with it; the
message without a tool call is the answer that is judged; an episode in which the tool turns run out is truncated
unjudged. What became of the calls is logged apart from the reward.
"""

import inspect
from abc import abstractmethod
from typing import Any

from agentrl.core.environment import Info, LanguageEnvironment
from agentrl.core.episode import Message
from agentrl.core.tool_calls import ToolEvent, ToolEventKind, run_tool_calls
from agentrl.core.tools import Tool, collect_tools


class ToolEnvironment(LanguageEnvironment):
    """Ask, let the model call tools, judge its answer: subclasses write ``prompt``, ``reward`` and ``@tool`` methods.

    Args:
        max_tool_turns: Messages with tool calls before the episode is truncated.
        tool_timeout: Seconds one call may take, where the tool sets no limit of its own.
        max_result_chars: Characters of a tool's answer that the model sees.
    """

    def __init__(self, *, max_tool_turns: int = 8, tool_timeout: float = 30.0, max_result_chars: int = 4000) -> None:
        self.max_tool_turns = max_tool_turns
        self.tool_timeout = tool_timeout
        self.max_result_chars = max_result_chars
        self.tools: list[Tool] = collect_tools(self)
        self._task: dict[str, Any] | None = None
        self._turns = 0
        self._kinds: list[ToolEventKind] = []

    @abstractmethod
    def prompt(self, task: dict[str, Any]) -> list[Message]:
        """Messages that put the task to the model."""

    @abstractmethod
    def reward(self, task: dict[str, Any], answer: str) -> Any:
        """Judge the final answer; may be ``async``.

        Returns:
            The reward, or ``(reward, metrics)``: metrics are numbers to log apart from it.
        """

    def call_reward(self, task: dict[str, Any], events: list[ToolEvent]) -> float:
        """Reward of a message with tool calls, from what became of them; 0 unless a subclass says otherwise."""
        return 0.0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """Start with ``options`` as the task; ``info["tools"]`` are the tools' schemas."""
        if options is None:
            raise ValueError(f"{type(self).__name__}.reset needs options: the task to put to the model")
        self._task, self._turns, self._kinds = options, 0, []
        return self.prompt(options), {"tools": [tool.schema() for tool in self.tools]}

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        """Answer the message's tool calls, or judge it as the final answer."""
        if self._task is None:
            raise RuntimeError(f"{type(self).__name__}.step called before reset, or after the episode's end")
        events = await run_tool_calls(action, self.tools, timeout=self.tool_timeout, max_chars=self.max_result_chars)
        task = self._task
        if not events:
            self._task = None
            reward, metrics = await self._judge(task, action.get("content") or "")
            return [], reward, True, False, {"metrics": metrics | self._call_metrics()}
        self._turns += 1
        self._kinds += [event.kind for event in events]
        answers = [event.message for event in events]
        over = self._turns >= self.max_tool_turns
        if over:
            self._task = None
        info: Info = {"events": events, "metrics": self._call_metrics()}
        return answers, self.call_reward(task, events), False, over, info

    async def _judge(self, task: dict[str, Any], answer: str) -> tuple[float, dict[str, float]]:
        judged: Any = self.reward(task, answer)
        if inspect.isawaitable(judged):
            judged = await judged
        return (judged[0], dict(judged[1])) if isinstance(judged, tuple) else (judged, {})

    def _call_metrics(self) -> dict[str, float]:
        """Tool calls of the episode so far, and whether any was there, and the share of them that ran well."""
        calls = len(self._kinds)
        good = sum(kind is ToolEventKind.OK for kind in self._kinds)
        metrics = {"tool_calls": float(calls), "tool_used": float(good > 0)}
        return metrics | ({"tool_calls_ok": good / calls} if calls else {})
