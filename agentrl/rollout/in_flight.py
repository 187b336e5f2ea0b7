"""Ends running episodes that have become too old to be trained.

Guarantees: an episode is cancelled as soon as it is known that no step can train it any more
(:mod:`agentrl.rollout.age_bound`), the others of its group too when fewer are left than a group needs; it ends as a
record with the stop reason ``stale`` and what it had sampled, after the teardown of any cancelled episode. Cancelling
it ends its requests, and its server is told. A cancellation from outside goes through unchanged. When a batch is handed
out, the slow episodes of a group whose other ones no later batch could train are cancelled, so that these are trained.

The version of a running answer is known only when it ends. Until its first answer, an episode counts as sampled by
the version that was served when it asked for that answer: later tokens would make it younger, which a server that
queues requests for longer than the bound makes likely, and then sampling it to its end helps nobody.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from agentrl.core.episode import INFRASTRUCTURE, NOT_SAMPLED, Episode, StopReason, Task
from agentrl.inference.client import Client, EpisodeLLM
from agentrl.inference.random_streams import stream_seed
from agentrl.rollout.age_bound import AgeBound
from agentrl.rollout.group_account import Tally

WHY = (
    "cancelled: too few episodes of its group could still be trained (rollout.stale=drop): the next step is {step}, "
    "with a bound of {bound} (rollout.max_staleness)"
)
CUT = (
    "cancelled: the batch of step {step} is the last one that can train the other episodes of its group, with a bound "
    "of {bound} (rollout.max_staleness)"
)


@dataclass
class _Member:
    """One episode of a running group.

    Attributes:
        job: Task of the episode.
        served: Version that was served at its start; before it, at that of its group.
        began: Time of its start on the event loop's clock; ``None`` while it waits for a place.
        llm: Its model access, once it has one; that of the latest attempt.
        asked: Version that was served when it asked for its first answer, if that is not the served one.
        oldest: Version of its oldest token, once it has one.
        ended: Whether it has ended.
        usable: Whether its end leaves anything to train on.
        good: Whether it has ended without a failure.
        cancelled: Why it was cancelled, if it was because of an age.
    """

    job: "asyncio.Task[object]"
    served: int
    began: float | None = None
    llm: EpisodeLLM | None = None
    asked: int | None = None
    oldest: int | None = None
    ended: bool = False
    usable: bool = True
    good: bool = False
    cancelled: str = ""

    def acquired(self, llm: EpisodeLLM, served: int) -> None:
        """Note that an attempt begins, with its model access; it has sampled nothing yet."""
        self.llm, self.asked, self.oldest = llm, None, None
        self.served, self.began = served, asyncio.get_running_loop().time()

    def version(self) -> int | None:
        """Returns the version of its oldest token as far as it is known."""
        if self.oldest is None and self.llm is not None:
            self.oldest = _oldest_token(self.llm)
        return self.oldest if self.oldest is not None else self.asked

    def has_asked(self) -> bool:
        """Whether it has asked for an answer."""
        return self.llm is not None and any(one.trajectory.nodes for one in self.llm.sessions.values())


@dataclass
class _Group:
    """A running group: the step that its start counted from, its task, and its members by index."""

    started: int
    task: Task
    members: dict[int, _Member] = field(default_factory=dict)


class InFlight:
    """Running groups and the ages of their episodes.

    Args:
        bound: Bound of the ages.
        least: Number of episodes that a group needs to be trained on.
        seed: The recipe's seed, for the records of cancelled episodes.
        served: Function that returns the policy version that is served.
    """

    def __init__(self, bound: AgeBound, least: int, seed: int, served: Callable[[], int]) -> None:
        self._bound = bound
        self._least = least
        self._seed = seed
        self._served = served
        self._groups: dict[int, _Group] = {}

    async def run(self, draw: int, index: int, task: Task, episode: Callable[[Client], Awaitable[Episode]],
                  client: Client) -> Episode:  # fmt: skip
        """Run one episode of a group; returns its record, or that of a stale episode if it was cancelled for its age.

        Args:
            draw: Draw of the group.
            index: Position of the episode in its group.
            task: Task of the group.
            episode: Function of a client that runs the episode.
            client: Client of the run.
        """
        job = asyncio.current_task()
        assert job is not None
        group = self._groups.setdefault(draw, _Group(self._bound.step, task))
        member = group.members[index] = _Member(job, self._served())
        try:
            found = await episode(_Watched(client, member, self._served))
        except asyncio.CancelledError:
            if not member.cancelled or job.uncancel() > 0:
                raise  # the task was also cancelled by someone else
            found = self._record(draw, index, group.task, member)
        finally:
            member.ended, member.usable = True, False
        member.good = not found.failed
        member.usable = member.good or found.stop_reason in INFRASTRUCTURE  # it may be tried again
        return found

    def is_stale(self, draw: int, index: int) -> bool:
        """Whether a running episode was cancelled for its age."""
        return bool(self._groups[draw].members[index].cancelled)

    def forget(self, draw: int) -> None:
        """Forget a group whose members are all over."""
        self._groups.pop(draw, None)

    def next_version(self) -> None:
        """Note that another version is about to be served; what was asked for until now has the old one, or did."""
        for group in self._groups.values():
            for member in group.members.values():
                if member.asked is None and member.has_asked():
                    member.asked = self._served()

    def sweep(self) -> None:
        """Cancel the episodes that no step can train any more."""
        if self._bound.policy != "drop":
            return
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
        ended = [one for one in group.members.values() if one.ended]
        good = [one for one in ended if one.good]
        if len(good) < self._least or any(one.usable and not one.good for one in ended):
            return False
        return any(one.version() == self._bound.oldest for one in good)

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

    def _record(self, draw: int, index: int, task: Task, member: _Member) -> Episode:
        llm, now = member.llm, asyncio.get_running_loop().time()
        return Episode(
            group_id=f"g{draw}",
            task_id=task.id,
            index=index,
            seed=stream_seed(self._seed, draw, index),
            task=task.data,
            seconds=0.0 if member.began is None else now - member.began,
            version=member.served,
            sampling={} if llm is None else llm.sampling,
            trajectories={} if llm is None else llm.trajectories(),
            stop_reason=StopReason.STALE,
            error=member.cancelled,
        )


class _Watched:
    """A client that notes the model access which it gives an episode."""

    def __init__(self, client: Client, member: _Member, served: Callable[[], int]) -> None:
        self._client = client
        self._member = member
        self._served = served

    def acquire(self, *, evaluation: bool, seed: int) -> tuple[EpisodeLLM, Callable[[], None]]:
        """Returns a handle for an episode, and the function that releases it."""
        llm, release = self._client.acquire(evaluation=evaluation, seed=seed)
        self._member.acquired(llm, self._served())
        return llm, release


def _oldest_token(llm: EpisodeLLM) -> int | None:
    """Returns the version of the oldest token of an episode's first answers; ``None`` before the first one."""
    found: list[int] = []
    for session in llm.sessions.values():
        for node in session.trajectory.nodes:
            sampled = set(node.versions) - {NOT_SAMPLED}
            if sampled:
                found.append(min(sampled))
                break  # later answers of a conversation are younger
    return min(found, default=None)
