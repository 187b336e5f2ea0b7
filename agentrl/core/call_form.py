"""Finds how a chat template wants the arguments of tool calls, and gives them to it so.

Guarantees: a template gets the arguments as the object or as the text that it renders; arguments are never encoded
twice. Arguments that are not a JSON object go to the template as the text that they are; a template that can only read
objects refuses them, with the name of the call.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.core.episode import Message
from agentrl.core.message_shape import MessageError, arguments_object

Render = Callable[[list[Message]], str | None]
_NAME, _KEY, _VALUE = "agentrl0f", "agentrl0key", "agentrl0value"  # occur in no template
_ARGUMENTS = {_KEY: _VALUE}


@dataclass(frozen=True)
class CallForm:
    """The form of a call's arguments in what a chat template is given.

    Attributes:
        text: Whether the template wants the text of a JSON object, instead of the object.
        takes_text: Whether the template can render a text at all.
    """

    text: bool = False
    takes_text: bool = True

    def given(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages as the template wants them.

        Raises:
            MessageError: The arguments of a call are not a JSON object, and the template takes objects alone.
        """
        return [self._message(message) if message.get("tool_calls") else message for message in messages]

    def _message(self, message: Message) -> Message:
        return {**message, "tool_calls": [self._call(call) for call in message["tool_calls"]]}

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": self._arguments(function)}}

    def _arguments(self, function: dict[str, Any]) -> Any:
        given = function["arguments"]
        if self.text:
            return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        found = arguments_object(given)
        if found is None and not self.takes_text:
            raise MessageError(
                f"the arguments of the call of {function['name']!r} are not a JSON object ({str(given)[:60]!r}), "
                "and this chat template renders objects alone"
            )
        return given if found is None else found


def call_form(render: Render) -> CallForm:
    """Finds the form that a template wants, by rendering a call in each.

    Args:
        render: Renders messages; returns ``None`` where the template fails.
    """
    as_object, as_text = (render(_conversation(form)) for form in (_ARGUMENTS, json.dumps(_ARGUMENTS)))
    if _holds_call(as_object) and not _is_repr(as_object):
        return CallForm(text=False, takes_text=_holds_call(as_text))
    return CallForm(text=_holds_call(as_text))


def _conversation(arguments: Any) -> list[Message]:
    call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _holds_call(rendered: str | None) -> bool:
    return rendered is not None and all(word in rendered for word in (_NAME, _KEY, _VALUE))


def _is_repr(rendered: str | None) -> bool:
    """Whether a template that wants text wrote an object as Python would."""
    return rendered is not None and repr(_ARGUMENTS) in rendered
