"""Checks that a chat template renders all that it is given, and that its tool calls can be read back.

Guarantees: each distinct form of a prompt (its roles in order, which messages hold calls, whether there are tools) is
rendered once with words that cannot be missed in place of its texts, before the prompt itself is used; a prompt of
which a message, a call or a tool is missing is refused with the remedy. ``developer`` messages become ``system``
messages where the template knows only those. A format of tool calls that the parser does not read back is refused.
"""

import json
import logging
import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import takewhile
from typing import Any

from agentrl.core.call_form import names
from agentrl.core.episode import Message
from agentrl.core.images import text_of
from agentrl.core.message_shape import arguments_object
from agentrl.core.template_marks import TemplateError
from agentrl.inference.prompt_marks import MARK, MOST_TOOLS, TOOL, Marked, extended, replaced
from agentrl.inference.thoughts import opens_thought
from agentrl.inference.tool_parsers import FALLBACK, PARSERS, ParsedAnswer, ToolParser

Tools = Sequence[dict[str, Any]]
Render = Callable[[Sequence[Message], Tools, bool], str]  # messages, tools, generation prompt -> text, or an exception
WITH_TOOLS = "set model.chat_template=chatml_tools, or another template that renders tools"
_ROLES = (
    "use roles that the template renders there (most: one system message at the beginning, user and assistant in "
    "turns), or set model.chat_template to another template"
)
_SEEN = re.compile(  # words of a refusal that a list of refusals need not repeat
    "( of (a prompt|messages) of the roles .*)?, so the model would never see (it|them)$"
)
_THOUGHT = "put it into the content, leave it out of the examples, or set model.chat_template to one that renders it"
MOST_ROLES = 10  # that a refusal names; of more, the first and the last
FORMS = 4096  # that are remembered; a longer run or dataset tries the oldest once more
_CALL: dict[str, Any] = {"city": 'Zürich "old" town', "count": 3, "exact": True}
_ASKED: Message = {"role": "user", "content": "a"}
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
_LATE = "late system message"
_TRIED: dict[str, tuple[list[Message], list[dict[str, Any]]]] = {
    "system message": ([{"role": "system", "content": "a"}, _ASKED], []),
    "developer message": ([{"role": "developer", "content": "a"}, _ASKED], []),
    _LATE: ([{"role": "system", "content": "a"}, _ASKED], []),
    "tools": ([_ASKED], [TOOL]),
    "a call and its result as an example": ([_ASKED, *_CALLED], [TOOL]),
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
        self._takes_both: bool | None = None  # content and reasoning beside a call
        self._failures: dict[bytes, str | None] = {}  # form of a prompt -> why it is refused, whatever its texts are
        self._told: set[str] = set()  # dropped parts that were logged
        self._calls: dict[str, str | None] = {}  # parser -> why its reading of the template's calls is refused

    def as_known(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Returns messages with what the template takes.

        That is ``system`` for ``developer`` where it must be, and content without reasoning beside a call where the
        template fails with both.
        """
        return self._with_one_of_both(self._with_roles(messages))

    def _with_one_of_both(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not any(map(_holds_all, messages)):
            return messages
        if self._takes_both is None:
            self._takes_both = True  # while it is tried
            call = {**_CALLED[0], "content": "a"}
            alone, both = (
                self._rendered([_ASKED, said, _CALLED[1]], [TOOL], generation=True)[0]
                for said in (call, {**call, "reasoning_content": "a"})
            )
            self._takes_both = bool(both) or not alone
        if self._takes_both:
            return messages
        return [
            {key: value for key, value in message.items() if key != "reasoning_content"}
            if _holds_all(message)
            else message
            for message in messages
        ]

    def _with_roles(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not any(message.get("role") == "developer" for message in messages):
            return messages
        if self._roles is None:
            alone = [{"role": "developer", "content": MARK}, {"role": "user", "content": "a"}]
            self._roles = {}
            if MARK not in self._rendered(alone, (), generation=True)[0]:
                self._roles = {"developer": "system"}
        return [{**message, "role": self._roles.get(message["role"], message["role"])} for message in messages]

    def check(
        self,
        messages: Sequence[Message],
        tools: Tools,
        before: Sequence[Message] = (),
        *,
        part: Callable[[str], str] = str,
        learned: bool = False,
    ) -> None:
        """Refuses messages that the template would drop.

        Reasoning of assistant messages is not looked for, because many templates leave that of earlier turns out, and
        what is said beside a tool call is only logged.

        Args:
            messages: The new messages of a prompt.
            tools: Tools of the conversation.
            before: Earlier messages that are rendered before them, and not checked.
            part: Function that returns the part of the rendered text after those, where the messages must be.
            learned: Whether the last message is one that a model learns to write: then all of it must be rendered.

        Raises:
            TemplateError: Something of the messages or the tools would be missing in the prompt.
        """
        forms = [[_form(message) for message in some] for some in (before, messages)]
        whole = json.dumps([*forms, min(len(tools), MOST_TOOLS), learned])
        form = sha256(whole.encode()).digest()  # a conversation of 200 turns has a long one
        failure = self._failures.get(form)
        if form not in self._failures:
            failure, depends = self._missing(messages, tools, before, part, learned)
            if not depends:
                if len(self._failures) >= FORMS:
                    del self._failures[next(iter(self._failures))]
                self._failures[form] = failure
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

    def findings(self, parser: ToolParser, following: Callable[[Sequence[Message]], object]) -> list[str]:
        """Says what the template does with each thing that a prompt may hold: what it renders, and each refusal.

        Args:
            parser: Parser of the model's answers.
            following: Renders messages that follow an answer; raises :class:`TemplateError` where it cannot.
        """
        rendered: list[str] = []
        refused: list[str] = []
        remedies: list[str] = []
        for what, (messages, tools) in _TRIED.items():
            try:
                if what == _LATE:
                    following(messages)
                else:
                    self.check(messages, tools)
            except TemplateError as error:
                why = str(error)
                remedies += [remedy for remedy in (WITH_TOOLS, _ROLES) if why.endswith(remedy)]
                for rest in (f": {WITH_TOOLS}", f": {_ROLES}"):
                    why = why.removesuffix(rest)
                refused.append(f"refused: {what}: {_SEEN.sub('', why)}")
            else:
                rendered.append(what + " (as system)" * (what.startswith("developer") and bool(self._roles)))
        read = self._calls.setdefault(parser.name, self._unread(parser))
        calls = f"tool calls: {read or f'read back by the parser {parser.name}'}"
        first = [f"rendered: {', '.join(rendered)}"] if rendered else []
        return [*first, *refused, calls, *(f"remedy: {remedy}" for remedy in dict.fromkeys(remedies))]

    def _missing(
        self,
        messages: Sequence[Message],
        tools: Tools,
        before: Sequence[Message],
        part: Callable[[str], str],
        learned: bool,
    ) -> tuple[str | None, bool]:
        """Tries a form of prompt; what fails with other texts is tried with the real ones, which templates may look up.

        Returns:
            What the template would leave out, as a sentence with the remedy, ``None`` if nothing; and whether that
            depends on the texts, so that another prompt of this form has to be tried again.
        """

        def outcome(marked: Marked) -> tuple[str | None, bool]:
            if learned:
                marked.need_last()
            return self._outcome_of(marked, before, part, generation=not learned)

        reason, certain = outcome(replaced(messages, len(tools)))
        if reason is None or certain:
            return reason, False
        return (None if outcome(extended(messages, tools))[0] is None else reason), True

    def _outcome_of(
        self, marked: Marked, before: Sequence[Message], part: Callable[[str], str], *, generation: bool
    ) -> tuple[str | None, bool]:
        """Returns why a prompt is refused, and whether that is certain: whether it does not depend on its texts."""
        prompt = f"a prompt of the roles {_roles(marked.messages)}"
        if before:
            prompt = f"messages of the roles {_roles(marked.messages)} after an answer"
        text, failure = self._rendered([*before, *marked.messages], marked.tools, generation=generation)
        if failure and marked.tools:
            text, without = self._rendered([*before, *marked.messages], (), generation=generation)
            if not without:
                return f"this chat template cannot render tools together with such messages: {WITH_TOOLS}", False
        if failure:
            return f"this chat template cannot render {prompt} ({failure}): {_ROLES}", False
        added, text = part(text).lower(), text.lower()
        lost = list(dict.fromkeys(what for mark, what in (marked.contents | marked.calls).items() if mark not in added))
        if lost:
            thought = all(what.startswith("the reasoning") for what in lost)
            remedy = _THOUGHT if thought else WITH_TOOLS if any("tool" in what for what in lost) else _ROLES
            return (
                f"this chat template leaves out {' and '.join(lost)} of {prompt}, so the model "
                f"would never {'see' if generation else 'learn'} it: {remedy}"
            ), any(mark not in added for mark in marked.calls)
        if not before and any(name not in text for name in marked.names):  # later ones follow the ids of these
            return f"this chat template does not render tools, so the model would never see them: {WITH_TOOLS}", True
        for mark, what in marked.asides.items():
            if mark not in text and what not in self._told and not what.startswith("the reasoning"):
                self._told.add(what)
                log.warning("this chat template leaves out %s; what the model shall see belongs into the content", what)
        return None, True

    def _unread(self, parser: ToolParser) -> str | None:
        """Returns how the template's calls and the parser's reading of them differ; ``None`` if they do not."""
        asked = [_ASKED]
        function = {"name": "look_up", "arguments": json.dumps(_CALL, ensure_ascii=False)}
        prompt, _ = self._rendered(asked, [TOOL], generation=True)
        whole, answer = "", ""
        for call_id in ("call00000", "functions.look_up:0"):  # some formats write the id alone
            call = {"id": call_id, "type": "function", "function": function}
            said = {"role": "assistant", "content": "", "tool_calls": [call]}
            whole, failure = self._rendered([*asked, said], [TOOL], generation=False)
            if failure:  # some templates want the result, too
                result = {**_CALLED[1], "tool_call_id": call_id}
                whole, _ = self._rendered([*asked, said, result], [TOOL], generation=False)
            answer = self._answer(whole[len(_common(prompt, whole)) :])
            if "look_up" in answer:
                break
        else:
            if parser.name != FALLBACK:
                return None  # nothing to compare with; the format is known by the template's markers
            return "this chat template renders no tool calls, so it is not known how the model writes them"
        in_thought = whole.startswith(prompt) and opens_thought(prompt, parser.thinking)
        parsed = parser.parse(answer, [TOOL], in_thought=in_thought)
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
    """Returns the parts of a message, apart from its texts, that templates may treat differently."""
    calls = [
        [bool(arguments_object(call["function"]["arguments"])), names(call.get("id"), call["function"]["name"])]
        for call in message.get("tool_calls", ())
    ]
    ids = [message.get("tool_call_id"), *(call.get("id") for call in message.get("tool_calls", ()))]
    reasoned = bool(message.get("reasoning_content"))
    return [
        message.get("role"),
        bool(text_of(message.get("content")).strip()),
        [part["type"] for part in message["content"]] if isinstance(message.get("content"), list) else [],
        bool(message.get("name")),
        calls,
        [None if one is None else [len(str(one)), str(one).isalnum()] for one in ids],  # Mistral's templates check them
        reasoned,
    ]


def _holds_all(message: Message) -> bool:
    """Whether a message holds calls, a content and reasoning."""
    return all(message.get(key) for key in ("tool_calls", "content", "reasoning_content"))


def _roles(messages: Sequence[Message]) -> str:
    """Returns the roles of messages as a list for a person."""
    roles = [str(message.get("role")) for message in messages]
    if len(roles) <= MOST_ROLES:
        return ", ".join(roles)
    return f"{', '.join(roles[:4])}, ..., {', '.join(roles[-2:])} ({len(roles)} messages)"


def _common(first: str, second: str) -> str:
    """Returns the beginning that two texts share, without a tag that is cut."""
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    shared = first[:length]
    return shared if shared.rfind("<") <= shared.rfind(">") or shared == first else shared[: shared.rfind("<")]


def _reads_back(parsed: ParsedAnswer) -> bool:
    if len(parsed.calls) != 1 or parsed.calls[0].error is not None or parsed.calls[0].name != "look_up":
        return False
    return json.loads(parsed.calls[0].arguments) == _CALL
