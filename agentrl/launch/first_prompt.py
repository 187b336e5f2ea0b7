"""Renders a run's first prompt, before its servers are started.

Guarantees: the workflow runs as in an episode, with the first task, up to its first request, which reaches no server;
environment and agent are the recipe's own, so what is found is what the model will be told. A prompt that the chat
template would not render whole raises; whatever else goes wrong is returned as a sentence, because the run may still be
right. What does not block the event loop is waited for no longer than :data:`LIMIT` and the limit of its teardown.
"""

from dataclasses import dataclass
from pathlib import Path

from agentrl.config.errors import UserError
from agentrl.config.recipe import Recipe
from agentrl.core.agent import ContextOverflow
from agentrl.core.episode import Task
from agentrl.core.workflow import RolloutWorkflow
from agentrl.data.datasets import load_tasks
from agentrl.inference.backend import Generation, SamplingParams
from agentrl.inference.client import EpisodeLLM
from agentrl.inference.session import ChatSession, SessionSettings
from agentrl.inference.template import ChatTemplate, TemplateError
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.assemble import make_settings, make_workflow
from agentrl.rollout.deadline import Limits, within

LIMIT = 20.0  # seconds; an environment's reset may start containers
SHOWN = 300  # characters at each end of a prompt


class PromptError(UserError):
    """The model would not be told what the environment or the agent says."""


@dataclass(frozen=True)
class FirstPrompt:
    """The first prompt of a run.

    Attributes:
        token_ids: Its ids, ``[tokens]``; empty if there is none.
        text: Its text, special tokens included.
        problem: Why there is no prompt, as a sentence; empty if there is one.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    problem: str = ""

    def lines(self) -> list[str]:
        """Returns what a person is shown."""
        if self.problem:
            return [f"prompt     not tried: {self.problem}"]
        text = self.text if len(self.text) <= 2 * SHOWN else f"{self.text[:SHOWN]} ... {self.text[-SHOWN:]}"
        return [f"prompt     {len(self.token_ids)} tokens: {text!r}"]


class _Reached(BaseException):
    """Ends the workflow at its first request; no ``except Exception`` of an agent catches it."""


class _NoServer:
    """A server that samples nothing and keeps the prompt that it was sent."""

    url = "no server"
    prompt: tuple[int, ...] = ()

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        """Keeps the prompt and ends the episode."""
        self.prompt = tuple(token_ids)
        raise _Reached


async def check_prompt(recipe: Recipe, model: Path) -> FirstPrompt:
    """Renders the first prompt of a run or an evaluation, from its recipe; see :func:`first_prompt`."""
    training = recipe.trainer.type is not None
    dataset = recipe.train_dataset if training else recipe.valid_dataset
    task = load_tasks(dataset, seed=recipe.seed, env=recipe.env).tasks[0]
    return await first_prompt(recipe, model, make_workflow(recipe), task)


async def first_prompt(recipe: Recipe, model: Path, workflow: RolloutWorkflow, task: Task) -> FirstPrompt:
    """Renders the prompt of a recipe's task.

    Args:
        recipe: Recipe with an environment and servers that return token ids.
        model: Model folder with the tokenizer.
        workflow: The recipe's workflow.
        task: Task to begin.

    Raises:
        PromptError: The chat template cannot be used, or leaves out a part of the prompt.
    """
    server = _NoServer()
    try:
        template, locked, free = make_settings(recipe, model)
    except TemplateError as error:
        raise PromptError(f"model {recipe.model.name}: {error}") from error
    settings = locked if recipe.trainer.type is not None else free
    limits = Limits(LIMIT, recipe.rollout.close_timeout)
    ended = await within(limits, _until_reached(workflow, task, server, template, settings), Abandoned())
    problem = f"task {task.id}: no request to the model within {LIMIT:g} s"
    if not ended.overdue:
        try:
            problem = ended.job.result()
        except TemplateError as error:
            raise PromptError(f"model {recipe.model.name}: {error}") from error
    return FirstPrompt(server.prompt, template.text(list(server.prompt), special=True), problem)


async def _until_reached(
    workflow: RolloutWorkflow, task: Task, server: _NoServer, template: ChatTemplate, settings: SessionSettings
) -> str:
    """Runs an episode up to its first request; returns why it did not come so far, or an empty text."""
    llm = EpisodeLLM(lambda role: ChatSession(server, template, settings, role))
    try:
        await workflow.arun_episode(task, llm, seed=0)
    except _Reached:
        return ""
    except TemplateError:
        raise
    except ContextOverflow as error:
        return f"task {task.id}: {error}"
    except (
        Exception,
        SystemExit,
    ) as error:  # the episode boundary: user code may raise anything, and the run will say more of it
        return f"task {task.id}: {type(error).__name__}: {error}"
    return f"task {task.id}: the episode ended without a request to the model"
