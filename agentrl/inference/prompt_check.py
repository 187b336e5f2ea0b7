"""Checks that a chat template renders all that it is given, and that its tool calls can be read back.

Guarantees: each distinct form of a prompt (its roles in order, which messages hold calls, whether there are tools) is
rendered once with words that cannot be missed in place of its texts, before the prompt itself is used; a prompt of
which a message, a call or a tool is missing is refused with the remedy. ``developer`` messages become ``system``
messages where the template knows only those. A format of tool calls that the parser does not read back is refused.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from agentrl.core.episode import Message
from agentrl.core.message_shape import arguments_object
from agentrl.inference.encoding import TemplateError
from agentrl.inference.thoughts import opens_thought
from agentrl.inference.tool_parsers import FALLBACK, PARSERS, ParsedAnswer, ToolParser

Tools = Sequence[dict[str, Any]]
Render = Callable[[Sequence[Message], Tools, bool], str]  # messages, tools, generation prompt -> text, or an exception
WITH_TOOLS = "set model.chat_template=chatml_tools, or another template that renders tools"
_ROLES = (
    "use roles that the template renders there (most: one system message at the beginning, user and assistant in "
    "turns), or set model.chat_template to another template"
)
_MARK = "agentrl0mark"  # occurs in no template
_MOST_TOOLS = 2  # that are tried: one could come through where several do not
_NAMED = ("user", "assistant", "system")  # roles whose ``name`` tells participants apart
_CALL: dict[str, Any] = {"city": 'Zürich "old" town', "count": 3, "exact": True}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city."},
                "count": {"type": "integer", "description": "A number."},
                "exact": {"type": "boolean", "description": "A choice."},
            },
            "required": ["city"],
        },
    },
}
_ASKED: Message = {"role": "user", "content": "a"}
_SAID: Message = {"role": "assistant", "content": "a"}
_CALLED: list[Message] = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": json.dumps(_CALL)}}
        ],
    },
    {"role": "tool", "tool_call_id": "call00000", "name": "look_up", "content": "a"},
]
_TRIED: dict[str, tuple[list[Message], list[dict[str, Any]]]] = {
    "system message": ([{"role": "system", "content": "a"}, _ASKED], []),
    "developer message": ([{"role": "developer", "content": "a"}, _ASKED], []),
    "late system message": ([_ASKED, _SAID, {"role": "system", "content": "a"}, _ASKED], []),
    "tools": ([_ASKED], [_TOOL]),
    "a call and its result as an example": ([_ASKED, *_CALLED], [_TOOL]),
}
log = logging.getLogger(__name__)


class PromptCheck:
    """Tries a chat template once with each form of prompt.

    Args:
        render: Renders messages with the template; raises :class:`TemplateError` where the template fails.
        answer: Returns the part of a rendered text up to its first end of turn, as a parser gets it.
    """

    def __init__(self, render: Render, answer: Callable[[str], str]) -> None:
        self._render = render
        self._answer = answer
        self._roles: dict[str, str] | None = None
        self._failures: dict[str, str | None] = {}  # form of a prompt -> why it is refused
        self._told: set[str] = set()  # dropped parts that were logged
        self._calls: dict[str, str | None] = {}  # parser -> why its reading of the template's calls is refused

    def as_known(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Returns messages with the roles that the template knows: ``system`` for ``developer`` where it must be."""
        if not any(message.get("role") == "developer" for message in messages):
            return messages
        if self._roles is None:
            alone = [{"role": "developer", "content": _MARK}, {"role": "user", "content": "a"}]
            self._roles = {}
            if _MARK not in self._rendered(alone, (), generation=True)[0]:
                self._roles = {"developer": "system"}
        return [{**message, "role": self._roles.get(message["role"], message["role"])} for message in messages]

    def check(
        self,
        messages: Sequence[Message],
        tools: Tools,
        before: Sequence[Message] = (),
        *,
        tail: Callable[[str], str] = str,
        learned: bool = False,
    ) -> None:
        """Refuses messages that the template would drop.

        Reasoning of assistant messages is not looked for, because many templates leave that of earlier turns out, and
        what is said beside a tool call is only logged.

        Args:
            messages: The new messages of a prompt.
            tools: Tools of the conversation.
            before: Earlier messages that are rendered before them, and not checked.
            tail: Function that returns the part of the rendered text after those, where the messages must be.
            learned: Whether the last message is one that a model learns to write: then all of it must be rendered.

        Raises:
            TemplateError: Something of the messages or the tools would be missing in the prompt.
        """
        forms = [[_form(message) for message in some] for some in (before, messages)]
        form = json.dumps([*forms, min(len(tools), _MOST_TOOLS), learned])
        if form not in self._failures:
            self._failures[form] = self._missing(messages, tools, before, tail, learned)
        failure = self._failures[form]
        if failure is not None:
            raise TemplateError(failure)

    def check_calls(self, parser: ToolParser, *, chosen: bool = False) -> None:
        """Refuses a parser that does not read back a tool call which the template renders.

        Args:
            parser: Parser of the model's answers.
            chosen: Whether the user named the parser. A difference is then only logged: a model may write calls in
                another form than its template renders.

        Raises:
            TemplateError: The call comes back otherwise; or the template renders no calls, and nothing else tells their
                format.
        """
        if parser.name not in self._calls:
            self._calls[parser.name] = self._unread(parser)
            if chosen and self._calls[parser.name] is not None:
                log.warning("inference.tool_parser=%s: %s", parser.name, self._calls[parser.name])
        if not chosen and self._calls[parser.name] is not None:
            raise TemplateError(
                f"{self._calls[parser.name]}. Name the format with inference.tool_parser ({', '.join(PARSERS)}), or "
                f"{WITH_TOOLS}"
            )

    def findings(self, parser: ToolParser) -> list[str]:
        """Says what the template does with each thing that a prompt may hold, one line for each.

        Args:
            parser: Parser of the model's answers.
        """
        lines = [f"{what}: {self._outcome(messages, tools)}" for what, (messages, tools) in _TRIED.items()]
        lines[1] += ", as system messages" * bool(self._roles and "rendered" in lines[1])
        read = self._calls.setdefault(parser.name, self._unread(parser))
        return [*lines, f"tool calls: {read or f'read back by the parser {parser.name}'}"]

    def _outcome(self, messages: Sequence[Message], tools: Tools) -> str:
        try:
            self.check(messages, tools)
        except TemplateError as error:
            return f"refused: {error}"
        return "rendered"

    def _missing(
        self,
        messages: Sequence[Message],
        tools: Tools,
        before: Sequence[Message],
        tail: Callable[[str], str],
        learned: bool,
    ) -> str | None:
        """Returns what the template would leave out, as a sentence with the remedy; ``None`` if nothing."""
        marked, marks, asides = _marked(messages)
        if learned:
            last = f"{_MARK}{len(messages) - 1}"
            marks |= {mark: what for mark, what in asides.items() if mark.startswith((f"{last}c", f"{last}r"))}
        stand_ins = _stand_ins(min(len(tools), _MOST_TOOLS))
        text, failure = self._rendered([*before, *marked], stand_ins, generation=not learned)
        if failure and tools:
            text, failure = self._rendered([*before, *marked], (), generation=not learned)
            if not failure:
                return f"this chat template cannot render tools together with such messages: {WITH_TOOLS}"
        roles = ", ".join(str(message.get("role")) for message in messages)
        if failure:
            return f"this chat template cannot render a prompt of the roles {roles} ({failure}): {_ROLES}"
        added = tail(text)
        lost = list(dict.fromkeys(what for mark, what in marks.items() if mark not in added))
        if lost:
            remedy = WITH_TOOLS if any("tool" in what for what in lost) else _ROLES
            return (
                f"this chat template leaves out {' and '.join(lost)} of a prompt of the roles {roles}, so the model "
                f"would never see it: {remedy}"
            )
        if any(_tool_mark(index) not in text for index in range(len(stand_ins))):
            return f"this chat template does not render tools, so the model would never see them: {WITH_TOOLS}"
        for mark, what in asides.items():
            if mark not in text and what not in self._told and not what.startswith("the reasoning"):
                self._told.add(what)
                log.warning("this chat template leaves out %s; what the model shall see belongs into the content", what)
        return None

    def _unread(self, parser: ToolParser) -> str | None:
        """Returns how the template's calls and the parser's reading of them differ; ``None`` if they do not."""
        asked = [_ASKED]
        function = {"name": "look_up", "arguments": json.dumps(_CALL, ensure_ascii=False)}
        prompt, _ = self._rendered(asked, [_TOOL], generation=True)
        whole, answer = "", ""
        for call_id in ("call00000", "functions.look_up:0"):  # some formats write the id alone
            call = {"id": call_id, "type": "function", "function": function}
            said = {"role": "assistant", "content": "", "tool_calls": [call]}
            whole, _ = self._rendered([*asked, said], [_TOOL], generation=False)
            answer = self._answer(whole[len(_common(prompt, whole)) :])
            if "look_up" in answer:
                break
        else:
            if parser.name != FALLBACK:
                return None  # nothing to compare with; the format is known by the template's markers
            return "this chat template renders no tool calls, so it is not known how the model writes them"
        in_thought = whole.startswith(prompt) and opens_thought(prompt, parser.thinking)
        parsed = parser.parse(answer, [_TOOL], in_thought=in_thought)
        if _reads_back(parsed):
            return None
        made = [f"{call.name}({call.arguments})" for call in parsed.calls] or "no call"
        return f"the parser {parser.name} reads this chat template's own tool call {answer[:200]!r} as {made}"

    def _rendered(self, messages: Sequence[Message], tools: Tools, *, generation: bool) -> tuple[str, str]:
        """Returns the rendered text, and why the template failed; one of both is empty."""
        try:
            return self._render(self.as_known(messages), tools, generation), ""
        except TemplateError as error:
            return "", str(error)


