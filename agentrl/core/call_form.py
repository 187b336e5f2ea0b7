"""Finds how a chat template wants tool calls, and gives them to it so: the arguments' form and the ids.

Guarantees: a template gets the arguments as the object or as the text that it renders; arguments are never encoded
twice. Arguments that are not a JSON object go to the template as the text that they are; a template that can only read
objects refuses them, with the name of the call. An id in another form than the template takes is replaced by one that
it takes, in the call and in its result; an id in the right form stays, and so do all ids where the template takes any.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.core.episode import Message
from agentrl.core.message_shape import MessageError, arguments_object
from agentrl.core.valid_text import valid_text

Render = Callable[[list[Message]], str | None]
Ids = Literal["any", "nine", "named"]
_NAME, _KEY, _VALUE = "agentrl0f", "agentrl0key", "agentrl0value"  # occur in no template
_ARGUMENTS = {_KEY: _VALUE}
_TRIED: tuple[tuple[Ids, str], ...] = (  # the first whose call is rendered is the form of the ids
    ("any", "call_agentrl0"),  # as OpenAI's
    ("nine", "call00000"),  # nine letters and digits: Mistral's templates check them
    ("named", f"functions.{_NAME}:0"),  # all that Kimi K2's template renders of a call's name
)
_NINE = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True)
class CallForm:
    """The form of a call in what a chat template is given.

    Attributes:
        text: Whether the template wants the text of a JSON object, instead of the object.
        takes_text: Whether the template can render a text at all.
        ids: Ids of calls that the template takes: ``any``, ``nine`` letters and digits, or ``named``, those that hold
            the tool's name: ``functions.NAME:NUMBER``.
    """

    text: bool = False
    takes_text: bool = True
    ids: Ids = "any"

    def given(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages as the template wants them.

        Raises:
            MessageError: The arguments of a call are not a JSON object, and the template takes objects alone.
        """
        known = list(messages) if self.ids == "any" else _with_ids(messages, self.ids)
        return [self._message(message) if message.get("tool_calls") else message for message in known]

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
    for ids, call_id in _TRIED:
        as_object, as_text = (render(_conversation(form, call_id)) for form in (_ARGUMENTS, json.dumps(_ARGUMENTS)))
        if _holds_call(as_object) and not _is_repr(as_object):
            return CallForm(text=False, takes_text=_holds_call(as_text), ids=ids)
        if _holds_call(as_text):
            return CallForm(text=True, ids=ids)
    return CallForm()


def names(call_id: object, name: str) -> bool:
    """Whether the id of a call holds the name of its tool, as Kimi's do (``functions.NAME:0``)."""
    return isinstance(call_id, str) and named(name).search(call_id) is not None


def named(name: str) -> re.Pattern[str]:
    """Finds a name that is no part of a longer word: random ids may hold ``add``."""
    return re.compile(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])")


def _with_ids(messages: Sequence[Message], ids: Ids) -> list[Message]:
    """Gives calls and their results ids in the form that a template takes.

    A message's ids depend on what stands before it alone, so that a longer conversation begins alike. A result without
    an id belongs to the first call of the message before whose result has not come.
    """
    known: list[Message] = []
    made: list[str] = []  # ids of all calls so far
    replaced: dict[object, str] = {}  # the latest id for each that was given: ids may repeat from turn to turn
    waiting: list[str] = []  # ids of calls whose results have not come
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                made.append(_id_for(call, ids, made))
                replaced[call.get("id")] = made[-1]
                calls.append({**call, "id": made[-1]})
            waiting = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool":
            given = message.get("tool_call_id")
            own = replaced.get(given) if given is not None else next(iter(waiting), None)
            if own is not None:
                message = {**message, "tool_call_id": own}
                waiting = [one for one in waiting if one != own]
        known.append(message)
    return known


def _id_for(call: dict[str, Any], ids: Ids, made: Sequence[str]) -> str:
    """Returns the id of a call, or one in the form that the template takes.

    Args:
        call: The call.
        ids: The form.
        made: Ids of the calls before it.
    """
    given, name = call.get("id"), call["function"]["name"]
    if isinstance(given, str) and (names(given, name) if ids == "named" else _NINE.fullmatch(given)):
        return given
    for number in itertools.count(len(made)):
        own = f"functions.{name}:{number}"  # Kimi K2 counts the calls of a conversation
        if ids == "nine":
            own = hashlib.sha256(valid_text(f"{given} {own}").encode()).hexdigest()[:9]
        if own not in made:
            return own
    raise AssertionError("counting does not end")


def _conversation(arguments: Any, call_id: str) -> list[Message]:
    call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _holds_call(rendered: str | None) -> bool:
    return rendered is not None and all(word in rendered for word in (_NAME, _KEY, _VALUE))


def _is_repr(rendered: str | None) -> bool:
    """Whether a template that wants text wrote an object as Python would."""
    return rendered is not None and repr(_ARGUMENTS) in rendered
