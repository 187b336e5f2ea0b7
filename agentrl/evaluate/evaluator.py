"""Evaluation: episodes on validation tasks, with a trainer around it or without.

Guarantees: every validation task is attempted ``eval.samples`` times; failed episodes are counted as invalid, apart
from wrong ones; episodes are written down as they end.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.core.episode import Episode, Task
from agentrl.core.registry import load
from agentrl.core.workflow import RolloutWorkflow
from agentrl.data.datasets import load_tasks
from agentrl.evaluate.metrics import EvalSummary, summarize
from agentrl.inference.backend import Backend, SamplingParams
from agentrl.inference.client import ChatClient
from agentrl.inference.router import Router
from agentrl.inference.session import SessionSettings
from agentrl.inference.sglang import SGLangBackend
from agentrl.inference.template import ChatTemplate
from agentrl.inference.tool_parsers import PARSERS
from agentrl.inference.vllm import VLLMBackend
from agentrl.rollout.episode_runner import Client, run_episode
from agentrl.rollout.journal import Journal


def make_workflow(recipe: Recipe) -> RolloutWorkflow:
    """The recipe's workflow; the standard one also gets the recipe's environment and agent."""
    workflow = load("workflow", recipe.workflow.id)
    kwargs = dict(recipe.workflow.kwargs)
    if recipe.workflow.id == "agent_env":
        kwargs |= {
            "env": recipe.env.id,
            "env_kwargs": recipe.env.kwargs,
            "agent": recipe.agent.id,
            "agent_kwargs": recipe.agent.kwargs,
            "reward": recipe.reward.id,
            "reward_kwargs": recipe.reward.kwargs,
        }
    elif recipe.reward.id is not None:
        raise ValueError(f"reward.id={recipe.reward.id} works with workflow.id=agent_env, not {recipe.workflow.id}")
    return workflow(**kwargs)


def make_backend(recipe: Recipe, url: str) -> Backend:
    """One server of the recipe's kind."""
    if recipe.inference.engine == "vllm":
        return VLLMBackend(url, recipe.inference.request_timeout)
    return SGLangBackend(url, recipe.inference.request_timeout, embedded=recipe.inference.engine == "embedded")


def make_client(recipe: Recipe, model: Path, urls: list[str]) -> ChatClient:
    """Token-exact chat sessions on servers that speak SGLang's contract.

    Args:
        recipe: For sampling and limits.
        model: Folder with the tokenizer.
        urls: Servers.
    """
    inference, sampling = recipe.inference, recipe.sampling
    router = Router(
        [make_backend(recipe, url) for url in urls],
        probe_seconds=inference.probe_seconds,
        patience=inference.patience,
    )
    template = ChatTemplate.from_folder(
        model,
        source=recipe.model.chat_template,
        policy=inference.history,
        variables=inference.chat_template_kwargs,
    )
    parser = PARSERS[inference.tool_parser] if inference.tool_parser else None
    training = SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )
    evaluation = SamplingParams(max_new_tokens=sampling.max_new_tokens, temperature=sampling.eval_temperature)
    locked = recipe.trainer.type is not None
    name, length = recipe.model.name, inference.context_length
    return ChatClient(
        router,
        template,
        SessionSettings(training, length, locked=locked, model=name, parser=parser),
        SessionSettings(evaluation, length, locked=False, model=name, parser=parser),
    )


class Evaluator:
    """Runs the recipe's validation tasks.

    Args:
        recipe: For ``valid_dataset`` and ``eval``.
        workflow: Shared by all episodes.
        client: Model access.
        journal: Where episodes go.
    """

    def __init__(self, recipe: Recipe, workflow: RolloutWorkflow, client: Client, journal: Journal) -> None:
        loaded = load_tasks(recipe.valid_dataset, seed=recipe.seed, env=recipe.env)
        self.source = loaded.source
        self.tasks: list[Task] = loaded.tasks[: recipe.eval.tasks] if recipe.eval.tasks else loaded.tasks
        self._recipe = recipe
        self._workflow = workflow
        self._client = client
        self._journal = journal
        self.on_episode: Callable[[Episode], None] = lambda episode: None
        self.failures: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Episodes of one evaluation."""
        return len(self.tasks) * self._recipe.eval.samples

    async def run(self, version: int) -> EvalSummary:
        """Attempt every task; ``version`` labels the episodes."""
        places = asyncio.Semaphore(self._recipe.rollout.max_concurrent)

        async def attempt(number: int, task: Task, index: int) -> Episode:
            async with places:
                episode = await run_episode(
                    self._workflow,
                    task,
                    self._client,
                    group_id=f"eval{version}-{number}",
                    index=index,
                    seed=number * self._recipe.eval.samples + index,
                    timeout=self._recipe.rollout.episode_timeout,
                    evaluation=True,
                )
            self._journal.episode(episode, evaluation_step=version)
            if episode.failed:
                self.failures[f"{episode.stop_reason}: {(episode.error or 'no reward').strip()}"] += 1
            self.on_episode(episode)
            return episode

        attempts = [
            attempt(number, task, index)
            for number, task in enumerate(self.tasks)
            for index in range(self._recipe.eval.samples)
        ]
        return summarize(await asyncio.gather(*attempts))
