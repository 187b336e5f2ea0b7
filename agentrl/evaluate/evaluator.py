"""Runs episodes on the validation tasks, within a training run or alone.

Guarantees: every validation task is attempted ``eval.samples`` times; failed episodes are counted as invalid,
separately from wrong answers; each episode is written to the journal as it ends, and those of ``judged`` are not run
again. As many abandoned episodes that still run as ``rollout.max_concurrent`` end the evaluation, and so does a client
with which none can succeed any more.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from agentrl.config.recipe import Recipe
from agentrl.core.episode import Episode, StopReason, Task
from agentrl.core.valid_text import printable
from agentrl.core.workflow import RolloutWorkflow
from agentrl.data.datasets import LoadedTasks, load_tasks
from agentrl.evaluate.answers import answer_counts
from agentrl.evaluate.judged import Judged
from agentrl.evaluate.metrics import EvalSummary, summarize
from agentrl.evaluate.setup import prompt_of, setup_of
from agentrl.inference.client import EvaluationClient
from agentrl.rollout.episode_runs import EpisodeOrder, EpisodeRuns, InProcess
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.journal import Journal
from agentrl.rollout.stop_rules import too_many

MOST_TRIES = 3  # of an episode whose worker processes were lost


class Evaluator:
    """Runs the recipe's validation tasks.

    Args:
        recipe: Resolved recipe; ``valid_dataset`` names the tasks, ``eval`` how many of them and how often.
        workflow: Workflow shared by all episodes.
        client: Client that opens a session for each episode.
        journal: Journal that episodes are written to.
        loaded: The validation tasks, if they were loaded before.
        runs: Where episodes run; ``None`` for this process.

    Attributes:
        setup: Set-up of the measurement, see :func:`~agentrl.evaluate.setup.setup_of`.
        judged: Episodes of an earlier evaluation with the same set-up, which are taken as they are.
        ended: Episodes so far.
        prompt: Text of the first prompt; ``None`` for the messages of the first task's episode.
    """

    def __init__(
        self,
        recipe: Recipe,
        workflow: RolloutWorkflow,
        client: EvaluationClient,
        journal: Journal,
        loaded: LoadedTasks | None = None,
        runs: EpisodeRuns | None = None,
    ) -> None:
        loaded = loaded or load_tasks(recipe.valid_dataset, seed=recipe.seed, env=recipe.env)
        self.source = loaded.source
        self.tasks: list[Task] = loaded.tasks[: recipe.eval.tasks] if recipe.eval.tasks else loaded.tasks
        self._recipe = recipe
        self._client = client
        self._journal = journal
        self.on_episode: Callable[[Episode], None] = lambda episode: None
        self.failures: Counter[str] = Counter()
        self._runs = runs or InProcess(workflow, client, recipe.rollout)
        self.setup: dict[str, Any] = setup_of(recipe, self.tasks, self.source)
        self.judged: Judged = {}
        self.ended: list[Episode] = []
        self.prompt: str | None = None

    @property
    def total(self) -> int:
        """Number of episodes of one evaluation."""
        return len(self.tasks) * self._recipe.eval.samples

    @property
    def notes(self) -> list[str]:
        """Notes about the requests, for a person."""
        return self._client.notes

    def as_json(self, summary: EvalSummary) -> dict[str, Any]:
        """Returns an evaluation as JSON.

        It holds its metrics, ``setup`` with the first prompt, ``answers`` (:mod:`agentrl.evaluate.answers`), ``notes``
        of the client, and ``per_task`` for a later comparison.
        """
        first = [one for one in self.ended if one.task_id == self.tasks[0].id and one.index == 0]
        prompt = self.prompt or (prompt_of(first[-1]) if first else [])
        return {
            **summary.as_metrics(),
            "setup": {**self.setup, "prompt": prompt},
            "answers": answer_counts(self.ended),
            "notes": self.notes,
            "per_task": summary.per_task,
        }

    async def run(self, version: int) -> EvalSummary:
        """Attempt every task and summarize the episodes; ``version`` labels them.

        Raises:
            RolloutError: Too many abandoned episodes still run, or no further episode can succeed.
        """
        self.ended = []
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
        known = self.judged.get((f"eval{version}-{number}", index))
        if known is not None:
            self._ends(known)
            return known
        async with places:
            episode = await self._run(task, f"eval{version}-{number}", index, number, version)
        episode = self._journal.episode(episode, evaluation_step=version)
        if episode.failed:
            self.failures[printable(f"{episode.stop_reason}: {(episode.error or 'no reward').strip()}")] += 1
        self._ends(episode)
        reason = self._client.problem or too_many(self._runs.abandoned, rollout)
        if reason:
            raise RolloutError(reason)
        return episode

    async def _run(self, task: Task, group_id: str, index: int, number: int, version: int) -> Episode:
        """Runs an episode, and again if the process that ran it was lost."""
        seed = number * self._recipe.eval.samples + index
        attempt = 0
        while True:
            episode = await self._runs.run(EpisodeOrder(task, group_id, index, seed, version, attempt, evaluation=True))
            attempt += 1
            if episode.stop_reason is not StopReason.WORKER_LOST or attempt == MOST_TRIES:
                return episode

    def _ends(self, episode: Episode) -> None:
        self.ended.append(episode)
        self.on_episode(episode)
