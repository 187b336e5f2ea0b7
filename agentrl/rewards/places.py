"""Limits concurrency, for objects that outlive an event loop.

Guarantees: at most ``count`` holders per event loop; one object works on several event loops, unlike a plain
``asyncio.Semaphore``.
"""

import asyncio
from types import TracebackType
from weakref import WeakKeyDictionary


class Places:
    """An async context manager that at most ``count`` tasks of an event loop hold at a time.

    Args:
        count: Number of places per event loop.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"concurrency={count}: want at least 1")
        self.count = count
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def __aenter__(self) -> None:
        """Wait for a place."""
        loop = asyncio.get_running_loop()
        semaphore = self._semaphores.get(loop)
        if semaphore is None:
            semaphore = self._semaphores[loop] = asyncio.Semaphore(self.count)
        await semaphore.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the place."""
        self._semaphores[asyncio.get_running_loop()].release()
