"""Base class of environments with tools: ``@tool`` methods, a prompt and a reward.

Guarantees: the tool calls of a message run concurrently and each is answered, even a malformed one; the first
message without a tool call is judged as the answer, and so is the answer of a tool that ends the episode
(:class:`~agentrl.EndEpisode`); an episode that uses up its tool turns is truncated and judged as it stands, with an
empty answer. Outcomes of the calls are logged as metrics. ``first_call_reward`` is paid at most once per episode, so
that further calls earn nothing.
"""

from abc import abstractmethod
from functools import cached_property
from typing import Any

from agentrl.core.contract import checked_judgement
from agentrl.core.environment import Info
from agentrl.core.episode import Message
from agentrl.envkit.language import LanguageEnvironment, spoken
from agentrl.envkit.tools.tool import Tool, collect_tools
from agentrl.envkit.tools.tool_calls import ToolEvent, ToolEventKind, run_tool_calls


class ToolEnvironment(LanguageEnvironment):
    """An environment in which the model calls tools, then answers.

    Subclasses write ``prompt``, ``reward`` and ``@tool`` methods.

    Attributes:
        first_call_reward: Reward of an episode's first message whose calls all succeed; 0 by default. Small models
            learn the form of a call first, and this pays for it.

    Args:
        max_tool_turns: Number of messages with tool calls after which the episode is truncated, and judged with an
            empty answer.
        tool_timeout: Time limit of one call in seconds, if the tool has no limit of its own.
        max_result_chars: Characters of a tool's answer that the model sees.
    """

    max_tool_turns: int = 8
    tool_timeout: float = 30.0
    max_result_chars: int = 4000
    first_call_reward: float = 0.0
    _task: dict[str, Any] | None = None
    _turns = 0
    _first_call_paid = False
    _kinds: tuple[ToolEventKind, ...] = ()

    def __init__(self, *, max_tool_turns: int = 8, tool_timeout: float = 30.0, max_result_chars: int = 4000) -> None:
        self.max_tool_turns = max_tool_turns
        self.tool_timeout = tool_timeout
        self.max_result_chars = max_result_chars
        _ = self.tools  # a tool that cannot be described raises now, not in an episode

    @cached_property
    def tools(self) -> list[Tool]:
        """The ``@tool`` methods, bound to this environment."""
        return collect_tools(self)

    @abstractmethod
    def prompt(self, task: dict[str, Any]) -> list[Message]:
        """Returns the messages that pose the task to the model."""

    @abstractmethod
    def reward(self, task: dict[str, Any], answer: str) -> Any:
        """Judge the final answer; may be ``async``.

        The answer is the text of a message without tool calls, what a tool that ended the episode gave, or empty if a
        limit ended it.

        Returns:
            The reward; or ``(reward, metrics)``, where metrics are further numbers to log; or a verdict of
            :mod:`agentrl.rewards`. A reward of ``None`` is missing: the episode is counted but not trained on.
        """

    def call_reward(self, task: dict[str, Any], events: list[ToolEvent]) -> float:
        """Computes the reward of a message with tool calls; by default ``first_call_reward``, once per episode."""
        earned = not self._first_call_paid and all(event.kind is ToolEventKind.OK for event in events)
        self._first_call_paid |= earned
        return self.first_call_reward if earned else 0.0

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """Start an episode with ``options`` as the task; ``info["tools"]`` holds the tools' schemas."""
        self._task, self._turns, self._kinds = self.choose_task(seed, options), 0, ()
        self._first_call_paid = False
        return self.prompt(self._task), {"tools": [tool.schema() for tool in self.tools]}

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        """Answer the message's tool calls; without calls, or if one ends the episode, judge the final answer."""
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
        said = [{"kind": event.kind.value, "name": event.name, "call_id": event.call_id} for event in events]
        earned = self._checked_call_reward(task, events)
        final = next((event.final for event in events if event.final is not None), None)
        over = self._turns >= self.max_tool_turns
        if final is None and not over:
            return answers, earned, False, False, {"events": said, "metrics": self._call_metrics()}
        self._task = None
        reward, metrics = await self.judged(self.reward, task, final or "")
        total: Any = None if reward is None or earned is None else earned + reward
        info: Info = {"events": said, "metrics": metrics | self._call_metrics()}
        return answers, total, final is not None, final is None, info

    async def judge_unfinished(self) -> tuple[float | None, Info]:
        """Judge the empty answer: the policy ran out of context, or of turns, before it gave one."""
        task, self._task = self._task, None
        if task is None:
            raise RuntimeError(
                f"{type(self).__name__}.judge_unfinished called before reset, or after the episode's end"
            )
        reward, metrics = await self.judged(self.reward, task, "")
        return reward, {"metrics": metrics | self._call_metrics()}

    def _checked_call_reward(self, task: dict[str, Any], events: list[ToolEvent]) -> Any:
        reward: Any = self.call_reward(task, events)
        return None if reward is None else checked_judgement(reward, self.call_reward)

    def _call_metrics(self) -> dict[str, float]:
        """Counts the episode's tool calls: their number, whether one succeeded, and the share that succeeded."""
        calls = len(self._kinds)
        good = sum(kind is ToolEventKind.OK for kind in self._kinds)
        metrics = {"tool_calls": float(calls), "tool_used": float(good > 0)}
        return metrics | ({"tool_calls_ok": good / calls} if calls else {})
