"""Buffer of finished groups for the trainer.

Guarantees: the oldest groups leave first, by the policy version of their oldest token, then by draw; a batch has
exactly the requested number of groups, sorted by draw index, so its order does not depend on which group finished
first; each group leaves once. A group that the given function refuses leaves at once, also while a batch is waited for.
After :meth:`GroupBuffer.close` a batch may have fewer groups: what is left is never waited for. After
:meth:`GroupBuffer.fail` every waiting and later :meth:`GroupBuffer.take` raises the error.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from agentrl.core.columns import Columns
from agentrl.rollout.group_account import Tally


@dataclass(frozen=True)
class Group:
    """Episodes of one task that are ready to train on.

    Attributes:
        draw: Draw index of the task.
        columns: Columns of the episodes that succeeded.
        tally: Counts of all episodes of the group.
    """

    draw: int
    columns: Columns
    tally: Tally

    @cached_property
    def oldest(self) -> int | None:
        """Policy version of the oldest token; ``None`` without tokens."""
        return int(self.columns.versions.min()) if len(self.columns.versions) else None


class GroupBuffer:
    """Queue of finished groups, taken batch by batch.

    Args:
        fit: Function of a group that returns what of it can still be trained; ``None`` if nothing can. It takes care of
            what it leaves out.
    """

    def __init__(self, fit: Callable[[Group], Group | None] = lambda group: group) -> None:
        self._fit = fit
        self._groups: list[Group] = []
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._groups)

    def held(self) -> list[Group]:
        """Returns the finished groups that no batch has taken, the first one first."""
        return list(self._groups)

    def hold(self, groups: Iterable[Group]) -> None:
        """Add the groups of a checkpoint, before anything waits for a batch."""
        self._groups.extend(groups)

    async def put(self, group: Group) -> None:
        """Add a finished group."""
        async with self._changed:
            self._groups.append(group)
            self._changed.notify_all()

    def sweep(self) -> None:
        """Let go of what can no longer be trained."""
        fitted = [self._fit(group) for group in self._groups]
        self._groups = [group for group in fitted if group is not None]

    async def close(self) -> None:
        """Note that no more groups will come: the last batch is what is left, and every later one is empty."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """Make every waiting and later :meth:`take` raise ``error``."""
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    async def filled(self, count: int) -> None:
        """Wait until :meth:`take` would return."""
        async with self._changed:
            await self._filled(count)

    async def _filled(self, count: int) -> None:
        while True:
            if self._failure is not None:
                raise self._failure
            if self._closed or len(self._groups) >= count:
                self.sweep()  # just before they leave
            if self._closed or len(self._groups) >= count:
                return
            await self._changed.wait()

    async def take(self, count: int) -> list[Group]:
        """Wait for ``count`` groups and return the oldest ones, sorted by draw index; fewer once closed."""
        async with self._changed:
            await self._filled(count)
            self._groups.sort(key=lambda group: (group.oldest or 0, group.draw))
            taken, self._groups = self._groups[:count], self._groups[count:]
            return sorted(taken, key=lambda group: group.draw)
