"""Translates between one ``gymnasium.Env`` and text: the first message, observations, and answers.

Guarantees: everything that can be wrong with names, spaces or render modes is an error when the translator is made. It
holds no state of an episode.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium

from agentrl.core.episode import Message
from agentrl.envkit.tools.tool_arguments import quote
from agentrl.envkit.wrappers.space_numbers import ParseError, short
from agentrl.envkit.wrappers.space_text import (
    check_names,
    check_space,
    describe_space,
    describe_value,
    example,
    parse_value,
)
from agentrl.envkit.wrappers.toy_text import GAMES

Observe = Literal["auto", "render", "space"]

_COLOURED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", re.DOTALL)
_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Translator:
    """Words for one environment.

    Args:
        env: The environment; kept by nobody here.
        instructions: Start of the first message; by default the rules of a known game.
        action_names: Names of a ``Discrete`` action space's elements.
        describe: An observation in words.
        parse: An answer's text to an action.
        observe: See :class:`~agentrl.wrappers.GymnasiumEnvironment`.
        max_numbers: Numbers that a space told in text may have.

    Raises:
        UnsupportedSpaceError: A space has no words, and no function was given for it.
        ValueError: Wrong names, or nothing to render.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        *,
        instructions: str | None,
        action_names: Sequence[str] | None,
        describe: Callable[[Any], str] | None,
        parse: Callable[[str], Any] | None,
        observe: Observe,
        max_numbers: int,
    ) -> None:
        game = GAMES.get(game_name(env.spec.id)) if env.spec is not None else None
        self.actions, self.observations = env.action_space, env.observation_space
        if action_names is None and game is not None:
            action_names = game.actions
        self.names = None if action_names is None else check_names(self.actions, action_names)
        renders = env.render_mode == "ansi"
        if observe == "render" and not renders:
            raise ValueError(f"observe='render' needs an environment with render_mode='ansi', it is {env.render_mode}")
        self.rendered = renders and (observe == "render" or (observe == "auto" and describe is None))
        self._describe = describe or (game.describe if game is not None else None)
        self._parse = parse
        self._instructions = (game.rules if game is not None else "") if instructions is None else instructions
        if parse is None:
            check_space(self.actions, max_numbers)
        if self._describe is None and not self.rendered:
            check_space(self.observations, max_numbers)

    def opening(self, observed: str) -> list[Message]:
        """The first message: instructions, how to answer, and the first observation."""
        how = ""
        if self._parse is None:
            how = (
                f"Your action is {describe_space(self.actions, self.names)}. End your message with it in a tag, like "
                f"this: {self._example()}"
            )
        return user("\n\n".join(part for part in (self._instructions, how, observed) if part))

    def observed(self, env: gymnasium.Env[Any, Any], observation: Any) -> str:
        """An observation as text.

        Raises:
            TypeError: ``render`` or ``describe`` gave no text.
        """
        parts: list[Any] = []
        if self.rendered:
            parts.append(env.render())
        if self._describe is not None:
            parts.append(self._describe(observation))
        elif not self.rendered:
            parts.append(describe_value(self.observations, observation))
        for part in parts:
            if not isinstance(part, str):
                raise TypeError(f"want an observation as text, got a {type(part).__name__}")
        return "\n".join(without_colours(part).strip("\n") for part in parts)

    def action(self, message: Message) -> Any:
        """The action in an assistant message.

        Raises:
            ParseError: There is none.
        """
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
        text = content if isinstance(content, str) else ""
        if self._parse is not None:
            value = self._parse(text)
            if not self.actions.contains(value):
                raise ParseError(f"{quote(str(value))} is outside of {short(self.actions)}")
            return value
        if not text.strip():
            raise ParseError("there is no text in your message")
        return parse_value(self.actions, text, self.names)

    def _example(self) -> str:
        return f"<action>{example(self.actions, self.names)}</action>"

    def refusal(self, error: ParseError) -> list[Message]:
        """The answer to a message without an action: what was wrong and what is allowed."""
        text = f"That is no action: {error}."
        if self._parse is None:
            wanted = describe_space(self.actions, self.names)
            if wanted not in text:
                text += f" Your action is {wanted}."
            text += f" End your message with it in a tag, like this: {self._example()}"
        return user(text)


def game_name(id: str) -> str:
    """A Gymnasium id without namespace and version."""
    return re.sub(r"-v\d+$", "", id.rpartition("/")[2])


def without_colours(text: str) -> str:
    """Terminal text as plain text: ``[ ]`` around what was coloured, for colour may be all that marks a place."""
    return _CODE.sub("", _COLOURED.sub(r"[\1]", text))


def user(text: str) -> list[Message]:
    """One message of the user."""
    return [{"role": "user", "content": text}]
