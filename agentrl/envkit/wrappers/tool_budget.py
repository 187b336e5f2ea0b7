"""Limits the tool calls of an episode.

Guarantees: no call beyond the budget reaches the inner environment; each is answered by a tool message of its own, and
never left out, so the conversation stays one that a chat API takes. A message whose calls are all refused is not
mistaken for the final answer.
"""

from typing import Any

from agentrl.core.environment import Environment, Info
from agentrl.core.episode import Message
from agentrl.envkit.wrappers.wrapper import StepResult, Wrapper, with_metrics


class ToolBudget(Wrapper):
    """Runs ``max_calls`` tool calls of an episode, and no more.

    Every call that the model writes counts, right or wrong. The calls of one message use the budget in their order.
    A message that is refused as a whole earns 0 and is no turn of the inner environment: set a limit of turns too.
    Metrics: ``tool_budget_used``, calls handed on, and ``tool_calls_refused``.

    Args:
        env: The inner environment.
        max_calls: Calls of an episode; 0 takes the tools away.
        truncate: End the episode at the first call that is refused.
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
        """The inner environment's, and 0 for a message that is refused."""
        low, high = self.env.reward_range
        return min(low, 0.0), max(high, 0.0)

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        """Start an episode with a full budget."""
        self._used = self._refused = 0
        return await super().reset(seed=seed, options=options)

    async def step(self, action: Message) -> StepResult:
        """Act with the calls that the budget has room for, and answer the others."""
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
        if refused and self.truncate and not terminated and not truncated:
            truncated, info = True, self._truncate(info, f"ToolBudget(max_calls={self.max_calls})")
        return _after_tools(observation, answers), reward, terminated, truncated, info

    def _answer(self, call: Any, index: int) -> Message:
        given = call if isinstance(call, dict) else {}
        function = given.get("function")
        name = (function if isinstance(function, dict) else given).get("name")
        call_id = given.get("id")
        if not isinstance(call_id, str) or not call_id:
            call_id = f"call_{index}"  # as core.tool_calls names it
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
    """``answers`` behind the last tool message of ``observation``: answers to calls stand together."""
    if not answers:
        return observation
    place = max((i + 1 for i, message in enumerate(observation) if message.get("role") == "tool"), default=0)
    return [*observation[:place], *answers, *observation[place:]]
