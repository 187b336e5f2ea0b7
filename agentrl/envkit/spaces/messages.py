"""Gymnasium spaces of messages and tool calls.

Guarantees: ``contains`` accepts every sample; samples depend on the seed alone; ``to_jsonable`` returns plain
JSON that ``from_jsonable`` turns into equal samples. A message is in a :class:`MessageSpace` if a chat API would
accept it; calls of unknown tools and arguments that violate the schema are outside.
"""

import copy
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from gymnasium.spaces import Space
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from agentrl.core.episode import Message
from agentrl.core.strict_json import strict_json
from agentrl.envkit.spaces.schema_sample import TRIES, sample_json

ROLES = ("system", "user", "assistant", "tool")
_WORDS = ("a", "no", "yes", "7", "-3", "0.5", "think", "42", "north", "\n", "é", "?", "the", "answer", "is")


class ToolCallSpace(Space[dict[str, Any]]):
    """Space of calls of the given tools, in OpenAI's shape: ``arguments`` is the text of a JSON object.

    Args:
        tools: Entries of a chat request's ``tools``.
        seed: Seed of the samples.

    Raises:
        ValueError: ``tools`` is empty, or a tool's parameters are not a JSON schema.
    """

    def __init__(self, tools: Sequence[dict[str, Any]], seed: int | None = None) -> None:
        if not tools:
            raise ValueError("ToolCallSpace needs at least one tool")
        self.tools = [copy.deepcopy(tool) for tool in tools]
        for tool in self.tools:
            try:
                Draft202012Validator.check_schema(_parameters(tool))
            except SchemaError as error:
                name = tool["function"]["name"]
                raise ValueError(f"tool {name!r}: parameters are no JSON schema: {error.message}") from error
        super().__init__(seed=seed)

    @cached_property
    def _validators(self) -> dict[str, Draft202012Validator]:
        return {tool["function"]["name"]: Draft202012Validator(_parameters(tool)) for tool in self.tools}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_validators"}  # these cannot be pickled

    def sample(self, mask: Any = None, probability: Any = None) -> dict[str, Any]:
        """Samples a call of a random tool with random arguments that fit its schema.

        Args:
            mask: Not supported.
            probability: Not supported.
        """
        _refuse_masks(mask, probability)
        names = list(self._validators)
        name = names[int(self.np_random.integers(len(names)))]
        validator = self._validators[name]
        drawn = (
            sample_json(validator.schema, self.np_random) for _ in range(TRIES)
        )  # several draws: sample_json ignores oneOf, not and pattern, which only exclude values
        arguments = next((one for one in drawn if validator.is_valid(one)), None)
        if arguments is None:
            raise ValueError(f"cannot sample arguments of tool {name!r}: nothing of {TRIES} draws fits its schema")
        text = json.dumps(arguments, ensure_ascii=False)
        call_id = f"call_{int(self.np_random.integers(1 << 30)):08x}"
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a valid call of a known tool."""
        if not isinstance(x, dict) or not isinstance(x.get("id"), str) or x.get("type", "function") != "function":
            return False
        function = x.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            return False
        validator = self._validators.get(function.get("name", ""))
        if validator is None:
            return False
        try:
            arguments = strict_json(function["arguments"])
        except (ValueError, RecursionError):
            return False
        return isinstance(arguments, dict) and validator.is_valid(arguments)

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no fixed size."""
        return False

    def to_jsonable(self, sample_n: Iterable[dict[str, Any]]) -> list[Any]:
        """Copies of the samples: they are JSON already."""
        return copy.deepcopy(list(sample_n))

    def from_jsonable(self, sample_n: list[Any]) -> list[dict[str, Any]]:
        """Copies of the samples."""
        return copy.deepcopy(list(sample_n))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other)["tools"] == self.tools

    __hash__ = None  # type: ignore[assignment] - holds dicts

    def __repr__(self) -> str:
        return f"ToolCallSpace({', '.join(self._validators)})"


