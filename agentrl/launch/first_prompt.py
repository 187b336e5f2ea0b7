"""Renders a run's first prompt, before its servers are started.

Guarantees: the workflow runs as in an episode, with a copy of the first task, up to its first request. That reaches no
server: the episode is cancelled there. Environment and agent are the recipe's own, so what is found is what the model
will be told. A prompt that the chat template would not render whole raises, and so does one with an image for a model
that takes none, and one that does not fit the context, if those of :data:`TRIED` further tasks do not either; whatever
else goes wrong is returned as a sentence, because the run may still be right. What does not block the event loop is
waited for no longer than :data:`LIMIT` and the limit of its teardown.
"""

import asyncio
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.errors import UserError
from agentrl.config.recipe import Recipe
from agentrl.core.agent import ContextOverflow
from agentrl.core.episode import Task
from agentrl.core.message_shape import ImageRefused
from agentrl.core.workflow import RolloutWorkflow
from agentrl.data.datasets import load_tasks
from agentrl.inference.backend import Generation, SamplingParams
from agentrl.inference.client import EpisodeLLM
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.models.folder_check import embedding_rows, tokens_without_row, too_many_tokens
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.assemble import make_settings, make_workflow
from agentrl.rollout.deadline import Limits, within

LIMIT = 20.0  # seconds; an environment's reset may start containers
TRIED = 7  # further tasks, spread over all, when the first one's prompt does not fit
SHOWN = 300  # characters at each end of a prompt
PERSISTENT = 10  # cancellations of an agent that catches them and asks again


class PromptError(UserError):
    """The model would not be told what the environment or the agent says."""


