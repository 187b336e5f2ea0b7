"""Runs episodes on the validation tasks, within a training run or alone.

Guarantees: every validation task is attempted ``eval.samples`` times, in order, until a rule of
:mod:`agentrl.evaluate.ends` ends the evaluation; then no attempt begins and those that run are finished. Failed
episodes are counted as invalid, separately from wrong answers; each episode is written to the journal as it ends, and
those of ``judged`` are not run again. As many abandoned episodes that still run as ``rollout.max_concurrent`` end the
evaluation, and so does a client with which none can succeed any more. With ``keep=False`` memory does not grow with the
number of tasks, beside the tasks themselves.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from agentrl.config.recipe import Recipe
from agentrl.core.episode import Episode, Message, StopReason, Task
from agentrl.core.valid_text import printable
from agentrl.core.workflow import RolloutWorkflow
from agentrl.data.datasets import LoadedTasks, load_tasks
from agentrl.evaluate.answers import Kind, count_answers
from agentrl.evaluate.ends import Ends, check_budget
from agentrl.evaluate.judged import Judged
from agentrl.evaluate.metrics import EvalSummary, PerTask, summary_of
from agentrl.evaluate.prices import price_of
from agentrl.evaluate.setup import digest, prompt_of, setup_of
from agentrl.evaluate.tally import Row, Tally, TaskScores
from agentrl.inference.client import EvaluationClient
from agentrl.rollout.episode_runs import EpisodeOrder, EpisodeRuns, InProcess
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.journal import Journal
from agentrl.rollout.stop_rules import too_many

MOST_TRIES = 3  # of an episode whose worker processes were lost
_MOST_FAILURES = 1000  # texts of failures that are told apart


class Evaluator:
    """Runs the recipe's validation tasks.

    Args:
        recipe: Resolved recipe; ``valid_dataset`` names the tasks, ``eval`` how many of them and how often.
        workflow: Workflow shared by all episodes.
        client: Client that opens a session for each episode.
        journal: Journal that episodes are written to.
        loaded: The validation tasks, if they were loaded before.
        runs: Where episodes run; ``None`` for this process.
        keep: Whether to keep the episodes, and the scores by task, in memory.

    Attributes:
        setup: Set-up of the measurement, see :func:`~agentrl.evaluate.setup.setup_of`.
        judged: Episodes of an earlier evaluation with the same set-up, which are taken as they are.
        ended: Episodes so far, if they are kept.
        done: Number of episodes so far.
        prompt: Text of the first prompt; ``None`` for the messages of the first task's episode.
        ends: Rules that end the evaluation before its last task.
        on_task: Called with the scores of each task whose samples have all ended.
        wanted: Function of the number of a task and the index of a sample that says whether it is attempted.
    """

    def __init__(
        self,
        recipe: Recipe,
        workflow: RolloutWorkflow,
        client: EvaluationClient,
        journal: Journal,
        loaded: LoadedTasks | None = None,
        runs: EpisodeRuns | None = None,
        *,
        keep: bool = True,
    ) -> None:
        loaded = loaded or load_tasks(recipe.valid_dataset, seed=recipe.seed, env=recipe.env)
        self.source = loaded.source
        self.tasks: Sequence[Task] = loaded.tasks[: recipe.eval.tasks] if recipe.eval.tasks else loaded.tasks
        self._recipe = recipe
        self._client = client
        self._journal = journal
        self._keep = keep
        self.on_episode: Callable[[Episode], None] = lambda episode: None
        self.on_task: Callable[[TaskScores], None] = lambda task: None
        self.wanted: Callable[[int, int], bool] = lambda number, index: True
        self.failures: Counter[str] = Counter()
        self._runs = runs or InProcess(workflow, client, recipe.rollout)
        self.setup: dict[str, Any] = setup_of(recipe, self.tasks, self.source)
        self.judged: Judged | None = None
        self.prompt: str | None = None
        self.price = price_of(self.setup["model"], recipe.eval.price)
        check_budget(recipe.eval, self.setup["model"], has_price=self.price is not None)
        self._begin()

    def _begin(self) -> None:
        self.ended: list[Episode] = []
        self.done = 0
        self.answers: Counter[str] = Counter({"all": 0, **{kind.value: 0 for kind in Kind}})
        self.tally = Tally(self._recipe.eval.samples, self.price, self._task_ends)
        self.ends = Ends(self._recipe.eval, len(self.tasks))
        self._per_task = PerTask()
        self._numbers: dict[str, tuple[int, str]] = {}  # and digests, of the tasks that are running, by id
        self._prompt: list[Message] = []

    @property
    def total(self) -> int:
        """Number of episodes of one evaluation."""
        return len(self.tasks) * self._recipe.eval.samples

    @property
    def notes(self) -> list[str]:
        """Notes about the requests, for a person."""
        return self._client.notes

    @property
    def ended_early(self) -> str:
        """Why the evaluation ended before its last episode, a sentence; empty if it did not."""
        return self.ends.reason if self.done < self.total else ""

    def summary(self) -> EvalSummary:
        """Returns the summary of the episodes so far."""
        return self.ends.adjusted(summary_of(self.tally.copy_closed(), self._per_task.values))

    def as_json(self, summary: EvalSummary) -> dict[str, Any]:
        """Returns an evaluation as JSON.

        It holds its metrics, ``setup`` with the first prompt, ``answers`` (:mod:`agentrl.evaluate.answers`), ``notes``
        of the client, ``tags`` with the metrics of each tag, ``ended`` with the reason of an early end, and
        ``per_task`` for a later comparison where it is kept.
        """
        return {
            **summary.all_metrics(),
            "setup": {**self.setup, "prompt": self.prompt or self._prompt},
            "answers": dict(self.answers),
            "failures": dict(self.failures),
            "notes": self.notes,
            "tags": {tag: one.all_metrics() for tag, one in summary.tags.items()},
            "ended": self.ended_early,
            **self.ends.as_json(),
            **({"per_task": summary.per_task} if self._keep else {}),
        }

    async def run(self, version: int) -> EvalSummary:
        """Attempt every task and summarize the episodes; ``version`` labels them.

        Raises:
            RolloutError: Too many abandoned episodes still run, or no further episode can succeed.
        """
        self._begin()
        if self.judged is not None:
            self.ends.spent_before(self.judged.lost, self.price)
        attempts = self._attempts()
        places = min(self._recipe.rollout.max_concurrent, self.total)
        workers = [asyncio.create_task(self._work(attempts, version)) for _ in range(places)]
        try:
            await asyncio.gather(*workers)
            self.tally.close()
            return self.ends.adjusted(summary_of(self.tally, self._per_task.values))
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    def _attempts(self) -> Iterator[tuple[int, Task, int]]:
        """Yields number, task and index of each sample, until a rule ends the evaluation."""
        for number, task in enumerate(self.tasks):
            self._numbers[task.id] = number, digest([task])
            for index in range(self._recipe.eval.samples):
                if self.ends.reason and index == 0:  # a task that was begun gets all its samples
                    return
                if self.wanted(number, index):
                    yield number, task, index

    async def _work(self, attempts: Iterator[tuple[int, Task, int]], version: int) -> None:
        for number, task, index in attempts:
            known = self.judged.get(version, number, index) if self.judged is not None else None
            if known is not None:
                self._ends(known, number)
                await asyncio.sleep(0)  # a resume reads many: others may work in between
            else:
                await self._attempt(version, number, task, index)

    async def _attempt(self, version: int, number: int, task: Task, index: int) -> None:
        rollout = self._recipe.rollout
        self.ends.begins()
        episode = await self._run(task, f"eval{version}-{number}", index, number, version)
        episode = self._journal.episode(episode, evaluation_step=version)
        self.ends.left()
        self._ends(episode, number)
        reason = self._client.problem or too_many(self._runs.abandoned, rollout)
        if reason:
            raise RolloutError(reason)

    async def _run(self, task: Task, group_id: str, index: int, number: int, version: int) -> Episode:
        """Runs an episode, and again if the process that ran it was lost."""
        seed = number * self._recipe.eval.samples + index
        attempt = 0
        while True:
            episode = await self._runs.run(EpisodeOrder(task, group_id, index, seed, version, attempt, evaluation=True))
            attempt += 1
            if episode.stop_reason is not StopReason.WORKER_LOST or attempt == MOST_TRIES:
                return episode

    def _ends(self, episode: Episode, number: int) -> None:
        if episode.failed:
            text = printable(f"{episode.stop_reason}: {(episode.error or 'no reward').strip()}")
            known = text in self.failures or len(self.failures) < _MOST_FAILURES
            self.failures[text if known else f"{episode.stop_reason}: other errors"] += 1
        if self._keep:
            self.ended.append(episode)
        self.done += 1
        if number == 0 and episode.index == 0:
            self._prompt = prompt_of(episode)
        count_answers(episode, self.answers)
        row: Row = self.tally.add(episode)
        self.ends.episode(row)
        self.on_episode(episode)

    def _task_ends(self, task: TaskScores) -> None:
        number, digits = self._numbers.pop(task.task)
        task = replace(task, digest=digits)
        self.ends.task(number, task)
        if self._keep:
            self._per_task.add(task)
        self.on_task(task)
