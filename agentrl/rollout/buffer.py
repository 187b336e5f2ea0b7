"""Buffer of finished groups for the trainer.

Guarantees: first in, first out; a batch has exactly the requested number of groups, sorted by draw index, so its order
does not depend on which group finished first; each group leaves once. After :meth:`GroupBuffer.fail` every waiting and
later :meth:`GroupBuffer.take` raises the error.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from agentrl.core.columns import Columns


@dataclass(frozen=True)
class Group:
    """Episodes of one task that are ready to train on.

    Attributes:
        draw: Draw index of the task.
        columns: Columns of the episodes that succeeded.
        failed: Number of episodes that failed.
    """

    draw: int
    columns: Columns
    failed: int = 0


class GroupBuffer:
    """Queue of finished groups, taken batch by batch."""

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None

    def __len__(self) -> int:
        return len(self._groups)

    async def put(self, group: Group) -> None:
        """Add a finished group."""
        async with self._changed:
            self._groups.append(group)
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """Make every waiting and later :meth:`take` raise ``error``."""
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    async def take(self, count: int) -> list[Group]:
        """Wait for ``count`` groups and return the oldest ones, sorted by draw index."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure is not None or len(self._groups) >= count)
            if self._failure is not None:
                raise self._failure
            return sorted((self._groups.popleft() for _ in range(count)), key=lambda group: group.draw)
