"""Renders new messages to token ids with a chat template; stored ids are never encoded again.

Guarantees: the ids of a continuation encode the text that a render with the new messages adds after the assistant's
text and its end-of-turn token; a template that changes the text there is refused. This text is found by rendering a
dummy turn that holds a sentinel. A template that rewrites earlier turns (drops their reasoning) is detected, and used
only if a policy for it is chosen.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from agentrl.core.call_form import CallForm, call_form
from agentrl.core.episode import Message
from agentrl.core.extras import install_hint
from agentrl.core.message_shape import MessageError

RewritePolicy = Literal["append", "branch"]
Tools = Sequence[dict[str, Any]]
_SENTINEL = "agentrl0said0this"  # stands for the assistant's text in a dummy turn; occurs in no template
_USER: Message = {"role": "user", "content": "a"}
_REASONED: tuple[Message, ...] = (  # templates find reasoning in the text, or in a field of its own
    {"content": f"<think>\nr\n</think>\n\n{_SENTINEL}"},
    {"content": _SENTINEL, "reasoning_content": "r", "thinking": "r"},
)


class TemplateError(ValueError):
    """The model has no chat template, or one that cannot be continued."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is needed here."""

    eos_token: str | None
    eos_token_id: int | None
    chat_template: Any

    def apply_chat_template(self, conversation: list[Message], **kwargs: Any) -> Any:
        """Render messages."""
        ...

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """Ids of a text."""
        ...

    def decode(self, token_ids: list[int], **kwargs: Any) -> Any:
        """Text of ids."""
        ...


FIRSTS = 256  # rendered first prompts that are remembered: all episodes of a group have the same one


