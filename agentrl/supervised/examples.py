"""Lines of a dataset into conversations to learn from, and pairs of answers to prefer one of.

Guarantees: what a line says is taken as it stands, or refused with its place and the shapes that would do; where lines
hold tasks and no texts, the environment says the texts, with the prompt that an agent gets in it; the same recipe gives
the same lines in the same order. Nothing here needs torch.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from agentrl.config.errors import DataError
from agentrl.config.recipe import DatasetConfig, Recipe
from agentrl.config.supervised import NO_ENV, evaluates
from agentrl.core.episode import Message, Task
from agentrl.core.registry import registered
from agentrl.data.datasets import load_tasks
from agentrl.envkit.language import SingleTurnEnvironment
from agentrl.envkit.make import discard, make

_ROLES = ("system", "user", "assistant", "tool")
_SAMPLE = "messages, or prompt and completion"
_PAIR = "prompt, chosen and rejected, or chosen and rejected as messages that begin alike"


class NoTextsError(DataError):
    """A line holds a task, and nobody says the texts to learn from."""


@runtime_checkable
class Demonstrates(Protocol):
    """An environment that can say a right answer to its tasks."""

    def demonstration(self, task: dict[str, Any]) -> str:
        """A right answer, in the form that the prompt asks for."""
        ...


@runtime_checkable
class Errs(Protocol):
    """An environment that can say a wrong answer too, to tell from the right one."""

    def wrong_demonstration(self, task: dict[str, Any], rng: random.Random) -> str:
        """A wrong answer in the right form; the same ``rng`` gives the same one."""
        ...


@dataclass(frozen=True)
class Sample:
    """A conversation to learn from.

    Attributes:
        messages: All of it.
        start: Assistant messages from this place on are learned; earlier ones are part of the prompt.
    """

    messages: list[Message]
    start: int


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt.

    Attributes:
        prompt: The messages before the answer.
        chosen: The better answer, an assistant message.
        rejected: The worse one.
    """

    prompt: list[Message]
    chosen: Message
    rejected: Message


@dataclass(frozen=True)
class LoadedLines:
    """What to learn from.

    Attributes:
        lines: Samples for ``trainer.type=sft``, else pairs.
        source: A sentence that says where they come from.
    """

    lines: list[Sample | Pair]
    source: str


def load_lines(recipe: Recipe, section: DatasetConfig) -> LoadedLines:
    """The lines of a dataset section, as ``trainer.type`` needs them.

    Raises:
        DataError: The dataset is not found, or a line has not the texts that are needed.
    """
    loaded = load_tasks(named(section), seed=recipe.seed, env=recipe.env)
    pairs = recipe.trainer.type != "sft"
    env = None if recipe.env.id == NO_ENV else make(recipe.env.id, **recipe.env.kwargs)
    try:
        read = (_reader_of_pairs if pairs else _reader_of_samples)(recipe, env)
        lines = [_at(task, section, read) for task in loaded.tasks]
    finally:
        if env is not None:
            discard(env)
    return LoadedLines(lines, loaded.source)


def load_held_out(recipe: Recipe) -> LoadedLines | None:
    """The lines that are measured before and after the training.

    Returns:
        ``None`` where the recipe has none: ``valid_dataset`` names no dataset and there is no environment with one,
        or it holds tasks for the environment's evaluation, to which nobody says an answer.
    """
    section = recipe.valid_dataset
    if section.name == "env" and section.path is None and recipe.env.id == NO_ENV:
        return None
    try:
        return load_lines(recipe, section)
    except NoTextsError:
        if evaluates(recipe):
            return None
        raise


def named(section: DatasetConfig) -> DatasetConfig:
    """The section with a registered name: a path alone is a folder, an unknown ``owner/name`` comes from the hub."""
    if section.name == "env" and section.path is not None:
        return section.model_copy(update={"name": "jsonl"})
    known = section.name == "env" or ":" in section.name or section.name in registered("dataset")
    if known or section.name.count("/") != 1:
        return section
    return section.model_copy(update={"name": "hub", "kwargs": {"id": section.name, **section.kwargs}})


def _at(task: Task, section: DatasetConfig, read: Callable[[Task], Sample | Pair]) -> Sample | Pair:
    try:
        return read(task)
    except (ValueError, KeyError, NoTextsError) as error:
        kind = NoTextsError if isinstance(error, NoTextsError) else DataError
        raise kind(f"{section.name if section.path is None else section.path}, {task.id}: {error}") from error


