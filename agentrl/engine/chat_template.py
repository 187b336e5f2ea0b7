"""Finds out what the model's chat template wants and does: the form of tool calls, and how it ends a turn.

Guarantees: a template is tried once, and again only if the tokenizer gets another one; where it cannot render a turn,
nothing is known of its end, which is logged.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError as JinjaError

from agentrl.core.call_form import CallForm, call_form
from agentrl.core.episode import Message
from agentrl.core.template_marks import TemplateError
from agentrl.core.turn_ends import find_turn_ends
from agentrl.engine.model import LoadedModel
from agentrl.engine.params import SamplingParams

TEMPLATE_FAILURES = (JinjaError, TypeError, ValueError, KeyError, AttributeError)  # a template is foreign code
log = logging.getLogger(__name__)


def form_of_calls(tokenizer: Any, variables: dict[str, Any]) -> CallForm:
    """Finds the form in which the template wants tool calls.

    Args:
        tokenizer: The model's tokenizer.
        variables: Further variables of the template.
    """

    def render(messages: list[dict[str, Any]]) -> str | None:
        try:
            return tokenizer.apply_chat_template(messages, **(variables | {"tokenize": False}))
        except TEMPLATE_FAILURES:
            return None

    return call_form(render)


def with_turn_ends(params: SamplingParams, loaded: LoadedModel) -> SamplingParams:
    """Adds the tokens and texts with which the template ends a turn to those at which an answer stops.

    A base model's configuration names its own end token alone, and its answers would go on with made-up turns.

    Args:
        params: Parameters of the request; with ``ignore_eos`` nothing is added.
        loaded: The model.
    """
    template = getattr(loaded.tokenizer, "chat_template", None)
    if params.ignore_eos or not template:
        return params
    ids, texts = _turn_ends(_Template(loaded.tokenizer, str(template)), loaded.eos_ids)
    return replace(params, stop_token_ids=params.stop_token_ids + ids, stop=params.stop + texts)


class _Template:
    """A tokenizer with its present template; two are equal if both parts are."""

    def __init__(self, tokenizer: Any, source: str) -> None:
        self.tokenizer = tokenizer
        self._key = (id(tokenizer), source)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Template) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@lru_cache(maxsize=4)
def _turn_ends(template: _Template, named: frozenset[int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Ids and texts that end a turn, besides the tokens that the model names."""
    tokenizer = template.tokenizer
    form = form_of_calls(tokenizer, {})

    def render(messages: Sequence[Message], *, generation: bool) -> str:
        given = form.given(messages) if any(message.get("tool_calls") for message in messages) else list(messages)
        try:
            return tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=generation)
        except TEMPLATE_FAILURES as error:
            raise TemplateError(str(error)) from error

    try:
        ends = find_turn_ends(render, tokenizer, named)
    except TemplateError as error:
        log.warning("the chat template's end of a turn is not known, answers stop at the model's alone: %s", error)
        return (), ()
    return tuple(end for end in ends.ids if end not in named), ends.texts
