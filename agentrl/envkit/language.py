"""Base classes of environments for language models: observations are messages, an action is one assistant message.

Guarantees: an observation is the list of messages that are new since the last action; a reward method may be a plain or
an ``async`` function, and a blocking one is abandoned after its time limit.
"""

import inspect
from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from agentrl.core.contract import checked_judgement, checked_metrics, source_of
from agentrl.core.environment import Environment, Info
from agentrl.core.episode import Message
from agentrl.host.worker_threads import in_thread

if TYPE_CHECKING:
    from gymnasium import Space


class LanguageEnvironment(Environment[list[Message], Message]):
    """An environment whose observations are new messages and whose actions are assistant messages.

    Attributes:
        blocking: Whether a sync ``judge`` or ``reward`` takes long: it then runs in a thread, so that other episodes
            continue. If it computes for long in Python, make it ``async`` and use
            ``agentrl.host.worker_pool.shared_pool`` instead.
        reward_timeout: Seconds after which a blocking one is abandoned; the episode then fails.
    """

    blocking: ClassVar[bool] = False
    reward_timeout: float = 30.0

    async def judged(self, method: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, float]]:
        """Returns a reward method's result as ``(reward, metrics)``, checked.

        Raises:
            TypeError: The reward is not a number, or the metrics are not finite numbers by name.
            ValueError: The reward is not finite.
            WorkerTimeoutError: A blocking method took longer than :attr:`reward_timeout`.
        """
        if self.blocking and not inspect.iscoroutinefunction(method):
            return await read_judgement(await in_thread(method, *args, timeout=self.reward_timeout), method)
        return await read_judgement(method(*args), method)

    @cached_property
    def observation_space(self) -> "Space[Any]":  # type: ignore[override]
        """Space of lists of messages of any role."""
        from agentrl.envkit.spaces.messages import MessageListSpace

        return MessageListSpace()

    @cached_property
    def action_space(self) -> "Space[Any]":  # type: ignore[override]
        """Space of assistant messages, which may call the environment's tools."""
        from agentrl.envkit.spaces.messages import MessageSpace

        return MessageSpace(tools=[tool.schema() for tool in getattr(self, "tools", [])])


class SingleTurnEnvironment(LanguageEnvironment):
    """An environment that asks once and judges the answer: subclasses write ``prompt`` and ``judge``."""

    _task: dict[str, Any] | None = None

    @abstractmethod
    def prompt(self, task: dict[str, Any]) -> list[Message]:
        """Returns the messages that pose the task to the model."""

    @abstractmethod
    def judge(self, task: dict[str, Any], answer: str) -> Any:
        """Judge the answer; may be ``async``.

        Returns:
            The reward; or ``(reward, metrics)``, where metrics are further numbers to log; or a verdict of
            :mod:`agentrl.rewards`. A reward of ``None`` is missing: the episode is counted but not trained on.
        """

    def extract(self, answer: str) -> str | None:
        """Returns the answer's essence, in which equal answers are equal texts, for majority votes (``maj@k``).

        By default ``None``: an evaluation takes no vote.
        """
        return None

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """Start an episode with ``options`` as the task; without, the environment draws one."""
        self._task = self.choose_task(seed, options)
        return self.prompt(self._task), {}

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        """Judge the answer and terminate."""
        task = self._task
        if task is None:
            raise RuntimeError(f"{type(self).__name__}.step called before reset, or after the episode's end")
        answer = spoken(action, self)
        self._task = None
        reward, metrics = await self.judged(self.judge, task, answer)
        found = self.extract(answer)
        return [], reward, True, False, {"metrics": metrics} | ({} if found is None else {"extracted_answer": found})

    async def judge_unfinished(self) -> tuple[float | None, Info]:
        """Judge the empty answer: the policy gave none."""
        task, self._task = self._task, None
        if task is None:
            raise RuntimeError(
                f"{type(self).__name__}.judge_unfinished called before reset, or after the episode's end"
            )
        reward, metrics = await self.judged(self.judge, task, "")
        return reward, {"metrics": metrics}


def spoken(action: Any, env: object) -> str:
    """Returns the text of an assistant message; empty if it has none.

    Raises:
        TypeError: ``action`` is not a message.
    """
    if not isinstance(action, dict):
        raise TypeError(
            f"{type(env).__name__}.step got {action!r:.80}: an action is one assistant message, "
            "{'role': 'assistant', 'content': ...}"
        )
    return action.get("content") or ""


async def read_judgement(judged: Any, function: Any) -> tuple[float | None, dict[str, float]]:
    """Returns the result of a reward function, awaited if async, as ``(reward, metrics)``.

    A :class:`agentrl.rewards.Verdict` is accepted too; the reason of a missing value becomes the metric
    ``missing_<reason>``.

    Args:
        judged: The returned value.
        function: The function that returned it, for error messages.

    Raises:
        TypeError: The reward is not a number, or the metrics are not finite numbers by name.
        ValueError: The reward is not finite.
    """
    if inspect.isawaitable(judged):
        judged = await judged
    reward, metrics = judged, {}
    if isinstance(judged, tuple):
        if len(judged) != 2:
            raise TypeError(
                f"{source_of(function)} returned {len(judged)} values; want the reward, or (reward, metrics)"
            )
        reward, metrics = judged
    elif hasattr(judged, "value") and hasattr(judged, "metrics"):
        missing = {f"missing_{judged.reason}": 1.0} if judged.value is None else {}
        reward, metrics = judged.value, dict(judged.metrics) | missing
    checked = checked_metrics(metrics, f"{source_of(function)} returned metrics")
    return (None if reward is None else checked_judgement(reward, function)), checked
