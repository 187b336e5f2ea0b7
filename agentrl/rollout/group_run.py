"""Runs the episodes of one group: retries what the infrastructure failed, and cancels stragglers.

Guarantees: a member's seed depends on the draw and its index alone, so an attempt that is repeated, or run again after
a resume, has the same seed, and no two members share one. Only failures of the infrastructure are tried again
(:data:`~agentrl.core.episode.INFRASTRUCTURE`), at most ``rollout.retries`` times in a group, those before a resume
included. A run ends with the first ``rollout.group_size`` episodes that did not fail, or when no member runs any more.
Its members are all over when :meth:`GroupRun.run` raises (it was cancelled, or a member broke), or
:meth:`GroupRun.close` returns. Every attempt is recorded once.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from agentrl.config.rollout import RolloutConfig
from agentrl.core.episode import INFRASTRUCTURE, Episode, StopReason
from agentrl.inference.random_streams import stream_seed
from agentrl.rollout.abandoned import take_error

RETRY_SECONDS = 0.5  # before the first retry of a member; twice as long before each further one
LONGEST_PAUSE = 30.0
TOO_LATE = "it ended when its group was complete (rollout.group_extra)"

Play = Callable[[int, int, Callable[[Episode], None]], Coroutine[Any, Any, Episode]]
"""Runs a member: its index, the number of earlier attempts, and a function that takes its record if it is cancelled."""


def member_seed(seed: int, draw: int, index: int) -> int:
    """Returns the seed of a group's member.

    The number of the attempt does not enter: what the infrastructure failed is the same episode once more, so a run's
    episodes do not depend on which attempt succeeded, and no seed is preferred.

    Args:
        seed: The recipe's seed.
        draw: Draw of the group.
        index: Position of the episode in its group.
    """
    return stream_seed(seed, draw, index)


@dataclass(frozen=True)
class Oversampled:
    """Lengths of a group's members, to measure what it changes that the slowest ones were cancelled.

    Attributes:
        kept_seconds: Seconds of each trained episode.
        kept_tokens: Sampled tokens of each.
        cancelled_seconds: Seconds of each cancelled member until then.
        cancelled_tokens: Tokens that each of them had sampled, without the answer that it was waiting for.
    """

    kept_seconds: tuple[float, ...]
    kept_tokens: tuple[int, ...]
    cancelled_seconds: tuple[float, ...]
    cancelled_tokens: tuple[int, ...]


class GroupRun:
    """One run of a group.

    Args:
        config: The recipe's rollout section.
        play: Runs a member.
        record: Takes each attempt that ended, and returns it as it was recorded.
        spent: Retries of the group in a run that a checkpoint found unfinished.

    Attributes:
        retried: Attempts that failed and were tried again.
        reason: Why the run was cancelled by :meth:`cancel`; empty if it was not.
    """

    def __init__(self, config: RolloutConfig, play: Play, record: Callable[[Episode], Episode], spent: int = 0) -> None:
        self._config = config
        self._play = play
        self._record = record
        budget = config.group_size if config.retries is None else config.retries
        self._before = spent
        self._retries = max(0, budget - spent) if config.on_failure == "retry" else 0
        self._jobs: dict[int, asyncio.Task[Episode]] = {}
        self._pauses: dict[int, asyncio.TimerHandle] = {}  # before the next attempt of a member
        self._news: list[int] = []  # members that ended, in this order
        self._woken: asyncio.Future[None] | None = None
        self._good: list[Episode] = []
        self._failed: list[Episode] = []
        self._stragglers: list[tuple[float, int]] = []  # seconds and tokens
        self.retried: list[Episode] = []
        self.reason = ""

    async def run(self) -> list[Episode]:
        """Run the members; returns the episodes that count, by index: those that failed too.

        Stragglers are being cancelled when it returns, see :meth:`close`.
        """
        try:
            for index in range(self._config.group_size + self._config.group_extra):
                self._start(index, 0)
            while (self._jobs or self._pauses) and not self._complete:
                await self._next()
                self._take()
        except BaseException:
            self._stop()
            await self._all_over()
            for job in self._jobs.values():
                take_error(job)
            self._jobs.clear()
            raise
        self._stop()
        return sorted([*self._good, *self._failed], key=lambda episode: episode.index)

    def cancel(self, reason: str) -> None:
        """End the run early: its members are cancelled, and :meth:`run` returns those that ended before.

        Args:
            reason: Why, for the journal.
        """
        self.reason = reason
        self._wake()

    async def close(self) -> Oversampled | None:
        """Wait until all stragglers are over, and record them; returns the lengths if there were any."""
        if not self._jobs:
            return None
        await self._all_over()
        for job in self._jobs.values():
            if not job.cancelled():  # it ended in the same moment as the last that the group needed
                self._late(job.result())
        self._jobs.clear()
        return Oversampled(
            tuple(episode.seconds for episode in self._good),
            tuple(episode.sampled_tokens for episode in self._good),
            tuple(seconds for seconds, _ in self._stragglers),
            tuple(tokens for _, tokens in self._stragglers),
        )

    @property
    def spent(self) -> int:
        """Number of the group's retries so far, those before a resume included."""
        return self._before + len(self.retried)

    @property
    def _complete(self) -> bool:
        return bool(self.reason) or len(self._good) >= self._config.group_size

    def _start(self, index: int, attempt: int) -> None:
        self._pauses.pop(index, None)
        job = self._jobs[index] = asyncio.create_task(self._play(index, attempt, self._late))
        job.add_done_callback(lambda _: self._ended(index))

    def _ended(self, index: int) -> None:
        self._news.append(index)
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def _next(self) -> None:
        """Waits until a member has ended, or the run is cancelled."""
        if not self._news and not self.reason:
            self._woken = asyncio.get_running_loop().create_future()
            await self._woken

    def _take(self) -> None:
        """Takes the members that have ended, in this order, as long as the group needs them."""
        news, self._news = self._news, []
        for index in news:
            if self._complete:
                return
            job = self._jobs[index]
            if job.cancelled():
                raise RuntimeError(f"episode {index} of a group was cancelled by something else than its group")
            episode = job.result()
            del self._jobs[index]
            again = episode.stop_reason in INFRASTRUCTURE and len(self.retried) < self._retries
            if again:
                episode = episode.model_copy(update={"retried": True})
            episode = self._record(episode)
            if again:
                self.retried.append(episode)
                pause = min(RETRY_SECONDS * 2**episode.attempt, LONGEST_PAUSE)
                loop = asyncio.get_running_loop()
                self._pauses[index] = loop.call_later(pause, self._start, index, episode.attempt + 1)
            else:
                (self._failed if episode.failed else self._good).append(episode)

    def _late(self, episode: Episode) -> None:
        """Takes the record of a member that the group does not need; none if the whole run ends."""
        if not self._complete:
            return
        if episode.stop_reason is not StopReason.CANCELLED:
            left_out = {"reward": None, "stop_reason": StopReason.CANCELLED, "error": TOO_LATE}
            episode = episode.model_copy(update=left_out)
        self._stragglers.append((episode.seconds, episode.sampled_tokens))
        self._record(episode)

    def _stop(self) -> None:
        """Cancels what still runs or waits."""
        for pause in self._pauses.values():
            pause.cancel()
        self._pauses.clear()
        for job in self._jobs.values():
            if not job.cancelling():  # else the end of the process did it; a second time would cut its teardown
                job.cancel()

    async def _all_over(self) -> None:
        """Waits for the members that were cancelled; each has a limit of its own, so the end of the run waits too."""
        if not self._jobs:
            return
        try:
            await asyncio.wait(self._jobs.values())
        except asyncio.CancelledError:
            await asyncio.wait(self._jobs.values())
            raise
