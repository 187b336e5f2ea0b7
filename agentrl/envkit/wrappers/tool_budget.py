"""Limits the tool calls of an episode.

Guarantees: no call beyond the budget reaches the inner environment; each is answered by a tool message, so that a chat
API still accepts the conversation. A message whose calls are all refused is not mistaken for the final answer. An
episode that is truncated is judged by the inner environment as it stands.
"""

from typing import Any

from agentrl.core.environment import Environment, Info
from agentrl.core.episode import Message
from agentrl.envkit.wrappers.wrapper import StepResult, Wrapper, with_metrics


class ToolBudget(Wrapper):
    """Runs at most ``max_calls`` tool calls of an episode.

    Every call that the model writes counts, valid or not. The calls of one message use the budget in their order.
    A message whose calls are all refused gets reward 0 and is no step of the inner environment: limit the turns too.
    Metrics: ``tool_budget_used``, the number of calls passed on, and ``tool_calls_refused``.

    Args:
        env: The inner environment.
        max_calls: Largest number of calls of an episode; with 0 all calls are refused.
        truncate: Whether to truncate the episode at the first refused call.
    """

    def __init__(self, env: Environment[Any, Any], max_calls: int, *, truncate: bool = False) -> None:
        super().__init__(env)
        if max_calls < 0:
            raise ValueError(f"ToolBudget(max_calls={max_calls}): want 0 or more")
        self.max_calls = max_calls
        self.truncate = truncate
        self._used = 0
        self._refused = 0

    @property
    def reward_range(self) -> tuple[float, float]:  # type: ignore[override]
        """The inner environment's range, extended to 0 for a refused message."""
        low, high = self.env.reward_range
        return min(low, 0.0), max(high, 0.0)

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        """Start an episode with a full budget."""
        self._used = self._refused = 0
        return await super().reset(seed=seed, options=options)

    async def step(self, action: Message) -> StepResult:
        """Take a step with the calls that the budget allows, and answer the others."""
        self._check_running()
        calls = _calls(action)
        room = self.max_calls - self._used
        kept, refused = calls[:room], calls[room:]
        self._used += len(kept)
        self._refused += len(refused)
        if not refused:
            result: StepResult = await super().step(action)
        elif kept:
            result = await super().step({**action, "tool_calls": kept})
        else:
            result = [], 0.0, False, False, {}
        observation, reward, terminated, truncated, info = result
        answers = [self._answer(call, len(kept) + i) for i, call in enumerate(refused)]
        info = with_metrics(info, tool_budget_used=float(self._used), tool_calls_refused=float(self._refused))
        found = _after_tools(observation, answers), reward, terminated, truncated, info
        if refused and self.truncate and not terminated and not truncated:
            return await self._truncate(found, f"ToolBudget(max_calls={self.max_calls})")
        return found

    def _answer(self, call: Any, index: int) -> Message:
        given = call if isinstance(call, dict) else {}
        function = given.get("function")
        name = (function if isinstance(function, dict) else given).get("name")
        call_id = given.get("id")
        if not isinstance(call_id, str) or not call_id:
            call_id = f"call_{index}"  # same ids as in envkit.tools.tool_calls
        answer: Message = {"role": "tool", "tool_call_id": call_id}
        if isinstance(name, str) and name:
            answer["name"] = name
        calls = f"{self.max_calls} tool call" + "s" * (self.max_calls != 1)
        answer["content"] = f"Not run: the budget of {calls} is used up. Answer without tools."
        return answer


def _calls(action: Message) -> list[Any]:
    raw = action.get("tool_calls")
    if raw is None:
        return []
    return list(raw) if isinstance(raw, list | tuple) else [raw]


def _after_tools(observation: list[Message], answers: list[Message]) -> list[Message]:
    """Inserts ``answers`` after the last tool message, because answers to calls must be adjacent."""
    if not answers:
        return observation
    place = max((i + 1 for i, message in enumerate(observation) if message.get("role") == "tool"), default=0)
    return [*observation[:place], *answers, *observation[place:]]
