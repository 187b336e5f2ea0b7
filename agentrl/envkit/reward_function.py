"""A function that judges whole episodes instead of the environment: what ``reward.id`` names.

Guarantees: arguments that do not fit are an error when it is made; it gets a copy of the task; a sync one runs in a
thread and is given up after ``REWARD_SECONDS``; what it gives is checked, and a wrong value names function and line.
"""

import copy
import inspect
from typing import Any

from agentrl.core.contract import checked_judgement, checked_metrics, source_of
from agentrl.core.episode import Message
from agentrl.core.registry import load
from agentrl.envkit.language import read_judgement
from agentrl.host.worker_threads import in_thread

REWARD_SECONDS = 60.0  # for a sync one; an async one sets its own limit, or has the episode's


class RewardFunction:
    """``(task, messages, reward, **kwargs)`` to a reward, or ``(reward, metrics)``, sync or async.

    Args:
        id: Registered id or path.
        kwargs: Further arguments.

    Raises:
        LookupError: There is none.
        TypeError: It does not take these arguments.
    """

    def __init__(self, id: str, kwargs: dict[str, Any]) -> None:
        self._function = load("reward", id)
        self._kwargs = kwargs
        try:
            inspect.signature(self._function).bind({}, [], 0.0, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"reward.id={id} with reward.kwargs={kwargs}: want a function of (task, messages, reward): {error}"
            ) from error

    async def __call__(
        self, task: dict[str, Any], messages: list[Message], reward: float | None
    ) -> tuple[float | None, dict[str, float]]:
        """Judge an episode.

        Args:
            task: The task's data.
            messages: All observations and actions in order.
            reward: The environment's own; ``None`` where it is missing.

        Returns:
            The reward, ``None`` where it is missing, and numbers to log.
        """
        arguments = copy.deepcopy(task), messages, reward
        if inspect.iscoroutinefunction(self._function):
            judged = await self._function(*arguments, **self._kwargs)
        else:
            judged = await in_thread(self._call, *arguments, timeout=REWARD_SECONDS)
        value, metrics = await read_judgement(judged)
        checked = checked_metrics(metrics, f"{source_of(self._function)} returned metrics")
        return (None if value is None else checked_judgement(value, self._function)), checked

    def _call(self, *arguments: Any) -> Any:
        return self._function(*arguments, **self._kwargs)
