"""Encodes conversations as token ids with a loss mask.

Guarantees: a prompt has the ids that an agent's session would send (:class:`~agentrl.inference.template.ChatTemplate`),
and a completion the ids that a model would have to sample: its text and the end-of-turn token, without what the
template puts after that. A template that leaves out a part of the example (its tools, a message, reasoning, words
beside a call) is refused, and so is one that renders earlier turns differently once others follow.
"""

from dataclasses import dataclass

from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.supervised.examples import Pair, Sample


@dataclass(frozen=True)
class Encoded:
    """A conversation's token ids and loss mask.

    Attributes:
        ids: Token ids, ``[tokens]``.
        learned: Loss mask, ``[tokens]``.
    """

    ids: list[int]
    learned: list[bool]

    @property
    def labels(self) -> list[int]:
        """The ids, -100 where the loss mask is false."""
        return [token if learned else -100 for token, learned in zip(self.ids, self.learned, strict=True)]


class Encoder:
    """Encodes examples with a model's chat template.

    Args:
        template: The model's chat template.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        decode = template.tokenizer.decode
        self._ends = {end: decode([end], skip_special_tokens=False) for end in sorted(template.end_ids)}

    def sample(self, sample: Sample, *, completion_only: bool = True) -> Encoded:
        """Encode a conversation up to its last assistant message.

        Args:
            sample: The conversation.
            completion_only: Whether only assistant text and its end-of-turn token have a loss, or every token.

        Raises:
            TemplateError: The template cannot render the conversation turn by turn.
        """
        ids: list[int] = []
        learned: list[bool] = []
        done = ""  # the text encoded so far, as ``ids``
        for place, message in enumerate(sample.messages):
            if place < sample.start or message["role"] != "assistant":
                continue
            self._template.prompts.check(sample.messages[: place + 1], sample.tools, learned=True)
            before = self._template.render(sample.messages[:place], generation=True, tools=sample.tools)
            after = self._template.render(sample.messages[: place + 1], generation=False, tools=sample.tools)
            if not before.startswith(done) or not after.startswith(before):
                raise TemplateError(
                    "this chat template renders earlier turns differently once others follow, so a token would be "
                    "trained after a prompt that no session sends; use model.chat_template=training, which keeps them"
                )
            words, end = self._split(after[len(before) :])
            prompt = self._encode_after(done, before[len(done) :])
            answer = [*self._encode_after(before, words), end]
            ids += [*prompt, *answer]
            learned += [not completion_only] * len(prompt) + [True] * len(answer)
            done = before + words + self._ends[end]
        return Encoded(ids, learned)

    def pair(self, pair: Pair) -> tuple[list[int], list[int], list[int]]:
        """Encode the prompt, the chosen and the rejected answer, each answer with its end-of-turn token."""
        start = len(pair.prompt)
        both = [Sample([*pair.prompt, said], start, pair.tools) for said in (pair.chosen, pair.rejected)]
        chosen, rejected = (self.sample(one) for one in both)
        prompt = chosen.learned.index(True)
        return chosen.ids[:prompt], chosen.ids[prompt:], rejected.ids[prompt:]

    def _encode_after(self, before: str, text: str) -> list[int]:
        return self._template.encode_after(before, text) if before else self._template.encode(text)

    def _split(self, text: str) -> tuple[str, int]:
        """Split a rendered assistant turn into its text and the id of its end-of-turn token."""
        places = {end: text.find(word) for end, word in self._ends.items() if word and word in text}
        if not places:
            raise TemplateError(
                f"this chat template ends an assistant's turn with none of {', '.join(self._ends.values())} "
                f"({text[-40:]!r}): a model could not learn to stop"
            )
        end = min(places, key=lambda one: places[one])
        return text[: places[end]], end