class MessageSpace(Space[Message]):
    """Space of chat messages.

    Args:
        roles: Roles that a message may have.
        tools: Tools that an assistant message may call; without tools, messages with calls are outside.
        any_calls: Whether to accept calls of any tool, for observations: they are history, not actions.
        seed: Seed of the samples.
    """

    def __init__(
        self,
        roles: Sequence[str] = ("assistant",),
        tools: Sequence[dict[str, Any]] = (),
        *,
        any_calls: bool = False,
        seed: int | None = None,
    ) -> None:
        unknown = sorted(set(roles) - set(ROLES) - {"developer"})
        if unknown or not roles:
            raise ValueError(f"roles={tuple(roles)} must be some of {', '.join(ROLES)}, developer")
        self.roles = tuple(roles)
        self.any_calls = any_calls
        self.calls = ToolCallSpace(tools) if tools else None
        super().__init__(seed=seed)

    def seed(self, seed: int | None = None) -> Any:
        """Seed this space and that of the tool calls."""
        used = super().seed(seed)
        if self.calls is not None:
            self.calls.seed(used)
        return used

    def sample(self, mask: Any = None, probability: Any = None) -> Message:
        """Samples a message of a few words; with tools, half of the assistant's messages call one.

        Args:
            mask: Not supported.
            probability: Not supported.
        """
        _refuse_masks(mask, probability)
        role = self.roles[int(self.np_random.integers(len(self.roles)))]
        count = int(self.np_random.integers(6))
        text = " ".join(_WORDS[int(self.np_random.integers(len(_WORDS)))] for _ in range(count))
        message: Message = {"role": role, "content": text}
        if role == "tool":
            message["tool_call_id"] = f"call_{int(self.np_random.integers(1 << 30)):08x}"
        if role == "assistant" and self.calls is not None and self.np_random.random() < 0.5:
            message["tool_calls"] = [self.calls.sample() for _ in range(1 + int(self.np_random.integers(2)))]
        return message

    def contains(self, x: Any) -> bool:
        """Whether a chat API would accept ``x``, and an environment run its calls."""
        if not isinstance(x, dict) or x.get("role") not in self.roles:
            return False
        calls = x.get("tool_calls")
        if calls is not None and not self._takes(calls, x["role"]):
            return False
        if x["role"] == "tool" and not isinstance(x.get("tool_call_id"), str):
            return False
        content = x.get("content")
        if content is None:
            return x["role"] == "assistant" and bool(calls)
        if isinstance(content, list):
            return all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)
        return isinstance(content, str)

    def _takes(self, calls: Any, role: str) -> bool:
        if role != "assistant" or not isinstance(calls, list):
            return False
        if self.any_calls:
            return all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls)
        return all(self.calls is not None and self.calls.contains(call) for call in calls)

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no fixed size."""
        return False

    def to_jsonable(self, sample_n: Iterable[Message]) -> list[Any]:
        """Copies of the samples: they are JSON already."""
        return copy.deepcopy(list(sample_n))

    def from_jsonable(self, sample_n: list[Any]) -> list[Message]:
        """Copies of the samples."""
        return copy.deepcopy(list(sample_n))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, MessageSpace)
            and (other.roles, other.calls, other.any_calls) == (self.roles, self.calls, self.any_calls)
        )  # fmt: skip

    __hash__ = None  # type: ignore[assignment] - holds a ToolCallSpace

    def __repr__(self) -> str:
        return f"MessageSpace({', '.join(self.roles)}{f'; {self.calls!r}' if self.calls else ''})"


class MessageListSpace(Space[list[Message]]):
    """Space of message lists, which may be empty: the messages that are new since the last action.

    Args:
        message: Space of each message; ``None`` for messages of any role.
        seed: Seed of the samples.
    """

    def __init__(self, message: MessageSpace | None = None, seed: int | None = None) -> None:
        self.message = message or MessageSpace(ROLES, any_calls=True)
        super().__init__(seed=seed)

    def seed(self, seed: int | None = None) -> Any:
        """Seed this space and that of the messages."""
        used = super().seed(seed)
        self.message.seed(used)
        return used

    def sample(self, mask: Any = None, probability: Any = None) -> list[Message]:
        """Samples up to three messages.

        Args:
            mask: Not supported.
            probability: Not supported.
        """
        _refuse_masks(mask, probability)
        return [self.message.sample() for _ in range(int(self.np_random.integers(4)))]

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a list, or a tuple, of messages."""
        return isinstance(x, list | tuple) and all(self.message.contains(message) for message in x)

    @property
    def is_np_flattenable(self) -> bool:
        """Text has no fixed size."""
        return False

    def to_jsonable(self, sample_n: Iterable[list[Message]]) -> list[Any]:
        """Copies of the samples: they are JSON already."""
        return [self.message.to_jsonable(sample) for sample in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[list[Message]]:
        """Copies of the samples."""
        return [self.message.from_jsonable(sample) for sample in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessageListSpace) and other.message == self.message

    __hash__ = None  # type: ignore[assignment] - holds a MessageSpace

    def __repr__(self) -> str:
        return f"MessageListSpace({self.message!r})"


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    return tool["function"].get("parameters") or {"type": "object", "properties": {}}


def _refuse_masks(mask: Any, probability: Any) -> None:
    if mask is not None or probability is not None:
        raise ValueError("spaces of messages are sampled without mask and probability")
