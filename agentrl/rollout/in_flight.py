"""Ends running episodes that have become too old to be trained.

Guarantees: an episode is cancelled as soon as it is known that no step can train it any more
(:mod:`agentrl.rollout.age_bound`), the others of its group too when fewer are left than a group needs; it ends as a
record with the stop reason ``stale`` and what it had sampled, after the teardown of any cancelled episode. Cancelling
it ends its requests, and its server is told. A cancellation from outside goes through unchanged. When a batch is handed
out, the slow episodes of a group whose other ones no later batch could train are cancelled, so that these are trained.

How old a running episode is says the place where it runs (:meth:`~agentrl.rollout.episode_runs.EpisodeRuns.ages`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from agentrl.core.episode import INFRASTRUCTURE, Episode, StopReason
from agentrl.rollout.age_bound import AgeBound
from agentrl.rollout.episode_runs import Ages, Cancelled, EpisodeOrder, without_sampling
from agentrl.rollout.group_account import Tally

WHY = (
    "cancelled: too few episodes of its group could still be trained (rollout.stale=drop): the next step is {step}, "
    "with a bound of {bound} (rollout.max_staleness)"
)
CUT = (
    "cancelled: the batch of step {step} is the last one that can train the other episodes of its group, with a bound "
    "of {bound} (rollout.max_staleness)"
)
AskAges = Callable[[int, Callable[[Ages], None]], None]
"""Function as :meth:`~agentrl.rollout.episode_runs.EpisodeRuns.ages`."""


@dataclass
class _Member:
    """One episode of a running group.

    Attributes:
        job: Task of the episode.
        order: Order of its latest attempt.
        oldest: Version of its oldest token, as far as it is known.
        found: Record of the episode, from its end until its age is asked for.
        ended: Whether it has ended.
        usable: Whether its end leaves anything to train on.
        good: Whether it has ended without a failure.
        cancelled: Why it was cancelled, if it was because of an age.
    """

    job: "asyncio.Task[object]"
    order: EpisodeOrder
    oldest: int | None = None
    found: Episode | None = None
    ended: bool = False
    usable: bool = True
    good: bool = False
    cancelled: str = ""

    def version(self) -> int | None:
        """Returns the version of its oldest token as far as it is known."""
        if self.found is not None:
            self.oldest, self.found = self.found.oldest_version, None
        return self.oldest


@dataclass
class _Group:
    """A running group: the step that its start counted from, and its members by index."""

    started: int
    members: dict[int, _Member] = field(default_factory=dict)


class InFlight:
    """Running groups and the ages of their episodes.

    Args:
        bound: Bound of the ages.
        least: Number of episodes that a group needs to be trained on.
        served: Function that returns the policy version that is served.
        ages: Function that tells the ages of running episodes.
    """

    def __init__(self, bound: AgeBound, least: int, served: Callable[[], int], ages: AskAges) -> None:
        self._bound = bound
        self._least = least
        self._served = served
        self._ages = ages
        self._groups: dict[int, _Group] = {}

    async def run(
        self, draw: int, order: EpisodeOrder, play: Callable[[Cancelled], Awaitable[Episode]], cancelled: Cancelled
    ) -> Episode:
        """Run one episode of a group; returns its record, or that of a stale episode if it was cancelled for its age.

        Args:
            draw: Draw of the group.
            order: The episode.
            play: Runs it; it gets a function that takes the record of what there was if it is cancelled.
            cancelled: Takes that record if it is cancelled, but not for its age.
        """
        left: list[Episode] = []
        job = asyncio.current_task()
        assert job is not None
        group = self._groups.get(draw)
        if group is None:
            group = self._groups[draw] = _Group(self._bound.step)
        member = group.members[order.index] = _Member(job, order)
        try:
            found = await play(left.append)
        except asyncio.CancelledError:
            if not member.cancelled or job.uncancel() > 0:
                for one in left:
                    cancelled(one)
                raise  # the task was also cancelled by someone else
            found = _stale(left[-1] if left else without_sampling(member.order, StopReason.STALE, ""), member.cancelled)
        finally:
            member.ended, member.usable = True, False
        member.good = not found.failed
        member.usable = member.good or found.stop_reason in INFRASTRUCTURE  # it may be tried again
        member.found = found
        return found

    def begins(self, draw: int, order: EpisodeOrder) -> EpisodeOrder:
        """Note that an episode that waited begins now; returns its order with the version that is served."""
        served = self._served()
        if order.version != served:
            order = self._groups[draw].members[order.index].order = replace(order, version=served)
        return order

    def forget(self, draw: int) -> None:
        """Forget a group whose members are all over."""
        self._groups.pop(draw, None)

    def sweep(self) -> None:
        """Cancel the episodes that no step can train any more; call it also when another version is to be served."""
        if self._bound.policy == "drop":
            self._cancel_old()
            self._ages(self._served(), self._told)

    def _told(self, ages: Ages) -> None:
        """Takes the ages of running episodes, and cancels those that are too old."""
        known = dict(ages)
        for group in self._groups.values():
            for member in group.members.values():
                if not member.ended:
                    member.oldest = known.get(member.order, member.oldest)
        self._cancel_old()

    def _cancel_old(self) -> None:
        for group in self._groups.values():
            old = {index for index, one in group.members.items() if self._bound.too_old(one.version())}
            if not old:
                continue
            able = sum(one.usable and index not in old for index, one in group.members.items())
            for index, member in group.members.items():
                if index in old or able < self._least:
                    self._cancel(member, WHY)

    def last_chances(self) -> list[int]:
        """Returns the draws of running groups that only the next batch can train, with the episodes that have ended.

        Once it is handed out, one that has ended is too old; enough have, and no failed one may be tried again.
        """
        if self._bound.policy != "drop":
            return []
        return [draw for draw, group in self._groups.items() if self._is_last_chance(group)]

    def _is_last_chance(self, group: _Group) -> bool:
        members = group.members.values()
        good = [one for one in members if one.good]
        if len(good) < self._least or any(one.ended and one.usable and not one.good for one in members):
            return False
        incomplete = any(not one.ended and (one.cancelled or not one.job.cancelling()) for one in members)
        return incomplete and any(one.version() == self._bound.oldest for one in good)

    def cut(self, draw: int) -> None:
        """Cancel the members of a group that still run."""
        for member in self._groups[draw].members.values():
            self._cancel(member, CUT)

    def _cancel(self, member: _Member, why: str) -> None:
        if not (member.ended or member.cancelled or member.job.cancelling()):
            member.cancelled = why.format(step=self._bound.step, bound=self._bound.bound)
            member.job.cancel()

    def ended(self, draw: int, tally: Tally) -> str | None:
        """Takes a group that was judged into account; returns why the run has to stop, ``None`` if it goes on."""
        group = self._groups.get(draw)
        return None if group is None else self._bound.starved(tally, group.started)


def _stale(episode: Episode, why: str) -> Episode:
    """Returns the record of an episode that was cancelled for an age."""
    nothing = {"reward": None, "role_rewards": {}, "metrics": {}}
    return episode.model_copy(update={**nothing, "stop_reason": StopReason.STALE, "error": why})