@dataclass(frozen=True)
class FirstPrompt:
    """The first prompt of a run.

    Attributes:
        token_ids: Ids of the prompt, ``[tokens]``; empty if there is none.
        text: Text of the prompt, special tokens included.
        problem: Why there is no prompt, as a sentence; empty if there is one.
        too_long: Whether that is because it does not fit the context.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    problem: str = ""
    too_long: bool = False

    def lines(self) -> list[str]:
        """Returns what a person is shown."""
        if self.problem:
            return [f"prompt     not tried: {self.problem}"]
        return [f"prompt     {len(self.token_ids)} tokens: {shortened(self.text)!r}"]


def shortened(text: str) -> str:
    """Returns the beginning and the end of a long prompt."""
    return text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]} ... {text[-SHOWN:]}"


class _NoServer:
    """A server that samples nothing: it keeps the first prompt that it is sent, and cancels the episode.

    A cancellation ends task groups, threads and teardowns as the end of a run does, where an exception could be caught.

    Attributes:
        prompt: Ids of the first request; empty before it.
        episode: Task to cancel.
    """

    url = "no server"

    def __init__(self) -> None:
        self.prompt: tuple[int, ...] = ()
        self.episode: asyncio.Task[Any] | None = None
        self._waiting: set[asyncio.Task[Any]] = set()
        self._calls = 0

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        """Keeps the prompt and ends the episode."""
        self.prompt = self.prompt or tuple(token_ids)
        self._calls += 1
        if self.episode is not None and self._calls <= PERSISTENT:
            self.episode.cancel()
        waiting = asyncio.current_task()
        if waiting is not None:
            self._waiting.add(waiting)
            waiting.add_done_callback(self._waiting.discard)
        await asyncio.Event().wait()  # until the cancellation
        raise AssertionError("the event is never set")

    def leave(self) -> None:
        """Cancels the requests that tasks beside the episode still wait for, e.g. those of a thread."""
        for task in tuple(self._waiting):
            task.cancel()


async def check_prompt(recipe: Recipe, model: Path) -> FirstPrompt:
    """Renders the first prompt of a run or an evaluation, from its recipe; see :func:`first_prompt`."""
    training = recipe.trainer.type is not None
    dataset = recipe.train_dataset if training else recipe.valid_dataset
    tasks = load_tasks(dataset, seed=recipe.seed, env=recipe.env).tasks
    return await first_prompt(recipe, model, make_workflow(recipe), tasks)


async def first_prompt(recipe: Recipe, model: Path, workflow: RolloutWorkflow, tasks: Sequence[Task]) -> FirstPrompt:
    """Renders the prompt of a recipe's first task.

    Args:
        recipe: Recipe with an environment and servers that return token ids.
        model: Model folder with the tokenizer.
        workflow: The recipe's workflow.
        tasks: Tasks of the recipe; others than the first are tried if its prompt does not fit.

    Raises:
        PromptError: The chat template cannot be used, or leaves out a part of the prompt, or no prompt fits.
    """
    try:
        template, locked, free = make_settings(recipe, model)
    except TemplateError as error:
        raise PromptError(f"model {recipe.model.name}: {error}") from error
    rows = embedding_rows(model)
    _check_vocabulary(recipe, template, rows)
    settings = locked if recipe.trainer.type is not None else free
    first = await _prompt(recipe, workflow, tasks[0], template, settings)
    if beyond := [one for one in first.token_ids if rows is not None and one >= rows]:
        token = template.text(beyond[:1], special=True)
        raise PromptError(
            f"model {recipe.model.name}: the first prompt holds {token!r} (id {beyond[0]}), and the model's embedding "
            f"has {rows} rows: take another chat template (model.chat_template)"
        )
    if not first.too_long:
        return first
    others = tasks[1 :: max(1, len(tasks) // TRIED)][:TRIED]
    for task in others:
        if not (await _prompt(recipe, workflow, task, template, settings)).too_long:
            return first
    told = f", nor does that of {len(others)} other tasks" if others else ""
    raise PromptError(f"{first.problem}{told}: set inference.context_length higher, or shorten the prompt")


def _check_vocabulary(recipe: Recipe, template: ChatTemplate, rows: int | None) -> None:
    """Refuses a tokenizer that encodes ordinary text to ids that the model does not know.

    Raises:
        PromptError: There are such ids.
    """
    ordinary = tokens_without_row(template.tokenizer, rows)[0] if rows is not None else []
    if ordinary and rows is not None:
        raise PromptError(f"model {recipe.model.name}: {too_many_tokens(ordinary, rows)}")


async def _prompt(
    recipe: Recipe, workflow: RolloutWorkflow, task: Task, template: ChatTemplate, settings: SessionSettings
) -> FirstPrompt:
    server = _NoServer()
    limits = Limits(LIMIT, recipe.rollout.close_timeout)
    own = deepcopy(task)  # the run's first episodes get it as it was loaded
    ended = await within(limits, _until_reached(workflow, own, server, template, settings), Abandoned())
    server.leave()
    problem, too_long = f"task {task.id}: no request to the model within {LIMIT:g} s", False
    if ended.job.done() and not ended.job.cancelled():
        try:
            problem, too_long = ended.job.result()
        except (TemplateError, ImageRefused) as error:
            raise PromptError(f"model {recipe.model.name}: {error}") from error
    if server.prompt:
        return FirstPrompt(server.prompt, template.text(list(server.prompt), special=True))
    return FirstPrompt(problem=problem, too_long=too_long)


async def _until_reached(
    workflow: RolloutWorkflow, task: Task, server: _NoServer, template: ChatTemplate, settings: SessionSettings
) -> tuple[str, bool]:
    """Runs an episode up to its first request; returns why it did not come so far, and whether it did not fit."""
    llm = EpisodeLLM(lambda role: ChatSession(server, template, settings, role))
    server.episode = episode = asyncio.current_task()
    try:
        await workflow.arun_episode(task, llm, seed=0)
    except (
        Exception,
        BaseExceptionGroup,
        SystemExit,
        asyncio.CancelledError,
    ) as error:  # the episode boundary: user code may raise anything, and the run will say more of it
        refused = _refusal(error)
        if refused is not None:
            raise refused from error
        if (
            isinstance(error, asyncio.CancelledError) and episode is not None and episode.cancelling()
        ):  # at its first request, or too late
            raise
        too_long = isinstance(error, ContextOverflow)
        return f"task {task.id}: {'' if too_long else f'{type(error).__name__}: '}{error}", too_long
    return f"task {task.id}: the episode ended without a request to the model", False


def _refusal(error: BaseException) -> TemplateError | ImageRefused | None:
    """Returns the refusal of a prompt that an exception is, or that a group holds."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_refusal, error.exceptions)), None)
    return error if isinstance(error, TemplateError | ImageRefused) else None
