"""Admits draws and runs their groups, from the first episode to the buffer of finished groups.

Guarantees: a group is admitted only while the staleness gate has room, a place is free and it could still be trained;
it is journaled when it is admitted and, unless a step trains it, when it ends; an exception outside its episodes ends
the run, which would otherwise hang. Which groups are kept is decided in :mod:`agentrl.rollout.group_account`.
"""

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from agentrl.config.recipe import Recipe
from agentrl.core.episode import Episode, Task
from agentrl.core.sent_episode import columns_of
from agentrl.rollout.age_bound import AgeBound
from agentrl.rollout.auto_bound import START
from agentrl.rollout.buffer import Group, GroupBuffer
from agentrl.rollout.episode_runs import Cancelled, EpisodeOrder, EpisodeRuns
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.failed_episodes import FailedEpisodes
from agentrl.rollout.group_account import GroupAccount, Tally, judge, least_members
from agentrl.rollout.group_run import GroupRun, member_seed
from agentrl.rollout.in_flight import InFlight
from agentrl.rollout.journal import Journal
from agentrl.rollout.places import Places
from agentrl.rollout.stale_groups import without_stale
from agentrl.rollout.staleness import StalenessGate
from agentrl.rollout.stop_rules import StopRules, too_many
from agentrl.rollout.tasks import TaskStream

log = logging.getLogger(__name__)
CUT_SECONDS = 1.0  # for the teardown of episodes that are cancelled before a batch; then it goes without their groups
Score = Callable[[Episode], Awaitable[Episode]]


