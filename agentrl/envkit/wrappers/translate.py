"""Translates between a ``gymnasium.Env`` and text: the first message, observations, and answers.

Guarantees: wrong names, spaces or render modes raise when the translator is made. It keeps no state of an episode.
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
    """Translates observations and actions of one environment.

    Args:
        env: The environment; no reference is kept.
        instructions: Start of the first message; by default the rules of a known game.
        action_names: Names of a ``Discrete`` action space's elements.
        describe: Function from an observation to text.
        parse: Function from an answer's text to an action.
        observe: ``auto``, ``render`` or ``space``, see :class:`~agentrl.wrappers.GymnasiumEnvironment`.
        max_numbers: Largest number of numbers that a space described in text may have.

    Raises:
        UnsupportedSpaceError: A space cannot be described in text, and no function was given for it.
        ValueError: The names are wrong, or the environment cannot render text.
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
        """Returns the first message: instructions, the form of an answer, and the first observation."""
        how = ""
        if self._parse is None:
            how = (
                f"Your action is {describe_space(self.actions, self.names)}. End your message with it in a tag, like "
                f"this: {self._example()}"
            )
        return user("\n\n".join(part for part in (self._instructions, how, observed) if part))

    def observed(self, env: gymnasium.Env[Any, Any], observation: Any) -> str:
        """Returns an observation as text.

        Raises:
            TypeError: ``render`` or ``describe`` did not return text.
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
        """Parses the action of an assistant message.

        Raises:
            ParseError: The message has no valid action.
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
        """Returns the answer to a message without an action: the error and the allowed actions."""
        text = f"That is no action: {error}."
        if self._parse is None:
            wanted = describe_space(self.actions, self.names)
            if wanted not in text:
                text += f" Your action is {wanted}."
            text += f" End your message with it in a tag, like this: {self._example()}"
        return user(text)


def game_name(id: str) -> str:
    """Strips namespace and version from a Gymnasium id."""
    return re.sub(r"-v\d+$", "", id.rpartition("/")[2])


def without_colours(text: str) -> str:
    """Replaces terminal colours by ``[ ]``, because colour may be the only mark of the agent's place."""
    return _CODE.sub("", _COLOURED.sub(r"[\1]", text))


def user(text: str) -> list[Message]:
    """Returns a text as a list with one user message."""
    return [{"role": "user", "content": text}]
