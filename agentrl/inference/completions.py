"""Builds ``openai``'s response types from a session's sampled answers."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentrl.core.episode import Message


@dataclass(frozen=True)
class Sampled:
    """A sampled answer, one choice of a completion.

    Attributes:
        message: Assistant message in OpenAI's format.
        finish_reason: ``stop``, ``length`` or ``tool_calls``.
        token_ids: Sampled ids, ``[tokens]``.
        logprobs: Logprobs of the sampled ids, ``[tokens]``.
    """

    message: Message
    finish_reason: str
    token_ids: list[int]
    logprobs: list[float]


def completion(
    model: str, answers: Sequence[Sampled], prompt_tokens: int, token_text: Callable[[int], str] | None
) -> ChatCompletion:
    """Builds a response that is not streamed.

    Args:
        model: Name of the model in the response.
        answers: Answers, one per choice.
        prompt_tokens: Length of the prompt, in tokens.
        token_text: Function that decodes one id, to put logprobs into the response; ``None`` leaves them out.
    """
    tokens = sum(len(answer.token_ids) for answer in answers)
    return ChatCompletion.model_validate(  # five times faster than making an object for each part
        {
            "id": f"chatcmpl-{token_hex(16)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [_choice(index, answer, token_text) for index, answer in enumerate(answers)],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": tokens,
                "total_tokens": prompt_tokens + tokens,
            },
        }
    )


def _choice(index: int, answer: Sampled, token_text: Callable[[int], str] | None) -> dict[str, Any]:
    seen = {key: answer.message[key] for key in ("reasoning_content", "tool_calls") if answer.message.get(key)}
    return {
        "index": index,
        "finish_reason": answer.finish_reason,
        "message": {"role": "assistant", "content": answer.message.get("content"), **seen},
        "logprobs": _logprobs(answer, token_text) if token_text else None,
    }


def _logprobs(answer: Sampled, token_text: Callable[[int], str]) -> dict[str, Any]:
    return {
        "content": [
            {"token": (text := token_text(token)), "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for token, logprob in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
    }


class CompletionStream:
    """A response in ``openai``'s streaming interface; the whole answer comes as one chunk.

    Agents that read streams work unchanged. Streaming saves no time here, because tool calls and the recorded
    trajectory need the whole answer.
    """

    def __init__(self, whole: ChatCompletion, *, include_usage: bool) -> None:
        self._chunks = _chunks(whole, include_usage)

    def __aiter__(self) -> AsyncIterator[ChatCompletionChunk]:
        return self._chunks

    async def __anext__(self) -> ChatCompletionChunk:
        return await anext(self._chunks)

    async def __aenter__(self) -> "CompletionStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Does nothing: a stream holds no resources."""


async def _chunks(whole: ChatCompletion, include_usage: bool) -> AsyncIterator[ChatCompletionChunk]:
    """Yields chunks that are not validated: an API's answer may leave fields out, or have finish reasons of its own."""
    head = {"id": whole.id, "object": "chat.completion.chunk", "created": whole.created, "model": whole.model}
    for choice in whole.choices:
        delta = choice.message.model_dump(exclude_none=True)
        for number, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = number
        logprobs = choice.logprobs.model_dump() if choice.logprobs else None
        piece: dict[str, Any] = {"index": choice.index, "delta": delta, "finish_reason": None, "logprobs": logprobs}
        yield ChatCompletionChunk.construct(**head, choices=[piece])
        last = {"index": choice.index, "delta": {}, "finish_reason": choice.finish_reason}
        yield ChatCompletionChunk.construct(**head, choices=[last])
    if include_usage:
        usage = whole.usage.model_dump() if whole.usage else None
        yield ChatCompletionChunk.construct(**head, choices=[], usage=usage)
