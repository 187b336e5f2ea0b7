"""Reads and checks the options that an agent passes to ``chat.completions.create``.

Guarantees: an option is either honoured or refused by name with the reason; none is dropped silently. In training,
nothing that changes the distribution that the trainer assumes is accepted.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from agentrl.core.valid_text import valid_data
from agentrl.inference.backend import SamplingParams

_SAMPLING = ("temperature", "top_p", "top_k")
_REFUSED = {
    "functions": "deprecated by OpenAI; use tools",
    "function_call": "deprecated by OpenAI; use tool_choice",
    "logit_bias": "it changes the sampling distribution, and is not passed to servers",
    "top_logprobs": "servers return the sampled token's logprob only",
}


@dataclass(frozen=True)
class ChatOptions:
    """Options of one call.

    Attributes:
        n: Number of answers.
        tools: OpenAI tool schemas.
        parses_calls: Whether the answer is parsed for tool calls.
        logprobs: Whether the response carries logprobs.
        stream: Whether the answer is streamed.
        include_usage: Whether a stream ends with the token usage.
        params: Sampling parameters that the call sets, by name.
    """

    n: int = 1
    tools: list[dict[str, Any]] = field(default_factory=list)
    parses_calls: bool = False
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    params: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Checks the keyword arguments of ``create``; ``None`` counts as not given.

        Raises:
            TypeError: An option is not supported.
            ValueError: The value of an option is not supported.
        """
        if not given:
            return cls()
        options = {key: valid_data(value) for key, value in given.items() if _is_given(value)}
        options |= options.pop("extra_body", {})
        options.pop("model", None)  # a run has one model, so the name is ignored
        tools = [_plain_tool(tool) for tool in options.pop("tools", ())]
        choice = options.pop("tool_choice", "auto")
        if choice not in ("auto", "none"):
            raise ValueError(f"chat.completions.create(tool_choice={choice!r}): auto and none are supported")
        if options.pop("parallel_tool_calls", True) is not True:
            raise ValueError(
                "chat.completions.create(parallel_tool_calls=False): a model cannot be limited to one call here"
            )
        json_schema = _json_schema(options.pop("response_format", {"type": "text"}))
        n = int(options.pop("n", 1))
        if n < 1:
            raise ValueError(f"chat.completions.create(n={n}): n must be at least 1")
        found = cls(
            n=n,
            tools=tools,
            parses_calls=bool(tools) and choice == "auto",
            logprobs=bool(options.pop("logprobs", False)),
            stream=bool(options.pop("stream", False)),
            include_usage=bool(options.pop("stream_options", {}).get("include_usage", False)),
            params=_params(options) | ({"json_schema": json_schema} if json_schema is not None else {}),
        )
        for key in options:
            if key in _REFUSED:
                raise TypeError(f"chat.completions.create: {key} is not supported here: {_REFUSED[key]}")
        if options:
            raise TypeError(
                f"chat.completions.create: {sorted(options)} are not supported here; supported: {sorted(SUPPORTED)}"
            )
        return found

    def sampling(self, base: SamplingParams, *, locked: bool) -> SamplingParams:
        """Returns the recipe's sampling parameters with this call's changes.

        Args:
            base: The recipe's sampling parameters.
            locked: Whether changes of the sampling distribution are refused.

        Raises:
            ValueError: ``locked`` is true, and a change would make the behavior logprobs wrong.
        """
        if locked and "json_schema" in self.params:
            raise ValueError(
                "chat.completions.create(response_format=...): a constrained answer is not sampled from the "
                "distribution that training assumes; use it in evaluation only"
            )
        for key in _SAMPLING if locked else ():
            value = self.params.get(key)
            if value is not None and value != getattr(base, key):
                raise ValueError(
                    f"chat.completions.create({key}={value}): training samples with sampling.{key}="
                    f"{getattr(base, key)}; another value would make the behavior logprobs wrong"
                )
        if not self.params:
            return base
        stop = base.stop + self.params.get("stop", ())  # the ends of a turn, and those of this call
        return replace(base, **{**self.params, "stop": stop})


SUPPORTED = frozenset(
    [
        "messages",
        "model",
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "seed",
        "n",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "logprobs",
        "stream",
        "stream_options",
        "response_format",
        "extra_body",
    ]
)


def _json_schema(response_format: Any) -> str | None:
    """Returns the JSON schema that an answer must fit, as text; ``None`` for free text."""
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return json.dumps({"type": "object"})
    schema = (response_format.get("json_schema") or {}).get("schema") if kind == "json_schema" else None
    if not isinstance(schema, Mapping):
        raise ValueError(
            "chat.completions.create: response_format must be {'type': 'text'}, {'type': 'json_object'} or {'type': "
            f"'json_schema', 'json_schema': {{'schema': ...}}}}, got {response_format!r:.200}"
        )
    return json.dumps(schema)


def _is_given(value: Any) -> bool:
    return value is not None and type(value).__name__ not in ("NotGiven", "Omit")


def _plain_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or not isinstance((tool.get("function") or {}).get("name"), str):
        raise TypeError(
            "chat.completions.create: a tool must be {'type': 'function', 'function': {'name': ..., 'parameters': "
            f"...}}}}, got {tool!r:.200}"
        )
    return dict(tool)


def _params(options: dict[str, Any]) -> dict[str, Any]:
    """Removes the sampling options from ``options`` and returns them as sampling parameters."""
    changes: dict[str, Any] = {}
    for key in ("temperature", "top_p"):
        if key in options:
            changes[key] = float(options.pop(key))
    for key in ("top_k", "seed"):
        if key in options:
            changes[key] = int(options.pop(key))
    limits = [int(options.pop(key)) for key in ("max_completion_tokens", "max_tokens") if key in options]
    if limits:
        changes["max_new_tokens"] = limits[0]
        if limits[0] < 1:
            raise ValueError(f"chat.completions.create: a limit of {limits[0]} tokens leaves no room for an answer")
    stop = options.pop("stop", None)
    if stop:
        changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return changes
