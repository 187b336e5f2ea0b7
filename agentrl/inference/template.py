"""Renders new messages to token ids with a chat template; stored ids are never encoded again.

Guarantees: the ids of a continuation encode the text that a render with the new messages adds after the assistant's
text and its end-of-turn token; a template that changes the text there is refused. This text is found by rendering a
dummy turn that holds a sentinel, and gets the ids that it has behind the token before it. A template that rewrites
earlier turns (drops their reasoning) is detected, and used only if a policy for it is chosen. Whatever of this a
tokenizer does not allow is told once, in ``notes``.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from agentrl.core.call_form import CallForm, call_form
from agentrl.core.dummy_turn import SAID, USER, call_for, tail
from agentrl.core.episode import Message
from agentrl.core.image_reader import ImageReader
from agentrl.core.message_shape import MessageError
from agentrl.core.model_files import Unreadable, read_tokenizer
from agentrl.core.template_marks import Mark, Marks, TemplateError, Tokenizer
from agentrl.core.turn_ends import find_turn_ends
from agentrl.inference.encoding import TextEncoder
from agentrl.inference.image_parts import ShownImages, as_template_takes, takes_text
from agentrl.inference.prompt_check import PromptCheck
from agentrl.inference.rewriting import REWRITES, rewrites_turns
from agentrl.inference.template_notes import template_notes
from agentrl.inference.template_source import generation_end_ids, template_text
from agentrl.inference.token_bytes import TokenBytes
from agentrl.inference.tool_parsers import FALLBACK, ToolParser, parser_for

log = logging.getLogger(__name__)
RewritePolicy = Literal["append", "branch"]
Tools = Sequence[dict[str, Any]]
FIRSTS = 256  # rendered first prompts that are remembered: all episodes of a group have the same one


class ChatTemplate:
    r"""Renders messages with a model's own template.

    Args:
        tokenizer: The model's tokenizer.
        end_ids: Further ids that end a turn (``eos_token_id`` of the generation config).
        policy: Policy for a template that rewrites earlier turns: ``append`` keeps the stored ids, ``branch`` renders
            the conversation again and starts a branch, ``None`` refuses the template.
        variables: Further variables of the template, e.g. ``enable_thinking``.
        images: Reader of the model's images; ``None`` for a model that takes none.
        no_images: Why it takes none.

    Attributes:
        shown: The images of messages, and whether they can be sent.
        end_ids: Ids that end a turn.
        stop_ids: Those of them that the model's own configuration does not name, so that servers must be told to stop
            there. A base model's configuration may name ``<|endoftext|>`` alone, and its template closes a turn with
            ``<|im_end|>``.
        stop_texts: Texts that end a turn, for servers to stop at, where the template ends it with no token:
            ``\n\nUser:``, or ``</s>`` under the tokenizer of another model.
        turn_ends: How the template ends a turn.
        notes: Warnings about this template with this tokenizer; each is also logged as a warning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        end_ids: Iterable[int] = (),
        policy: RewritePolicy | None = None,
        variables: Mapping[str, Any] | None = None,
        images: ImageReader | None = None,
        no_images: str = "",
    ) -> None:
        if not tokenizer.chat_template:
            raise TemplateError(
                "the model's tokenizer has no chat template: use an instruct model, or set tokenizer.chat_template "
                "and save it"
            )
        if tokenizer.eos_token is None or tokenizer.eos_token_id is None:
            raise TemplateError("the model's tokenizer has no end-of-sequence token")
        self.tokenizer = tokenizer
        self.policy = policy
        self.shown = ShownImages(images, no_images)
        self.eos_id: int = tokenizer.eos_token_id
        self.encoder = TextEncoder(tokenizer)
        self._variables = dict(variables or {})
        self._closings: dict[bool, str] = {}  # text after the assistant's text, keyed by whether there are tools
        self._rewrites: dict[tuple[bool, bool, bool], bool] = {}
        self.prompts = PromptCheck(self._render_known, self._answer)
        self._first = lru_cache(maxsize=FIRSTS)(self._render_first)
        named = frozenset({tokenizer.eos_token_id, *end_ids})
        self.turn_ends = find_turn_ends(self.render, tokenizer, named)  # refuses a template without assistant turns
        self.stop_ids = tuple(end for end in self.turn_ends.ids if end not in named)
        self.stop_texts = self.turn_ends.texts
        self.end_ids = named | set(self.stop_ids)
        self.special_ids = self.end_ids | frozenset(getattr(tokenizer, "added_tokens_decoder", ()))
        self._ends = Marks(tokenizer, sorted(self.end_ids))
        self._added = Marks(tokenizer, sorted(self.special_ids))
        self.notes = template_notes(self)
        for note in self.notes:
            log.warning("%s", note)

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        source: str | None = None,
        policy: RewritePolicy | None = None,
        variables: Mapping[str, Any] | None = None,
        trust: bool = False,
    ) -> "ChatTemplate":
        """Template of the tokenizer saved in ``folder``, with the end ids of its ``generation_config.json``.

        Args:
            folder: Model folder.
            source: Another template to use: a Jinja file, the name of a template of agentrl
                (``chatml_tools``), or ``training`` for TRL's variant of the model's template, which keeps
                earlier turns unchanged.
            policy: See the class.
            variables: See the class.
            trust: Whether code that comes with the model may run.

        Raises:
            TemplateError: The tokenizer cannot be read, or has no template that can be used.
        """
        try:
            tokenizer: Any = read_tokenizer(folder, trust=trust)
        except Unreadable as error:
            raise TemplateError(str(error)) from error
        images, why = ImageReader.find(folder, trust=trust)
        own = tokenizer.chat_template or (images.chat_template if images is not None else None)
        tokenizer.chat_template = template_text(source, folder, trust=trust) or own
        ends = generation_end_ids(folder)
        return cls(tokenizer, end_ids=ends, policy=policy, variables=variables, images=images, no_images=why)

    @property
    def variables(self) -> Mapping[str, Any]:
        """Further variables of the template, of the whole run."""
        return self._variables

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
        self.shown.check(messages)
        self.prompts.check(messages, tools)
        return self.encode(self.shown.expanded(self.render(messages, generation=True, tools=tools), messages))

    def following(
        self, messages: Sequence[Message], *, answered: Message, answer_ids: Sequence[int], tools: Tools = ()
    ) -> list[int]:
        """Ids that continue a conversation after an assistant message.

        Args:
            messages: New messages; consecutive tool results are rendered together.
            answered: The assistant message before them; its calls name the tools.
            answer_ids: Ids of that message as they were sampled. The result begins with what they lack of the end of
                the turn.
            tools: Tools of the conversation.

        Returns:
            The rest of the last turn, the new messages and the generation prompt.

        Raises:
            TemplateError: The template changes the text between the assistant's text and the new messages.
        """
        self.shown.check(messages)
        said, shorter, whole = self._probe(messages, answered, tools)
        whole = self.shown.expanded(whole, messages)
        self.prompts.check(messages, tools, before=[USER, said], part=lambda text: tail(text, said))
        longer = tail(whole, said)
        is_call = bool(said.get("tool_calls"))
        inner = self._inner_end(shorter, longer)
        if inner is not None:
            return self._after_inner_end(inner, longer, answer_ids)
        mark = self._ends.first(longer)
        if mark is not None and longer[: mark.start].rstrip() == shorter[: mark.start].rstrip():
            return self._after_token("" if is_call else longer[: mark.start], mark, longer, answer_ids)
        start = self._text_end(shorter) if is_call else 0
        if not longer.startswith(shorter.rstrip()):
            raise TemplateError(
                "this chat template renders the end of a turn differently when messages follow "
                f"({shorter[:40]!r} becomes {longer[:40]!r}), so a conversation cannot be continued token by "
                "token; single-turn workflows are not affected"
            )
        return self._after_text(longer[start:], answer_ids)

    def _after_token(self, before: str, mark: Mark, longer: str, answer_ids: Sequence[int]) -> list[int]:
        """Ids of the text after a token that ends a turn, with the token itself if it was not sampled.

        Args:
            before: Text that the template puts between the assistant's text and the token.
            mark: The token's place in ``longer``.
            longer: All text after the assistant's text.
            answer_ids: Ids of the assistant's text.
        """
        last = answer_ids[-1] if answer_ids else None
        following = self._ends.first(longer, mark.end)
        while last != mark.id and following is not None and following.start == mark.end:  # several tokens end a turn
            if following.id == last:
                before, mark = "", following
            following = self._ends.first(longer, following.end)
        word = self._ends.word(mark.id)
        ids = self.encoder.after(word, longer[mark.end :])
        if last == mark.id:
            return ids
        lead = self.encoder.after("a", before + word) if before else [mark.id]
        lead = [*lead[: lead.index(mark.id)], mark.id] if mark.id in lead else [mark.id]
        return lead[lead.index(last) + 1 if last in lead else 0 :] + ids

    def _inner_end(self, shorter: str, longer: str) -> Mark | None:
        """Finds the token that ends a turn which others follow, if the last turn ends with another.

        gpt-oss ends its last turn with ``<|return|>``, earlier ones with ``<|end|>``. The texts are those after the
        assistant's text where nothing follows, and where messages follow.
        """
        outer, inner = self._ends.first(shorter), self._added.first(longer)
        if outer is None or inner is None or inner.id in self.end_ids:
            return None
        ended = self.render([USER], generation=False).rstrip()  # behind the last turn stands none that begins turns
        is_end = ended.endswith(self._added.word(inner.id))
        return inner if is_end and shorter[: outer.start] == longer[: inner.start] else None

    def _after_inner_end(self, inner: Mark, longer: str, answer_ids: Sequence[int]) -> list[int]:
        """Ids of the text after such a token. An end that was sampled stays in its place."""
        ids = self.encoder.after(self._added.word(inner.id), longer[inner.end :])
        is_ended = bool(answer_ids) and answer_ids[-1] in self.end_ids | {inner.id}
        return ids if is_ended else [inner.id, *ids]

    def _after_text(self, longer: str, answer_ids: Sequence[int]) -> list[int]:
        """Ids of the text after an assistant's text where no token ends a turn.

        What the server stopped at has been sampled, and is left out. Its last token may hold more, which stays.
        """
        if answer_ids and answer_ids[-1] in self.end_ids:
            return self.encoder.after(self._ends.word(answer_ids[-1]), longer)
        said = self.text(list(answer_ids), special=True)
        at, stop = min(((said.find(stop), stop) for stop in self.stop_texts if stop in said), default=(-1, ""))
        found = longer.find(stop)
        if at < 0 or found < 0:
            return self.encoder.after(said, longer)
        rest = longer[found + len(stop) :]
        return self.encoder.after(said, rest.removeprefix(said[at + len(stop) :]))

    def _text_end(self, shorter: str) -> int:
        """Position where the end of a turn begins, in the text after a call's argument."""
        word = self.turn_ends.word
        return shorter.rfind(word) if word and word in shorter else len(shorter.rstrip())

    def findings(self, parser: ToolParser) -> list[str]:
        """Says what the template does with each thing that a conversation may hold; see :class:`PromptCheck`."""
        return self.prompts.findings(
            parser, lambda messages: self.following(messages, answered=SAID, answer_ids=[self.eos_id])
        )

    def rewrites(self, messages: Sequence[Message], tools: Tools = (), *, has_system: bool = False) -> bool:
        """Whether the template renders earlier turns differently when messages like these follow.

        Args:
            messages: New messages after an answer. Results of tools alone keep a turn going; other messages, also
                behind results, begin another turn.
            tools: Tools of the conversation; with them an earlier turn may hold calls and results.
            has_system: Whether the conversation begins with a system message.
        """
        results = [message.get("role") == "tool" for message in messages]
        kind = all(results), bool(tools) or any(results), has_system
        if kind not in self._rewrites:
            self._rewrites[kind] = rewrites_turns(self.render, *kind, tools)
        return self._rewrites[kind]

    def refuse_rewrite(self) -> TemplateError:
        """The error for a rewriting template without a policy."""
        return TemplateError(REWRITES)

    def canonical(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Ids of a whole conversation as the template renders it."""
        return self.encode(self.shown.expanded(self.render(messages, generation=False, tools=tools), messages))

    def text(self, token_ids: list[int], *, special: bool = False) -> str:
        """Decode an answer without its end-of-turn token; ``special`` keeps special tokens, which mark tool calls."""
        while token_ids and token_ids[-1] in self.end_ids:
            token_ids = token_ids[:-1]
        return self.tokenizer.decode(token_ids, skip_special_tokens=not special)

    def _probe(self, messages: Sequence[Message], answered: Message, tools: Tools) -> tuple[Message, str, str]:
        """Finds a dummy assistant turn that these messages may follow.

        Returns:
            The turn; the text after its sentinel; the text of a conversation in which the messages follow it.
        """
        results = []
        for message in messages:
            if message.get("role") != "tool":
                break
            results.append(message)
        if not results:
            said = SAID
            if bool(tools) not in self._closings:
                rendered = self.render([USER, said], generation=False, tools=tools)
                self._closings[bool(tools)] = tail(rendered, said)
            self.prompts.check(messages, tools, before=[USER, said], part=lambda text: tail(text, said))
            whole = self.render([USER, said, *messages], generation=True, tools=tools)
            return said, self._closings[bool(tools)], whole
        failure: Exception | None = None
        calls = [call_for(result, answered) for result in results]
        known = parser_for(self.source).name != FALLBACK  # a family whose calls may stand in the text alone (LFM2)
        for count in (len(calls), 1, 0) if known else (len(calls), 1):
            said = {"role": "assistant", "content": "", "tool_calls": calls[:count]}
            said = said if count else SAID
            try:
                whole = self.render([USER, said, *messages], generation=True, tools=tools)
                return said, tail(self.render([USER, said], generation=False, tools=tools), said), whole
            except TemplateError as error:
                failure = error
        raise TemplateError(f"this chat template does not render tool calls and their results: {failure}")

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Reads single ids as the bytes that they stand for."""
        return TokenBytes(self.tokenizer)

    @cached_property
    def call_form(self) -> CallForm:
        """The form in which the template wants the arguments of tool calls."""

        def render(messages: list[Message]) -> str | None:
            try:
                return self._apply(messages, generation=False)
            except TemplateError:
                return None

        return call_form(render)

    def render(self, messages: Sequence[Message], *, generation: bool, tools: Tools = ()) -> str:
        """Text of messages, with or without the generation prompt.

        Raises:
            TemplateError: The template cannot render them.
        """
        return self._render_known(self.prompts.as_known(messages), tools, generation)

    def _render_known(self, messages: Sequence[Message], tools: Tools, generation: bool) -> str:
        if any(message.get("tool_calls") for message in messages):
            try:
                messages = self.call_form.given(messages)
            except MessageError as error:
                raise TemplateError(str(error)) from error
        return self._apply(messages, generation=generation, tools=tools)

    def _apply(self, messages: Sequence[Message], *, generation: bool, tools: Tools = ()) -> str:
        if self.shown.reader is not None:
            messages = as_template_takes(messages, text=self._takes_text)
        return self._applied(messages, generation=generation, tools=tools)

    @cached_property
    def _takes_text(self) -> bool:
        """Whether the template renders a content that is a text, and not a list of parts alone."""
        return takes_text(lambda messages: self._applied(messages, generation=False))

    def _applied(self, messages: Sequence[Message], *, generation: bool, tools: Tools = ()) -> str:
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

    def _answer(self, rendered: str) -> str:
        """Returns the text of the ids before the first end of turn."""
        ids = self.encode(rendered)
        end = next((at for at, token in enumerate(ids) if token in self.end_ids), len(ids))
        return self.text(ids[:end], special=True)

    def encode(self, text: str) -> list[int]:
        """Ids of a text that begins a conversation; special tokens in the text become their ids."""
        return self.encoder.ids(text)

    def encode_after(self, before: str, text: str) -> list[int]:
        """Ids of a text where it continues another."""
        return self.encoder.after(before, text)