class ChatTemplate:
    """Renders messages with a model's own template.

    Args:
        tokenizer: The model's tokenizer.
        end_ids: Further ids that end a turn (``eos_token_id`` of the generation config).
        policy: Policy for a template that rewrites earlier turns: ``append`` keeps the stored ids, ``branch`` renders
            the conversation again and starts a branch, ``None`` refuses the template.
        variables: Further variables of the template, e.g. ``enable_thinking``.

    Attributes:
        end_ids: Ids that end a turn.
        stop_ids: Those of them that the model's own configuration does not name, so that servers must be told to stop
            there. A base model's configuration may name ``<|endoftext|>`` alone, and its template closes a turn with
            ``<|im_end|>``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        end_ids: Iterable[int] = (),
        policy: RewritePolicy | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise TemplateError(
                "the model's tokenizer has no chat template: use an instruct model, or set tokenizer.chat_template "
                "and save it"
            )
        if tokenizer.eos_token is None or tokenizer.eos_token_id is None:
            raise TemplateError("the model's tokenizer has no end-of-sequence token")
        self.tokenizer = tokenizer
        self._fast: Any = getattr(tokenizer, "backend_tokenizer", None)  # faster: transformers always encodes a batch
        self.policy = policy
        self.eos_id: int = tokenizer.eos_token_id
        self.end_ids = frozenset({tokenizer.eos_token_id, *end_ids})
        self.special_ids = self.end_ids | frozenset(getattr(tokenizer, "added_tokens_decoder", ()))
        self._variables = dict(variables or {})
        self._closings: dict[bool, str] = {}  # text after the assistant's text, keyed by whether there are tools
        self._rewrites: dict[str, bool] = {}
        self._first = lru_cache(maxsize=FIRSTS)(self._render_first)
        closing = self._closing_id(self._probe([_USER], {}, ())[1])  # a template that cannot render a turn is refused
        self.stop_ids = () if closing is None or closing in self.end_ids else (closing,)
        self.end_ids |= set(self.stop_ids)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        source: str | None = None,
        policy: RewritePolicy | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> "ChatTemplate":
        """Template of the tokenizer saved in ``folder``, with the end ids of its ``generation_config.json``.

        Args:
            folder: Model folder.
            source: Another template to use: a Jinja file, the name of a template of agentrl
                (:func:`built_in_templates`), or ``training`` for TRL's variant of the model's template, which keeps
                earlier turns unchanged.
            policy: See the class.
            variables: See the class.
        """
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
        tokenizer.chat_template = template_text(source, folder) or tokenizer.chat_template
        return cls(tokenizer, end_ids=generation_end_ids(folder), policy=policy, variables=variables)

    @property
    def source(self) -> str:
        """The template's Jinja text; JSON if the tokenizer has several templates."""
        found = self.tokenizer.chat_template
        return found if isinstance(found, str) else json.dumps(found)

    def first(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids of a conversation's first messages and the generation prompt, cached for the episodes of a group."""
        return list(self._first(json.dumps([list(messages), list(tools)])))

    def _render_first(self, conversation: str) -> list[int]:
        messages, tools = json.loads(conversation)
        return self.encode(self._render(messages, generation=True, tools=tools))

    def following(
        self, messages: Sequence[Message], *, answered: Message, last_id: int | None, tools: Tools = ()
    ) -> list[int]:
        """Ids that continue a conversation after an assistant message.

        Args:
            messages: New messages; consecutive tool results are rendered together.
            answered: The assistant message before them; its calls name the tools.
            last_id: Last sampled id of that message; if it is not the template's end-of-turn id, the result begins
                with that id.
            tools: Tools of the conversation.

        Returns:
            The rest of the last turn, the new messages and the generation prompt.

        Raises:
            TemplateError: The template changes the text between the assistant's text and the new messages.
        """
        said, shorter = self._probe(messages, answered, tools)
        longer = self._tail(self._render([_USER, said, *messages], generation=True, tools=tools), said)
        closing, added = self._split_closing(longer)
        if closing is None:
            if not longer.startswith(shorter):
                raise TemplateError(
                    "this chat template renders the end of a turn differently when messages follow "
                    f"({shorter[:40]!r} becomes {longer[:40]!r}), so a conversation cannot be continued token by "
                    "token; single-turn workflows are not affected"
                )
            added = longer[len(shorter) :]
        ids = self.encode(added)
        return ids if closing is None or last_id == closing else [closing, *ids]

    def rewrites(self, messages: Sequence[Message]) -> bool:
        """Whether the template renders earlier turns differently when messages like these follow."""
        kind = "tool" if messages[0].get("role") == "tool" else "user"
        if kind not in self._rewrites:
            self._rewrites[kind] = self._probe_rewrite(kind)
        return self._rewrites[kind]

    def refuse_rewrite(self) -> TemplateError:
        """The error for a rewriting template without a policy."""
        return TemplateError(
            "this chat template rewrites earlier turns when messages are added (it drops their reasoning), so the "
            "sampled conversation differs from the rendered one. Set inference.history=append (keep the sampled "
            "ids), inference.history=branch (render again, each turn is its own sequence), or "
            "model.chat_template=training (a template that keeps reasoning); single-turn workflows are not affected"
        )

    def canonical(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids of a whole conversation as the template renders it."""
        return self.encode(self._render(messages, generation=False, tools=tools))

    def text(self, token_ids: list[int], *, special: bool = False) -> str:
        """Decode an answer without its end-of-turn token; ``special`` keeps special tokens, which mark tool calls."""
        if not special:
            return self.tokenizer.decode(token_ids, skip_special_tokens=True)
        while token_ids and token_ids[-1] in self.end_ids:
            token_ids = token_ids[:-1]
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _probe(self, messages: Sequence[Message], answered: Message, tools: Tools) -> tuple[Message, str]:
        """Returns a dummy assistant turn that these messages may follow, and the text after its sentinel."""
        results = []
        for message in messages:
            if message.get("role") != "tool":
                break
            results.append(message)
        if not results:
            said: Message = {"role": "assistant", "content": _SENTINEL}
            if bool(tools) not in self._closings:
                rendered = self._render([_USER, said], generation=False, tools=tools)
                self._closings[bool(tools)] = self._tail(rendered, said)
            return said, self._closings[bool(tools)]
        failure: Exception | None = None
        calls = [_call(result, answered) for result in results]
        for count in (len(calls), 1):
            said = {"role": "assistant", "content": "", "tool_calls": calls[:count]}
            try:
                self._render([_USER, said, *messages], generation=True, tools=tools)
                return said, self._tail(self._render([_USER, said], generation=False, tools=tools), said)
            except TemplateError as error:
                failure = error
        raise TemplateError(f"this chat template does not render tool calls and their results: {failure}")

    def _probe_rewrite(self, kind: str) -> bool:
        result: Message = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "b"}
        after = result if kind == "tool" else _USER
        for reasoned in _REASONED:
            said: Message = {"role": "assistant", **reasoned}
            if kind == "tool":
                said["tool_calls"] = [_call(result, {})]
            try:
                shorter = self._render([_USER, said], generation=False)
                longer = self._render([_USER, said, after], generation=False)
            except TemplateError:
                continue  # messages that the template cannot render are refused when an agent sends them
            if shorter.partition(_SENTINEL)[0] != longer.partition(_SENTINEL)[0]:
                return True
        return False

    def _tail(self, rendered: str, said: Message) -> str:
        """Returns the text after the sentinel, which a tool result may repeat."""
        words = max(len(said.get("tool_calls", ())), 1)
        parts = rendered.split(_SENTINEL, words)
        if len(parts) <= words:
            raise TemplateError("this chat template leaves out the assistant's text")
        return parts[-1]

    def _closing_id(self, tail: str) -> int | None:
        """Returns the special token that comes right after an assistant's text; ``None`` without one."""
        known = getattr(self.tokenizer, "added_tokens_decoder", {})
        first = self.encode(tail)[:1]
        return first[0] if first and first[0] in known and known[first[0]].special else None

    def _split_closing(self, tail: str) -> tuple[int | None, str]:
        """Finds the first end-of-turn id after an assistant's text; returns it and the text after it."""
        found: tuple[int, int, str] | None = None
        for end in self.end_ids:
            text = self.tokenizer.decode([end], skip_special_tokens=False)
            at = tail.find(text)
            if text and at >= 0 and (found is None or at < found[0]):
                found = at, end, tail[at + len(text) :]
        return (None, tail) if found is None else found[1:]

    @cached_property
    def call_form(self) -> CallForm:
        """The form in which the template wants the arguments of tool calls."""

        def render(messages: list[Message]) -> str | None:
            try:
                return self._apply(messages, generation=False)
            except TemplateError:
                return None

        return call_form(render)

    def _render(self, messages: Sequence[Message], *, generation: bool, tools: Tools = ()) -> str:
        if any(message.get("tool_calls") for message in messages):
            try:
                messages = self.call_form.given(messages)
            except MessageError as error:
                raise TemplateError(str(error)) from error
        return self._apply(messages, generation=generation, tools=tools)

    def _apply(self, messages: Sequence[Message], *, generation: bool, tools: Tools = ()) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=generation,
                tools=list(tools) or None,
                **self._variables,
            )
        except Exception as error:  # a template is code of its author and may raise anything
            raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens in the text become their ids."""
        if self._fast is not None:
            return self._fast.encode(text, add_special_tokens=False).ids
        return self.tokenizer.encode(text, add_special_tokens=False)


def template_text(source: str | None, folder: Path) -> str | None:
    """The Jinja text that ``source`` names, see :meth:`ChatTemplate.from_folder`; ``None`` for the model's own.

    Raises:
        TemplateError: ``source`` is ``training``, and TRL is missing or has no variant of the model's template.
    """
    if source is None:
        return None
    if source != "training":
        return built_in_templates().get(source, Path(source)).read_text()
    from transformers import AutoTokenizer

    return training_template(AutoTokenizer.from_pretrained(str(folder)))


def built_in_templates() -> dict[str, Path]:
    """Jinja files that come with agentrl, by name."""
    return {file.stem: file for file in (Path(__file__).parent / "templates").glob("*.jinja")}


def training_template(tokenizer: Any) -> str | None:
    """TRL's training variant of a tokenizer's template; ``None`` if the template needs no change.

    Raises:
        TemplateError: TRL is missing, or has no variant of this template.
    """
    try:
        from trl.chat_template_utils import get_training_chat_template
    except ImportError as error:
        raise TemplateError(f"model.chat_template=training needs TRL: {install_hint('train')}") from error
    try:
        return get_training_chat_template(tokenizer)
    except ValueError as error:
        raise TemplateError(f"model.chat_template=training: {error}") from error


def _call(result: Message, answered: Message) -> dict[str, Any]:
    """A tool call that a tool result answers, with the sentinel as its argument."""
    call_id = result.get("tool_call_id") or "call00000"
    names = {call.get("id"): (call.get("function") or {}).get("name") for call in answered.get("tool_calls", ())}
    name = names.get(call_id) or result.get("name") or "f"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"a": _SENTINEL}}}


def generation_end_ids(folder: Path) -> list[int]:
    """``eos_token_id`` of a model folder's generation config, as a list."""
    file = folder / "generation_config.json"
    found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    return [found] if isinstance(found, int) else list(found or [])