class Rollouts:
    """Running groups of the controller.

    Args:
        recipe: Resolved recipe.
        tasks: Stream of training tasks.
        episodes: Where episodes run.
        journal: Journal of episodes and group outcomes.
        score: Adds a teacher's logprobs to a finished episode; ``None`` without a teacher.
        failed: Takes the failed episodes; ``None`` writes none.

    Attributes:
        step: Step that counts the groups that end now.
        gate: Gate of the admission.
        places: Places of running episodes.
        bound: Bound of the ages.
        flight: Running episodes and their ages.
        buffer: Finished groups.
        account: Tallies of the groups that no step has counted yet.
        runs: Running groups by draw.
        spent: Retries of groups that a checkpoint found running, by draw, until they run again.
        served: Set while the servers hold the version that training continues from.
        room: Set when there may be room for another group.
        episodes, score: As given.
    """

    def __init__(
        self,
        recipe: Recipe,
        tasks: TaskStream,
        episodes: EpisodeRuns,
        journal: Journal,
        score: Score | None,
        failed: FailedEpisodes | None,
    ) -> None:
        self._recipe = recipe
        self._config = recipe.rollout
        self._tasks = tasks
        self.episodes = episodes
        self._journal = journal
        self.score = score
        self._failed = failed or FailedEpisodes(None)
        bound = START if self._config.max_staleness == "auto" else self._config.max_staleness
        self.step = 0
        self.gate = StalenessGate(bound, self._config.batch_size)
        self.bound = AgeBound.of(self._config, bound)
        self.flight = InFlight(self.bound, least_members(self._config), lambda: self.gate.version, episodes.ages)
        self.buffer = GroupBuffer(self._fit)
        self.account = GroupAccount()
        self.runs: dict[int, GroupRun] = {}
        self.spent: dict[int, int] = {}
        self.room, self.served = asyncio.Event(), asyncio.Event()
        self.places = Places(self._config.max_concurrent, self._episode_over)
        self.served.set()
        self._rules = StopRules(self._config)
        self._groups: set[asyncio.Task[None]] = set()
        self._admission: asyncio.Task[None] | None = None
        self._over = False  # a stop rule ended the run: no more groups are admitted

    def start(self) -> None:
        """Start to admit draws."""
        self._admission = asyncio.create_task(self._admit(), name="admission")
        self._admission.add_done_callback(self._admission_ended)

    async def _admit(self) -> None:
        await self.served.wait()
        while True:
            while self._has_room() and not self._over and not self._tasks.exhausted:
                draw, task = self._tasks.draw()
                self.gate.start()
                self.places.claim(draw, self._config.group_size + self._config.group_extra)
                self._journal.admitted(
                    draw=draw, task=task.id, seed=member_seed(self._recipe.seed, draw, 0), version=self.gate.version
                )
                job = asyncio.create_task(self._run_group(draw, task), name=f"group-{draw}")
                self._groups.add(job)
                job.add_done_callback(self._group_ended)
            if self._tasks.exhausted and self.gate.running == 0:
                await self.buffer.close()
                return
            self.room.clear()
            await self.room.wait()

    def _has_room(self) -> bool:
        """Whether a group may be started now, and could be trained."""
        return self.gate.capacity() > 0 and self.places.free > 0 and self.bound.may_start(self.gate.version)

    def _episode_over(self) -> None:
        """Has the admission look again, if the place of an episode makes room for a group."""
        if self._has_room():
            self.room.set()

    def _group_ended(self, job: "asyncio.Task[None]") -> None:
        """Forget a finished group; an exception outside its episodes ends the run, which would otherwise hang."""
        self._groups.discard(job)
        self._fail_with(job, "a group failed as a whole")

    def _admission_ended(self, job: "asyncio.Task[None]") -> None:
        """End the run if no more tasks can be drawn because of an exception: it would otherwise hang."""
        self._fail_with(job, "the next task could not be drawn")

    def _fail_with(self, job: "asyncio.Task[None]", what: str) -> None:
        if not job.cancelled() and (error := job.exception()) is not None:
            self.fail(RolloutError(f"{what}:\n" + "".join(traceback.format_exception(error))))

    def fail(self, error: RolloutError) -> None:
        """Make waiting and later calls for a batch fail."""
        log.error("%s", error)
        self._fail_batches(error)

    def _fail_batches(self, error: RolloutError) -> None:
        failing = asyncio.create_task(self.buffer.fail(error))
        self._groups.add(failing)
        failing.add_done_callback(self._groups.discard)

    async def _run_group(self, draw: int, task: Task) -> None:
        play = partial(self._run_episode, draw, task)
        run = self.runs[draw] = GroupRun(self._config, play, self._attempt_ended, self.spent.pop(draw, 0))
        kept = False
        try:
            try:
                kept = await self._group_ended_as(draw, task, run, await run.run())
            finally:
                self.account.oversampled(await run.close())
        finally:
            del self.runs[draw]
            self.flight.forget(draw)
            self.places.forget(draw)
            self.gate.finish(accepted=kept)  # after the put: no group that runs, none that comes
            self.room.set()

    async def _group_ended_as(self, draw: int, task: Task, run: GroupRun, episodes: list[Episode]) -> bool:
        """Judges a group and hands it on; returns whether it is kept."""
        columns = columns_of([episode for episode in episodes if not episode.failed])
        stale = self.bound.stale(columns)
        tally = judge(episodes, self._config, self._recipe.reward, self._recipe.trainer.baseline, stale)
        tally = replace(tally, retried=len(run.retried))
        if run.reason:
            tally = replace(tally, outcome="filtered", reason=run.reason)
        if tally.solve_rate is not None:
            self._tasks.observe(draw, tally.solve_rate)
        if tally.outcome == "kept":
            await self.buffer.put(Group(draw, columns.select([not old for old in stale]), tally))
        else:
            self._leave_out(draw, tally, task.id)
        starved = self.flight.ended(draw, tally)
        self._stop_if(self._rules.check(episodes, tally) or too_many(self.episodes.abandoned, self._config) or starved)
        return tally.outcome == "kept"

    async def cut(self) -> None:
        """End the groups that only the next batch can train, without their slow episodes; call it before the batch."""
        jobs = []
        for draw in self.flight.last_chances():
            self.flight.cut(draw)
            jobs += [job for job in self._groups if job.get_name() == f"group-{draw}"]
        if jobs:
            await asyncio.wait(jobs, timeout=CUT_SECONDS)

    def retries_spent(self) -> list[tuple[int, int]]:
        """Returns the draws of groups that run, or will run again, with their retries if there were any."""
        running = {draw: run.spent for draw, run in self.runs.items()}
        return [(draw, spent) for draw, spent in (self.spent | running).items() if spent]

    def _attempt_ended(self, episode: Episode) -> Episode:
        episode = self._journal.episode(episode)
        self._failed.add(episode)
        self._stop_if(self._rules.note(episode))
        return episode

    def _stop_if(self, reason: str | None) -> None:
        """Ends the run for a stop rule's reason."""
        if reason is not None:
            self._over = True
            self._fail_batches(RolloutError(reason))

    def _leave_out(self, draw: int, tally: Tally, task: str) -> None:
        assert tally.outcome != "kept"
        self.account.leave_out(draw, tally)
        self._journal.group(tally.outcome, draw=draw, task=task, step=self.step, reason=tally.reason)

    def _fit(self, group: Group) -> Group | None:
        """Returns what of a waiting group can still be trained; a group that cannot be leaves room for another."""
        fitted = without_stale(group, self.bound, self._config, self._recipe.reward, self._recipe.trainer.baseline)
        if fitted.tally.outcome == "kept":
            return fitted
        self._leave_out(group.draw, fitted.tally, group.columns.episodes[0].task_id)
        self.gate.withdraw()
        self.room.set()
        return None

    async def _run_episode(self, draw: int, task: Task, index: int, attempt: int, cancelled: Cancelled) -> Episode:
        """Runs an attempt at an episode when there is a place for it.

        One that was cancelled for its age ends as a record, not as cancelled.
        """
        seed = member_seed(self._recipe.seed, draw, index)
        waiting = EpisodeOrder(task, f"g{draw}", index, seed, self.gate.version, attempt)

        async def play(left: Cancelled) -> Episode:
            async with self.places.one(draw, index):
                order = self.flight.begins(draw, waiting)
                return await (self.episodes.run(order, left) if self.score is None else self._scored(order, left))

        return await self.flight.run(draw, waiting, play, cancelled)

    async def _scored(self, order: EpisodeOrder, cancelled: Cancelled) -> Episode:
        episode, score = await self.episodes.run(order, cancelled), self.score
        assert score is not None
        try:
            return await score(episode)
        except asyncio.CancelledError:
            cancelled(episode)
            raise

    async def stop(self) -> int:
        """Cancel all groups at the end of a run and journal so; returns how many no step has counted."""
        await self.close()
        uncounted = self._tasks.state()["owed"]
        for draw in sorted(set(uncounted) - set(self.account.uncounted)):
            task = self._tasks.task(draw).id
            self._journal.group("cancelled", draw=draw, task=task, step=self.step, reason="end of the run")
        return len(uncounted)

    async def close(self) -> None:
        """Cancel the admission and all groups, and wait until they are over."""
        jobs = [*self._groups, *([self._admission] if self._admission else [])]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
