"""Buffer of finished groups for the trainer.

Guarantees: first in, first out; a batch has exactly the requested number of groups, sorted by draw index, so its order
does not depend on which group finished first; each group leaves once. After :meth:`GroupBuffer.close` a batch may have
fewer groups: what is left is never waited for. After :meth:`GroupBuffer.fail` every waiting and later
:meth:`GroupBuffer.take` raises the error.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

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


class GroupBuffer:
    """Queue of finished groups, taken batch by batch."""

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()
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

    async def take(self, count: int) -> list[Group]:
        """Wait for ``count`` groups and return the oldest ones, sorted by draw index; fewer once closed."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._failure is not None or self._closed or len(self._groups) >= count
            )
            if self._failure is not None:
                raise self._failure
            taken = [self._groups.popleft() for _ in range(min(count, len(self._groups)))]
            return sorted(taken, key=lambda group: group.draw)
