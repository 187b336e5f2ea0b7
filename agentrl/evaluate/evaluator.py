"""Runs episodes on the validation tasks, within a training run or alone.

Guarantees: every validation task is attempted ``eval.samples`` times; failed episodes are counted as invalid,
separately from wrong answers; each episode is written to the journal as it ends. As many abandoned episodes that still
run as ``rollout.max_concurrent`` end the evaluation.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from agentrl.config.recipe import Recipe
from agentrl.core.episode import Episode, Task
from agentrl.core.valid_text import printable
from agentrl.core.workflow import RolloutWorkflow
from agentrl.data.datasets import load_tasks
from agentrl.evaluate.metrics import EvalSummary, summarize
from agentrl.inference.client import Client
from agentrl.rollout.abandoned import Abandoned
from agentrl.rollout.deadline import Limits
from agentrl.rollout.episode_runner import run_episode
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.journal import Journal
from agentrl.rollout.stop_rules import too_many


class Evaluator:
    """Runs the recipe's validation tasks.

    Args:
        recipe: Resolved recipe; ``valid_dataset`` names the tasks, ``eval`` how many of them and how often.
        workflow: Workflow shared by all episodes.
        client: Client that opens a session for each episode.
        journal: Journal that episodes are written to.
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
        self._left = Abandoned()

    @property
    def total(self) -> int:
        """Number of episodes of one evaluation."""
        return len(self.tasks) * self._recipe.eval.samples

    @property
    def setup(self) -> dict[str, float]:
        """Numbers that an evaluation's result depends on: its sampling, and how many episodes it is of."""
        sampling = self._recipe.sampling
        return {
            "temperature": sampling.eval_temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "tasks": len(self.tasks),
            "samples": self._recipe.eval.samples,
        }

    def as_json(self, summary: EvalSummary) -> dict[str, Any]:
        """Returns an evaluation as JSON: its metrics, ``setup``, and ``per_task`` for a later comparison."""
        return {**summary.as_metrics(), "setup": self.setup, "per_task": summary.per_task}

    async def run(self, version: int) -> EvalSummary:
        """Attempt every task and summarize the episodes; ``version`` labels them.

        Raises:
            RolloutError: Too many abandoned episodes still run.
        """
        places = asyncio.Semaphore(self._recipe.rollout.max_concurrent)
        attempts = [
            asyncio.create_task(self._attempt(places, version, number, task, index))
            for number, task in enumerate(self.tasks)
            for index in range(self._recipe.eval.samples)
        ]
        try:
            return summarize(await asyncio.gather(*attempts))
        finally:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)

    async def _attempt(self, places: asyncio.Semaphore, version: int, number: int, task: Task, index: int) -> Episode:
        rollout = self._recipe.rollout
        async with places:
            episode = await run_episode(
                self._workflow,
                task,
                self._client,
                group_id=f"eval{version}-{number}",
                index=index,
                seed=number * self._recipe.eval.samples + index,
                limits=Limits.of(rollout),
                left=self._left,
                evaluation=True,
            )
        episode = self._journal.episode(episode, evaluation_step=version)
        if episode.failed:
            self.failures[printable(f"{episode.stop_reason}: {(episode.error or 'no reward').strip()}")] += 1
        self.on_episode(episode)
        reason = too_many(len(self._left), rollout)
        if reason is not None:
            raise RolloutError(reason)
        return episode
