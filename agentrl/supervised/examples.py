"""Reads a dataset's examples as conversations (SFT) or preference pairs (reward models, DPO).

Guarantees: what an example says is taken unchanged, in every shape that ``openai``'s types have for it
(:mod:`agentrl.core.message_shape`), or refused with its position and the accepted formats; columns that are not read
are told or refused (:mod:`agentrl.supervised.fields`). Where examples hold tasks without texts, the environment
supplies the texts, with the prompt that an agent gets in it; the same recipe gives the same examples in the same order.
Nothing here needs torch.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from agentrl.config.errors import DataError
from agentrl.config.recipe import DatasetConfig, Recipe
from agentrl.config.supervised import NO_ENV, evaluates
from agentrl.core.episode import Message, Task
from agentrl.core.message_shape import arguments_object, in_shape
from agentrl.core.registry import registered
from agentrl.data.datasets import load_tasks
from agentrl.envkit.language import SingleTurnEnvironment
from agentrl.envkit.make import discard, make
from agentrl.supervised.fields import refuse_unread, refuse_weight, tools_of

_ROLES = ("system", "developer", "user", "assistant", "tool")
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
        tools: Tools of the conversation, rendered into the prompt.
    """

    messages: list[Message]
    start: int
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt.

    Attributes:
        prompt: The messages before the answer.
        chosen: The better answer, an assistant message.
        rejected: The worse answer, an assistant message.
        tools: Tools of the conversation, rendered into the prompt.
    """

    prompt: list[Message]
    chosen: Message
    rejected: Message
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class LoadedExamples:
    """The examples of one dataset section.

    Attributes:
        examples: Samples for ``trainer.type=sft``, else pairs.
        source: Sentence that says where the examples come from, and which columns nothing reads.
    """

    examples: list[Sample | Pair]
    source: str


def load_examples(recipe: Recipe, section: DatasetConfig) -> LoadedExamples:
    """Load the examples of a dataset section, in the form that ``trainer.type`` needs.

    Raises:
        DataError: The dataset is not found, or an example lacks a text that is needed.
    """
    loaded = load_tasks(named(section), seed=recipe.seed, env=recipe.env, for_env=False)
    pairs = recipe.trainer.type != "sft"
    env = None if recipe.env.id == NO_ENV else make(recipe.env.id, **recipe.env.kwargs)
    try:
        read = (_reader_of_pairs if pairs else _reader_of_samples)(recipe, env)
        examples = [_at(task, section, read) for task in loaded.tasks]
    finally:
        if env is not None:
            discard(env)
    unread = sorted({name for task in loaded.tasks for name in unread_columns(task.data, pairs=pairs)})
    told = f"; columns that nothing reads: {', '.join(unread)}" if unread else ""
    return LoadedExamples(examples, loaded.source + told)


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


def unread_columns(example: Mapping[str, Any], *, pairs: bool) -> list[str]:
    """Returns the columns of an example that are not read; none where the environment supplies the texts."""
    read = _columns_read(example, pairs=pairs)
    return [name for name in example if name not in read] if read else []


def _columns_read(example: Mapping[str, Any], *, pairs: bool) -> tuple[str, ...]:
    if pairs:
        return ("prompt", "chosen", "rejected", "tools") if "chosen" in example and "rejected" in example else ()
    if "messages" in example:
        return ("messages", "tools")
    return ("prompt", "completion", "tools") if "prompt" in example and "completion" in example else ()


def sample_of(example: Mapping[str, Any]) -> Sample | None:
    """Parse an example with ``messages``, or ``prompt`` and ``completion``; ``None`` where it has neither.

    Raises:
        ValueError: A value is neither a text nor a list of messages, or there is no assistant message to train on.
    """
    read = _columns_read(example, pairs=False)
    if not read:
        return None
    refuse_unread(example, read)
    if "messages" in read:
        messages = as_messages(example["messages"], "messages", "user")
        start = 0
    else:
        prompt = as_messages(example["prompt"], "prompt", "user")
        messages = [*prompt, *as_messages(example["completion"], "completion", "assistant")]
        start = len(prompt)
    if not any(message["role"] == "assistant" for message in messages[start:]):
        raise ValueError("nothing to train on: no message after the prompt is an assistant's")
    return Sample(messages, start, tools_of(example))


def pair_of(example: Mapping[str, Any]) -> Pair | None:
    """Parse an example with ``chosen`` and ``rejected``, maybe ``prompt``; ``None`` where it has no pair.

    Raises:
        ValueError: The answers are not one assistant message each, or are the same.
    """
    read = _columns_read(example, pairs=True)
    if not read:
        return None
    refuse_unread(example, read)
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
    return Pair(prompt, answers[0], answers[1], tools_of(example))


def _common(chosen: Sequence[Message], rejected: Sequence[Message]) -> list[Message]:
    found: list[Message] = []
    for one, other in zip(chosen[:-1], rejected[:-1], strict=False):
        if one != other:
            break
        found.append(one)
    return found


def as_messages(value: object, name: str, role: str) -> list[Message]:
    """Returns a text as one message of ``role``, and a list of messages in the one shape.

    Raises:
        ValueError: ``value`` is neither a text nor a list of messages, or a message cannot be learned from.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise ValueError(f"{name} is {type(value).__name__}, want a text or a list of messages")
    return [_message(part, name) for part in value]


def _message(given: object, name: str) -> Message:
    try:
        message = in_shape(dict(given) if isinstance(given, Mapping) else given)
    except (TypeError, ValueError) as error:
        wanted = f"want a role ({', '.join(_ROLES)}) and a text as content"
        raise ValueError(f"{name} has {str(given)[:80]}, {wanted}: {error}") from error
    if message["role"] not in _ROLES:
        raise ValueError(f"{name} has {str(given)[:80]}, want a role ({', '.join(_ROLES)}) and a text as content")
    refuse_weight(message)
    message.pop("weight", None)
    calls = message.get("tool_calls", [])
    if message["role"] == "assistant" and not message["content"] and not calls:
        _refuse_silence(given, name)
    for function in (call["function"] for call in calls):
        if arguments_object(function["arguments"]) is None:
            raise ValueError(
                f"{name} has a call of {function['name']!r} whose arguments are not a JSON object: "
                f"{function['arguments'][:80]!r}"
            )
    return message


def _refuse_silence(given: object, name: str) -> None:
    """Refuses an answer that says nothing at all; an empty text is an answer."""
    if not isinstance(given, Mapping) or given.get("content") is None:
        raise ValueError(f"{name} has {str(given)[:80]}, an answer with neither content nor tool_calls")


def answer(text: str) -> Message:
    """Returns a text as an assistant message."""
    return {"role": "assistant", "content": text}