def _form(message: Message) -> list[Any]:
    """Whatever of a message decides how templates treat it, apart from its texts."""
    calls = [
        [bool(arguments_object(call["function"]["arguments"])), call["function"]["name"] in str(call.get("id"))]
        for call in message.get("tool_calls", ())
    ]
    ids = [message.get("tool_call_id"), *(call.get("id") for call in message.get("tool_calls", ()))]
    reasoned = bool(message.get("reasoning_content"))
    return [
        message.get("role"),
        bool(str(message.get("content") or "").strip()),
        bool(message.get("name")),
        calls,
        [None if one is None else [len(str(one)), str(one).isalnum()] for one in ids],  # Mistral's templates check them
        reasoned,
    ]


def _marked(messages: Sequence[Message]) -> tuple[list[Message], dict[str, str], dict[str, str]]:
    """Returns the messages with words in place of their texts, and the thing that each word stands for.

    Returns:
        The messages; words that a prompt must hold; words that templates leave out by convention.
    """
    marked: list[Message] = []
    marks: dict[str, str] = {}
    asides: dict[str, str] = {}
    ids: dict[Any, str] = {}  # ids of calls that hold the tool's name, which some templates render in its place
    for index, message in enumerate(messages):
        role, one, mark = message.get("role", ""), dict(message), f"{_MARK}{index}"
        calls = message.get("tool_calls")
        if message.get("tool_call_id") in ids:
            one["tool_call_id"] = ids[message["tool_call_id"]]
        if str(message.get("content") or "").strip():
            one["content"] = f"{mark}cx"
            if calls:
                asides[one["content"]] = "what an assistant says beside a tool call"
            else:
                marks[one["content"]] = f"the content of the {role} message"
        if message.get("name") and role in _NAMED:
            one["name"] = f"{mark}nx"
            asides[one["name"]] = f"the name of {role} messages"
        if message.get("reasoning_content"):
            one["reasoning_content"] = f"{mark}rx"
            asides[one["reasoning_content"]] = f"the reasoning (reasoning_content) of the {role} message"
        if calls:
            one["tool_calls"] = [
                _marked_call(call, f"{mark}f{number}x", marks, ids) for number, call in enumerate(calls)
            ]
        marked.append(one)
    return marked, marks, asides


