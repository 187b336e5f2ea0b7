"""The controller: admits tasks, runs episodes, serves batches, pushes weights and runs evaluations.

Guarantees: groups are admitted only while the staleness gate has room; with ``rollout.stale=drop`` no trained episode
is older than ``rollout.max_staleness`` (:mod:`agentrl.rollout.age_bound`), and what cannot be trained any more is
cancelled, journaled and replaced; every admitted group is journaled exactly once; a single failed episode never ends a
run; too many failures do (``rollout.max_failure_rate``), with their reason, too many abandoned episodes that still run,
and too many groups without signal. A draw is settled when a step counts its group; a resumed run trains the finished
groups of its checkpoint and runs all other unsettled ones again, and what the journal says behind the checkpoint is
void there. When the tasks are exhausted, what is left is the last batch, however small. The trainer asks
(:meth:`Controller.ready`) before it publishes a version; unless ``eval.on_push`` lets an evaluation go on beside
training, the servers' version does not change during it, and a push is refused. One evaluation runs at a time, the
final one with no push beside it; no call waits for its end.

Groups run in :mod:`agentrl.rollout.rollouts`; the trainer computes advantages.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from agentrl.config.recipe import Recipe
from agentrl.core.columns import Columns, concatenate
from agentrl.core.weight_manifest import WeightManifest
from agentrl.core.workflow import RolloutWorkflow
from agentrl.inference.client import Client
from agentrl.rollout.auto_bound import AutoBound
from agentrl.rollout.buffer import Group
from agentrl.rollout.episode_runs import EpisodeRuns, InProcess
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.failed_episodes import FailedEpisodes
from agentrl.rollout.held_groups import pack, unpack
from agentrl.rollout.journal import Journal
from agentrl.rollout.journal_lines import Position
from agentrl.rollout.rollout_metrics import batch_metrics
from agentrl.rollout.rollouts import Rollouts, Score
from agentrl.rollout.stale_groups import age_metrics
from agentrl.rollout.step_records import Evaluate, StepRecords, Write
from agentrl.rollout.tasks import TaskStream
from agentrl.weights.transaction import WeightTransaction

log = logging.getLogger(__name__)


class Controller:
    """Rollout controller of one trainer.

    Args:
        recipe: Resolved recipe.
        tasks: Stream of training tasks.
        workflow: Workflow shared by all episodes.
        client: Client that opens a session for each episode.
        weights: Weight transaction of the servers.
        journal: Journal of episodes and group outcomes.
        write_metrics: Called with a step and its metrics.
        evaluate: Evaluates a version and returns its metrics.
        score: Adds a teacher's logprobs to a finished episode; ``None`` without a teacher.
        failed: Takes the failed episodes; ``None`` writes none.
        runs: Where episodes run; ``None`` for this process.
    """

    def __init__(
        self,
        recipe: Recipe,
        tasks: TaskStream,
        workflow: RolloutWorkflow,
        client: Client,
        weights: WeightTransaction,
        journal: Journal,
        write_metrics: Write,
        evaluate: Evaluate,
        score: Score | None = None,
        failed: FailedEpisodes | None = None,
        runs: EpisodeRuns | None = None,
    ) -> None:
        self.recipe = recipe
        self._config = recipe.rollout
        self._tasks = tasks
        self._weights = weights
        self._journal = journal
        self._write_metrics = write_metrics
        self._records = StepRecords(evaluate, self._write_record, lambda error: self.rollouts.fail(error))
        self._owed: dict[str, Any] | None = None  # record of the resumed step, if its evaluation is still missing
        self._final_step: int | None = None
        episodes = runs or InProcess(workflow, client, recipe.rollout)
        self.rollouts = Rollouts(recipe, tasks, episodes, journal, score, failed)
        self._buffer, self._account = self.rollouts.buffer, self.rollouts.account
        self._bound, self._flight = self.rollouts.bound, self.rollouts.flight
        self.gate = self.rollouts.gate
        self._auto = AutoBound() if self._config.max_staleness == "auto" else None
        self._handing = asyncio.Lock()
        self._handed: float | None = None  # time at which the latest batch was handed out
        self._consumed: dict[int, bytes] = {}
        self._told_epochs = 0  # epochs that were over at the latest batch
        self._pending_metrics: dict[str, float] = {}
        self.finished = asyncio.Event()  # the final version is evaluated and recorded
        self.trainer_done = asyncio.Event()
        self.last_beat = time.monotonic()

    def start(self) -> None:
        """Start to admit tasks; a new run also starts to evaluate version 0."""
        if self.gate.version == 0:
            self._records.add(0, {}, evaluate=True)
        self.rollouts.start()

    def restore(self, step: int, saved: bytes, *, recorded: bool = False, evaluated: bool = False) -> None:
        """Continue from the checkpoint after ``step``; call before :meth:`start`.

        Args:
            step: Number of trainer steps done.
            saved: Result of :meth:`checkpoint`.
            recorded: Whether the record of ``step`` was written after the checkpoint.
            evaluated: Whether that record holds the evaluation of its version.

        Raises:
            UserError: The journal or the tasks are not those of the checkpoint.
        """
        groups, state = unpack(saved)
        gone = set(self._tasks.restore(state["tasks"]))
        held = [group for group in groups if group.draw not in gone]
        again = [draw for draw in state["tasks"]["owed"] if draw not in gone]
        kept = [group.draw for group in held] + sorted(gone)
        self._journal.resumed(step, Position(*state["journal"]), again=again, held=kept)
        for draw, task in state["tasks"]["chosen"]:
            if draw in gone:
                reason = "its task is not in the dataset any more"
                self._journal.group("cancelled", draw=draw, task=task, step=step, reason=reason)
        self.rollouts.step, self._told_epochs = step, state["epochs"]
        self.rollouts.spent = dict(state["retries"])
        if self._auto is not None and state["auto"] is not None:
            self._auto = AutoBound.restored(state["auto"])
            self.gate.max_staleness = self._auto.bound
            self._bound.restore(state["age_bound"])
        self._bound.advance(step)
        self._owed = None if recorded else state["unwritten"]
        if evaluated:
            self._records.evaluated = step
        self.gate.recover(step)
        self.gate.accepted += len(held)
        self._buffer.hold(held)
        self.rollouts.served.clear()

    async def next_batch(self, step: int) -> bytes:
        """Returns the batch of trainer step ``step`` as serialized columns; a repeated call returns the same batch.

        Raises:
            RolloutError: Too many episodes failed, or the controller is stopping.
        """
        async with self._handing:  # the same step may be asked for again while it is waited for
            if step not in self._consumed:
                asked = asyncio.get_running_loop().time()
                await self._buffer.filled(self._config.batch_size)
                await self.rollouts.cut()
                groups = await self._buffer.take(self._config.batch_size)
                columns = concatenate([group.columns for group in groups])
                self._consumed = {step: columns.to_bytes(**self._count(step, groups, columns))}
                self._adapt(asked)
            return self._consumed[step]

    def _adapt(self, asked: float) -> None:
        """Note how long the trainer waited, since ``asked``; with ``max_staleness=auto`` the bound follows."""
        now, before = asyncio.get_running_loop().time(), self._handed
        self._handed = now
        if self._auto is None or before is None:
            return
        why = self._auto.observe(now - asked, now - before)
        if why is not None:
            log.warning(
                "rollout.max_staleness=auto: %d instead of %d: %s", self._auto.bound, self.gate.max_staleness, why
            )
            self.gate.max_staleness = self._auto.bound
            self._bound.change(self._auto.bound)
            self.rollouts.room.set()

    def _count(self, step: int, groups: list[Group], columns: Columns) -> dict[str, Any]:
        """Counts the groups of a step, and those that were left out before it; returns what the trainer is told.

        Raises:
            RolloutError: The tasks are exhausted and no group was ever kept.
        """
        done = self._tasks.done
        draws = [*self._account.uncounted, *(group.draw for group in groups)]
        oldest = self._bound.oldest if self._bound.policy == "mask" else None
        if groups:
            self._pending_metrics |= age_metrics(
                self._bound, columns, self._account.dropped(group.tally for group in groups)
            )
            counts = self._account.count(group.tally for group in groups)
            seen, baseline = self.recipe.reward, self.recipe.trainer.baseline
            self._pending_metrics |= counts | batch_metrics(groups, step, seen, baseline, columns)
            if self._tasks.curriculum is not None:
                self._pending_metrics |= self._tasks.curriculum.metrics()
            self._settle(step, groups, draws)
        elif step == 0:
            raise RolloutError(
                f"nothing to train on: all {len(draws)} groups were filtered or failed; {self._account.outcomes()}"
            )
        elif draws:  # not settled: a resumed run draws them again
            log.warning("the tasks are exhausted: no group was kept of the last %d, which no step counts", len(draws))
            self._pending_metrics["rollout/groups_cancelled"] = float(len(draws))
        else:
            log.warning("the tasks are exhausted: no group is left")
        before, self._told_epochs = self._told_epochs, self._tasks.ended_epochs
        last = self._tasks.exhausted and self.gate.running == 0 and not len(self._buffer)
        facts = {"last": last, "done": done, "epochs": self._told_epochs, "epochs_before": before}
        return facts | {"oldest_version": oldest}

    def _settle(self, step: int, groups: list[Group], draws: list[int]) -> None:
        """Marks the draws that a step counts, and journals the groups that it trains."""
        for group in groups:
            task = group.columns.episodes[0].task_id
            self._journal.group("trained", draw=group.draw, task=task, step=step)
        for draw in draws:
            self._tasks.settle(draw)
        self.rollouts.step = step + 1
        self._bound.advance(step + 1)
        self._buffer.sweep()
        self._flight.sweep()

    async def ready(self, seconds: float, *, version: int | None = None, final: bool = False) -> bool:
        """Wait up to ``seconds`` until a new version may be published; returns whether it may.

        Args:
            seconds: Longest wait.
            version: Version to be published; ``None`` asks for the end of the evaluation whatever ``eval.on_push`` is.
            final: Whether it is the final version.

        Raises:
            RolloutError: An evaluation failed.
        """
        beside = version is not None and self._may_go_on(version, final=final)
        return await self._records.settled(0.0 if beside else seconds) or beside

    def _may_go_on(self, version: int, *, final: bool) -> bool:
        """Whether an evaluation that runs may go on while ``version`` is published: it is not evaluated itself."""
        return self.recipe.eval.on_push != "wait" and not self._due(version, final=final)

    def _due(self, version: int, *, final: bool) -> bool:
        every = self.recipe.eval.every
        return final or (every > 0 and version % every == 0)

    @property
    def ending(self) -> bool:
        """Whether the final version is recorded, so that no rollouts go on."""
        return self._final_step is not None

    async def publish(self, manifest: WeightManifest, *, final: bool = False) -> None:
        """Push a version to the servers: a new one, or the one that a resumed trainer starts from.

        The final version ends the rollouts.

        Raises:
            WeightPushError: The servers did not load the version.
            RolloutError: The served version is being evaluated.
        """
        evaluating = self._records.evaluating
        if evaluating is not None and not self._may_go_on(manifest.version, final=final):
            raise RolloutError(f"version {evaluating} is being evaluated: version {manifest.version} has to wait")
        self._pending_metrics |= await self._weights.push(manifest)
        if final:
            self._pending_metrics["rollout/groups_cancelled"] = float(
                await self.rollouts.stop()
            )  # before the gate has room for groups that would never be trained on
        self._flight.sweep()  # what was asked for until now was asked of the old version
        self.gate.version = manifest.version
        self.rollouts.served.set()
        self.rollouts.room.set()
        owed, self._owed = self._owed, None
        if owed is not None:
            self._records.add(owed["step"], owed["metrics"], evaluate=True)

    def record(self, step: int, metrics: Mapping[str, float], *, final: bool) -> None:
        """Record a step after its version was published; evaluate it if due, the final one always.

        A step that turns out to be the final one after it was recorded is evaluated if it was not.
        """
        found, self._pending_metrics = self._pending_metrics | dict(metrics), {}
        if final and step == self._records.evaluated:
            if found:
                self._write_metrics(step, found)
            self.finished.set()
            return
        if final:
            self._final_step = step
        self._records.add(step, found, evaluate=self._due(step, final=final))

    def _write_record(self, step: int, metrics: dict[str, float]) -> None:
        self._write_metrics(step, metrics)
        if step == self._final_step:
            self.finished.set()

    async def members(self) -> dict[str, Any]:
        """Lists the servers that take part in a broadcast, see :meth:`WeightTransaction.members`."""
        return await self._weights.members()

    async def checkpoint(self) -> bytes:
        """Returns what :meth:`restore` continues from: the cut of the journal, of the tasks and of the buffer.

        With the finished groups that no step has trained, the record that waits for its evaluation, and the search for
        the bound with ``max_staleness=auto``. Groups that run, and those that were left out and no step has counted,
        are run again with the same tasks and seeds; those that run also with what is left of their retries.

        Raises:
            RolloutError: The journal cannot be written.
        """
        held = self._buffer.held()
        tasks = self._tasks.state([group.draw for group in held])
        state = {"tasks": tasks, "epochs": self._told_epochs, "unwritten": self._records.unwritten()}
        state |= {"retries": self.rollouts.retries_spent(), "age_bound": self._bound.state()}
        state["auto"] = None if self._auto is None else self._auto.state()
        return pack(held, state | {"journal": await self._journal.cut(self.rollouts.step)})

    def status(self) -> dict[str, Any]:
        """Returns how far the run is, as plain data: steps, groups that run or are finished, a running evaluation."""
        numbers = sorted(self.rollouts.runs)
        return {
            "step": self.rollouts.step,
            "version": self.gate.version,
            "running": self.gate.running,
            "oldest": numbers[0] if numbers else None,
            "finished": len(self._buffer),
            "evaluating": self._records.evaluating,
            "tasks_done": self._tasks.done,
            "idle": self._idle(),
        }

    def _idle(self) -> str:
        """Says what the admission of groups waits for, where none runs."""
        if not self.rollouts.served.is_set():
            return "waits for the version that the resumed trainer starts from"
        if self.ending or self._tasks.exhausted:
            return "waits for the end of the trainer: no further group is needed"
        return "waits for a new version: the bound of the staleness leaves room for no group"

    def heartbeat(self, *, done: bool) -> None:
        """Note that the trainer is alive, or done."""
        self.last_beat = time.monotonic()
        if done:
            self.trainer_done.set()

    async def close(self) -> None:
        """Cancel all groups and evaluations; waiting calls of :meth:`next_batch` fail."""
        await self._buffer.fail(RolloutError("the controller is stopping"))
        await self._records.close()
        await self.rollouts.close()
