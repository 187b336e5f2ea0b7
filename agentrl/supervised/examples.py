"""Reads a dataset's examples as conversations (SFT) or preference pairs (reward models, DPO).

Guarantees: an example is taken unchanged, or refused with its position and the accepted formats; where examples hold
tasks without texts, the environment supplies the texts, with the prompt that an agent gets in it; the same recipe gives
the same examples in the same order. Nothing here needs torch.
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
_PAIR = "prompt, chosen and rejected, or chosen and rejected as messages with a common beginning"


class NoTextsError(DataError):
    """An example holds a task without texts, and the environment cannot supply them."""


@runtime_checkable
class Demonstrates(Protocol):
    """An environment that can give a correct answer to its tasks."""

    def demonstration(self, task: dict[str, Any]) -> str:
        """Returns a correct answer in the format that the prompt asks for."""
        ...


@runtime_checkable
class Errs(Protocol):
    """An environment that can also give a wrong answer, for preference pairs."""

    def wrong_demonstration(self, task: dict[str, Any], rng: random.Random) -> str:
        """Returns a wrong answer in the correct format; the same ``rng`` gives the same one."""
        ...


@dataclass(frozen=True)
class Sample:
    """A conversation to train on.

    Attributes:
        messages: All messages of the conversation.
        start: Index of the first message whose assistant turns are trained; earlier ones are part of the prompt.
    """

    messages: list[Message]
    start: int


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt.

    Attributes:
        prompt: The messages before the answer.
        chosen: The better answer, an assistant message.
        rejected: The worse answer, an assistant message.
    """

    prompt: list[Message]
    chosen: Message
    rejected: Message


@dataclass(frozen=True)
class LoadedExamples:
    """The examples of one dataset section.

    Attributes:
        examples: Samples for ``trainer.type=sft``, else pairs.
        source: Sentence that says where the examples come from.
    """

    examples: list[Sample | Pair]
    source: str


def load_examples(recipe: Recipe, section: DatasetConfig) -> LoadedExamples:
    """Load the examples of a dataset section, in the form that ``trainer.type`` needs.

    Raises:
        DataError: The dataset is not found, or an example lacks a text that is needed.
    """
    loaded = load_tasks(named(section), seed=recipe.seed, env=recipe.env)
    pairs = recipe.trainer.type != "sft"
    env = None if recipe.env.id == NO_ENV else make(recipe.env.id, **recipe.env.kwargs)
    try:
        read = (_reader_of_pairs if pairs else _reader_of_samples)(recipe, env)
        examples = [_at(task, section, read) for task in loaded.tasks]
    finally:
        if env is not None:
            discard(env)
    return LoadedExamples(examples, loaded.source)


def load_held_out(recipe: Recipe) -> LoadedExamples | None:
    """Load the examples that are measured before and after the training.

    Returns:
        ``None`` where the recipe has none: ``valid_dataset`` names no dataset and there is no environment with one,
        or it holds tasks for the environment's evaluation without answers.
    """
    section = recipe.valid_dataset
    if section.name == "env" and section.path is None and recipe.env.id == NO_ENV:
        return None
    try:
        return load_examples(recipe, section)
    except NoTextsError:
        if evaluates(recipe):
            return None
        raise


def named(section: DatasetConfig) -> DatasetConfig:
    """Set the section's registered name: ``jsonl`` for a path alone, ``hub`` for an unknown ``owner/name``."""
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
    """Returns the prompt of an episode: the agent's system prompt, then the environment's messages."""
    system = recipe.agent.kwargs.get("system")
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*first, *env.prompt(task)]


def _lacks(recipe: Recipe, example: Mapping[str, Any], shape: str, methods: str) -> str:
    has = ", ".join(example) or "nothing"
    return (
        f"trainer.type={recipe.trainer.type} needs examples with {shape}, and this one has {has}; "
        f"env.id={recipe.env.id} cannot supply them (it would need {methods})"
    )


def sample_of(example: Mapping[str, Any]) -> Sample | None:
    """Parse an example with ``messages``, or ``prompt`` and ``completion``; ``None`` where it has neither.

    Raises:
        ValueError: A value is neither a text nor a list of messages, or there is no assistant message to train on.
    """
    if "messages" in example:
        messages = as_messages(example["messages"], "messages", "user")
        start = 0
    elif "prompt" in example and "completion" in example:
        prompt = as_messages(example["prompt"], "prompt", "user")
        messages = [*prompt, *as_messages(example["completion"], "completion", "assistant")]
        start = len(prompt)
    else:
        return None
    if not any(message["role"] == "assistant" for message in messages[start:]):
        raise ValueError("nothing to train on: no message after the prompt is an assistant's")
    return Sample(messages, start)


def pair_of(example: Mapping[str, Any]) -> Pair | None:
    """Parse an example with ``chosen`` and ``rejected``, maybe ``prompt``; ``None`` where it has no pair.

    Raises:
        ValueError: The answers are not one assistant message each, or are the same.
    """
    if "chosen" not in example or "rejected" not in example:
        return None
    chosen = as_messages(example["chosen"], "chosen", "assistant")
    rejected = as_messages(example["rejected"], "rejected", "assistant")
    prompt = as_messages(example["prompt"], "prompt", "user") if "prompt" in example else _common(chosen, rejected)
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
    """Returns a text as one message of ``role``, and a list of messages unchanged.

    Raises:
        ValueError: ``value`` is neither a text nor a list of messages.
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
    """Returns a text as an assistant message."""
    return {"role": "assistant", "content": text}