def _marked_call(call: Mapping[str, Any], mark: str, marks: dict[str, str], ids: dict[Any, str]) -> dict[str, Any]:
    marks[mark] = "a tool call"
    name, call_id = call["function"]["name"], call.get("id")
    if isinstance(call_id, str) and name in call_id:
        ids[call_id] = call_id.replace(name, mark)
    arguments = "{}"  # also for text that is no object: whether the template takes that is not decided here
    if arguments_object(call["function"]["arguments"]):
        value = f"value-{mark[::-1]}"  # holds no other mark
        marks[value] = "a tool call"
        arguments = json.dumps({"key": value})
    known = {"id": ids[call_id]} if call_id in ids else {}
    return {**call, **known, "function": {**call["function"], "name": mark, "arguments": arguments}}


def _tool_mark(index: int) -> str:
    return f"{_MARK}tool{index}x"


def _stand_ins(count: int) -> list[dict[str, Any]]:
    """Tools whose names cannot be missed."""
    return [{**_TOOL, "function": {**_TOOL["function"], "name": _tool_mark(index)}} for index in range(count)]


def _common(first: str, second: str) -> str:
    """Returns the beginning that two texts share, without a tag that is cut."""
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    shared = first[:length]
    return shared if shared.rfind("<") <= shared.rfind(">") or shared == first else shared[: shared.rfind("<")]


def _reads_back(parsed: ParsedAnswer) -> bool:
    if len(parsed.calls) != 1 or parsed.calls[0].error is not None or parsed.calls[0].name != "look_up":
        return False
    return json.loads(parsed.calls[0].arguments) == _CALL
