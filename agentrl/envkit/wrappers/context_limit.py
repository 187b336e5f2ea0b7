"""Limits the length of an episode's conversation, in characters or tokens.

Guarantees: each message is measured once, so the cost is linear in the conversation; the step that exceeds the limit
is still taken and its reward counts; the episode is truncated after it, and the inner environment judges it as it
stands, unless it ended with that step anyway. A shortened tool result says how much is missing.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from agentrl.core.environment import Environment, Info
from agentrl.core.episode import Message
from agentrl.envkit.tools.tool_calls import shortened
from agentrl.envkit.wrappers.wrapper import StepResult, Wrapper, with_metrics


class Tokenizer(Protocol):
    """Interface of a tokenizer, common to all libraries."""

    def encode(self, text: str, /) -> Sequence[int]:
        """Returns the token ids of a text."""
        ...


class ContextLimit(Wrapper):
    """Truncates an episode whose conversation gets too long, and shortens long tool results.

    The text of messages and of their tool calls counts; the chat template's tokens and the agent's own system prompt
    do not: leave room for them. Metric: ``context_chars`` or ``context_tokens``.

    Args:
        env: The inner environment.
        max_chars: Largest length of the conversation in characters.
        max_tokens: Largest length of the conversation in tokens; needs ``tokenizer``.
        tokenizer: An object with ``encode``, or a function from a text to its number of tokens.
        max_result_chars: Characters of a tool's answer that are kept, half of them from its end.

    Raises:
        ValueError: No limit, both ``max_chars`` and ``max_tokens``, a limit not above 0, or ``max_tokens`` and
            ``tokenizer`` without each other.
    """

    def __init__(
        self,
        env: Environment[Any, Any],
        max_chars: int | None = None,
        *,
        max_tokens: int | None = None,
        tokenizer: Tokenizer | Callable[[str], int] | None = None,
        max_result_chars: int | None = None,
    ) -> None:
        super().__init__(env)
        limits = {"max_chars": max_chars, "max_tokens": max_tokens, "max_result_chars": max_result_chars}
        if all(limit is None for limit in limits.values()) or (max_chars is not None and max_tokens is not None):
            raise ValueError("ContextLimit needs max_chars, or max_tokens, or max_result_chars")
        for name, limit in limits.items():
            if limit is not None and limit <= 0:
                raise ValueError(f"ContextLimit({name}={limit}): want more than 0")
        if (max_tokens is None) != (tokenizer is None):
            raise ValueError("ContextLimit needs max_tokens and tokenizer together")
        self.limit = max_chars if max_tokens is None else max_tokens
        self.unit = "chars" if max_tokens is None else "tokens"
        self.max_result_chars = max_result_chars
        self._tokenizer = tokenizer
        self._length = 0

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        """Start an episode and measure its first messages."""
        observation, info = await super().reset(seed=seed, options=options)
        self._length = sum(self._measure(message) for message in observation)
        return observation, info

    async def step(self, action: Message) -> StepResult:
        """Take a step; truncate the episode if the conversation is too long for another turn."""
        observation, reward, terminated, truncated, info = await super().step(action)
        observation = [self._cut(message) for message in observation]
        self._length += sum(self._measure(message) for message in (action, *observation))
        info = with_metrics(info, **{f"context_{self.unit}": float(self._length)})
        if self.limit is not None and self._length > self.limit and not terminated and not truncated:
            so_far = observation, reward, terminated, truncated, info
            return await self._truncate(so_far, f"ContextLimit(max_{self.unit}={self.limit})")
        return observation, reward, terminated, truncated, info

    def _measure(self, message: Message) -> int:
        text = message_text(message)
        for call in message.get("tool_calls") or []:
            text += json.dumps(call.get("function", call) if isinstance(call, dict) else call, default=str)
        if self._tokenizer is None:
            return len(text)
        encode = getattr(self._tokenizer, "encode", None)
        return len(encode(text)) if encode is not None else self._tokenizer(text)  # type: ignore[operator]

    def _cut(self, message: Message) -> Message:
        content, limit = message.get("content"), self.max_result_chars
        if message.get("role") != "tool" or not isinstance(content, str):
            return message
        return {**message, "content": shortened(content, limit)}


def message_text(message: Message) -> str:
    """Returns the text of a message; several parts are joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
