"""Runs the function of ``reward.id``, which judges whole episodes instead of the environment.

Guarantees: unsuitable arguments raise before any episode; the function gets a copy of the task; a sync function runs in
a thread and is abandoned after ``REWARD_SECONDS``; a wrong return value raises an error that names function and line.
"""

import copy
import inspect
from typing import Any

from agentrl.core.episode import Message
from agentrl.core.registry import load
from agentrl.envkit.language import read_judgement
from agentrl.host.worker_threads import in_thread

REWARD_SECONDS = 60.0  # for a sync function; an async one sets its own limit, or has the episode's


class RewardFunction:
    """Wraps a sync or async function from ``(task, messages, reward, **kwargs)`` to a reward or ``(reward, metrics)``.

    Args:
        id: Registered id or path of the function.
        kwargs: Further arguments of the function.

    Raises:
        LookupError: There is no such function.
        TypeError: The function does not take these arguments.
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
            reward: The environment's reward; ``None`` if it is missing.

        Returns:
            The reward, ``None`` if it is missing, and the metrics to log.
        """
        arguments = copy.deepcopy(task), messages, reward
        if inspect.iscoroutinefunction(self._function):
            judged = await self._function(*arguments, **self._kwargs)
        else:
            judged = await in_thread(self._call, *arguments, timeout=REWARD_SECONDS)
        return await read_judgement(judged, self._function)

    def _call(self, *arguments: Any) -> Any:
        return self._function(*arguments, **self._kwargs)
