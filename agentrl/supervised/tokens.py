"""Conversations into ids, and which of them are learned.

Guarantees: a prompt has the ids that an agent's session would send (:class:`~agentrl.inference.template.ChatTemplate`),
and a completion the ids that a model would have to sample: its words, then the end-of-turn token, and nothing of what
the template puts after that. A template that renders earlier turns differently once others follow is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.core.episode import Message
from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.supervised.examples import Pair, Sample


@dataclass(frozen=True)
class Encoded:
    """A conversation's ids.

    Attributes:
        ids: Token ids.
        learned: For each, whether it has a loss.
    """

    ids: list[int]
    learned: list[bool]

    @property
    def labels(self) -> list[int]:
        """The ids, -100 where nothing is learned."""
        return [token if learned else -100 for token, learned in zip(self.ids, self.learned, strict=True)]


class Encoder:
    """Encodes lines with a model's chat template.

    Args:
        template: The template.
        variables: Further variables of it, ``inference.chat_template_kwargs``.
    """

    def __init__(self, template: ChatTemplate, variables: Mapping[str, Any] | None = None) -> None:
        self._template = template
        self._variables = dict(variables or {})
        decode = template.tokenizer.decode
        self._ends = {end: decode([end], skip_special_tokens=False) for end in sorted(template.end_ids)}

    def sample(self, sample: Sample, *, completion_only: bool = True) -> Encoded:
        """Ids of a conversation up to its last assistant message.

        Args:
            sample: The conversation.
            completion_only: Learn the assistant's words and their end of turn alone, else every token.

        Raises:
            TemplateError: The template cannot render it turn by turn.
        """
        ids: list[int] = []
        learned: list[bool] = []
        done = ""  # the text that ``ids`` stand for
        for place, message in enumerate(sample.messages):
            if place < sample.start or message["role"] != "assistant":
                continue
            before = self._render(sample.messages[:place], generation=True)
            after = self._render(sample.messages[: place + 1], generation=False)
            if not before.startswith(done) or not after.startswith(before):
                raise TemplateError(
                    "this chat template renders earlier turns differently once others follow, so a token would be "
                    "learned after a prompt that no session sends; model.chat_template=training keeps them as they are"
                )
            words, end = self._split(after[len(before) :])
            prompt, answer = self._template.encode(before[len(done) :]), [*self._template.encode(words), end]
            ids += [*prompt, *answer]
            learned += [not completion_only] * len(prompt) + [True] * len(answer)
            done = before + words + self._ends[end]
        return Encoded(ids, learned)

    def pair(self, pair: Pair) -> tuple[list[int], list[int], list[int]]:
        """Ids of the prompt, and of each answer with its end of turn."""
        start = len(pair.prompt)
        chosen, rejected = (self.sample(Sample([*pair.prompt, said], start)) for said in (pair.chosen, pair.rejected))
        prompt = chosen.learned.index(True)
        return chosen.ids[:prompt], chosen.ids[prompt:], rejected.ids[prompt:]

    def _split(self, text: str) -> tuple[str, int]:
        """An assistant's words as the template renders them, and the id that ends the turn."""
        places = {end: text.find(word) for end, word in self._ends.items() if word and word in text}
        if not places:
            raise TemplateError(
                f"this chat template ends an assistant's turn with none of {', '.join(self._ends.values())} "
                f"({text[-40:]!r}): a model could not learn to stop"
            )
        end = min(places, key=lambda one: places[one])
        return text[: places[end]], end

    def _render(self, messages: Sequence[Message], *, generation: bool) -> str:
        rendered = self._template.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation, **self._variables
        )
        return str(rendered)