def _reader_of_samples(recipe: Recipe, env: object) -> Callable[[Task], Sample]:
    def read(task: Task) -> Sample:
        found = sample_of(task.data)
        if found is not None:
            return found
        if isinstance(env, SingleTurnEnvironment) and isinstance(env, Demonstrates):
            prompt = _prompt(recipe, env, task.data)
            return Sample([*prompt, answer(env.demonstration(task.data))], len(prompt))
        raise NoTextsError(_lacks(recipe, task.data, _SAMPLE, "demonstration"))

    return read


def _reader_of_pairs(recipe: Recipe, env: object) -> Callable[[Task], Pair]:
    def read(task: Task) -> Pair:
        found = pair_of(task.data)
        if found is not None:
            return found
        if isinstance(env, SingleTurnEnvironment) and isinstance(env, Demonstrates) and isinstance(env, Errs):
            rng = random.Random(f"{recipe.seed}/{task.id}")
            wrong = env.wrong_demonstration(task.data, rng)
            return Pair(_prompt(recipe, env, task.data), answer(env.demonstration(task.data)), answer(wrong))
        raise NoTextsError(_lacks(recipe, task.data, _PAIR, "demonstration and wrong_demonstration"))

    return read


def _prompt(recipe: Recipe, env: SingleTurnEnvironment, task: dict[str, Any]) -> list[Message]:
    """What the model gets in an episode: the agent's system prompt, then the environment's messages."""
    system = recipe.agent.kwargs.get("system")
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*first, *env.prompt(task)]


def _lacks(recipe: Recipe, line: Mapping[str, Any], shape: str, methods: str) -> str:
    has = ", ".join(line) or "nothing"
    return (
        f"trainer.type={recipe.trainer.type} needs lines with {shape}, and this one has {has}; "
        f"env.id={recipe.env.id} does not say them either (it would with {methods})"
    )


def sample_of(line: Mapping[str, Any]) -> Sample | None:
    """A line with ``messages``, or with ``prompt`` and ``completion``; ``None`` where it has neither.

    Raises:
        ValueError: It has them, but not as texts or messages, or nothing that an assistant says.
    """
    if "messages" in line:
        messages = as_messages(line["messages"], "messages", "user")
        start = 0
    elif "prompt" in line and "completion" in line:
        prompt = as_messages(line["prompt"], "prompt", "user")
        messages = [*prompt, *as_messages(line["completion"], "completion", "assistant")]
        start = len(prompt)
    else:
        return None
    if not any(message["role"] == "assistant" for message in messages[start:]):
        raise ValueError("nothing to learn: no message after the prompt is an assistant's")
    return Sample(messages, start)


def pair_of(line: Mapping[str, Any]) -> Pair | None:
    """A line with ``chosen`` and ``rejected``, with or without ``prompt``; ``None`` where it has no pair.

    Raises:
        ValueError: It has one, but the answers are not one assistant message each, or are the same.
    """
    if "chosen" not in line or "rejected" not in line:
        return None
    chosen = as_messages(line["chosen"], "chosen", "assistant")
    rejected = as_messages(line["rejected"], "rejected", "assistant")
    prompt = as_messages(line["prompt"], "prompt", "user") if "prompt" in line else _common(chosen, rejected)
    answers = []
    for name, messages in (("chosen", chosen), ("rejected", rejected)):
        if messages[: len(prompt)] == prompt:  # the whole conversation, not the answer alone
            messages = messages[len(prompt) :]
        if [message["role"] for message in messages] != ["assistant"]:
            roles = ", ".join(message["role"] for message in messages) or "nothing"
            raise ValueError(f"{name} must be one assistant message after the prompt, and is {roles}")
        answers += messages
    if not prompt:
        raise ValueError("chosen and rejected have no prompt before them")
    if answers[0] == answers[1]:
        raise ValueError("chosen and rejected are the same")
    return Pair(prompt, *answers)


def _common(chosen: Sequence[Message], rejected: Sequence[Message]) -> list[Message]:
    found: list[Message] = []
    for one, other in zip(chosen[:-1], rejected[:-1], strict=False):
        if one != other:
            break
        found.append(one)
    return found


def as_messages(value: object, name: str, role: str) -> list[Message]:
    """A text as one message of ``role``, or a list of messages as it is.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise ValueError(f"{name} is {type(value).__name__}, want a text or a list of messages")
    messages = [dict(part) if isinstance(part, Mapping) else {} for part in value]
    for message in messages:
        if message.get("role") not in _ROLES or not isinstance(message.get("content"), str):
            raise ValueError(f"{name} has {str(message)[:80]}, want a role ({', '.join(_ROLES)}) and a text as content")
    return messages


def answer(text: str) -> Message:
    """A text as the assistant's message."""
    return {"role": "assistant", "content": text}
