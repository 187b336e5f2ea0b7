"""Writes files in a thread of its own, so that an event loop never waits for a disk.

Guarantees: :meth:`WriterThread.add` only queues; what was added is written in the order of the calls, all that waits
for one target in a single call of it, so a thread that seldom gets the interpreter keeps up with a busy loop.
:meth:`WriterThread.flush` returns when everything added before is written. The queue is bounded: while more than
``most`` bytes wait for a disk that stands still, further lines are left out, which is said, with their number at the
end. An exception of a target is raised by the next call. :class:`AtOnce` is the same without a thread.
"""

import logging
import queue
import threading
from collections.abc import Callable
from itertools import groupby
from typing import Any, Protocol, TypeVar

log = logging.getLogger(__name__)
MOST = 64 << 20  # bytes that may wait
CLOSE_SECONDS = 30.0  # for what still waits at the end of a run
Item = TypeVar("Item")
Target = Callable[[list[Any]], object]


class Writer(Protocol):
    """Writes now, or later."""

    def add(self, target: Callable[[list[Item]], object], item: Item, size: int = 0) -> bool:
        """Have ``target`` write a list that ends with ``item``; returns whether the item was taken.

        Args:
            target: Writes items that were added one after the other.
            item: Data to write, such as a line; it may not change any more.
            size: Bytes that it counts for. What counts for none is always taken.
        """
        ...

    def flush(self) -> None:
        """Wait until everything that was added before is written."""
        ...


class AtOnce:
    """Writes in the caller."""

    def add(self, target: Callable[[list[Item]], object], item: Item, size: int = 0) -> bool:
        """Write an item."""
        target([item])
        return True

    def flush(self) -> None:
        """There is nothing to wait for."""


class WriterThread:
    """Writes in a thread, which begins with the first item and is a daemon.

    Args:
        name: Name of the thread.
        most: Bytes that may wait.
    """

    def __init__(self, name: str, most: int = MOST) -> None:
        self._name = name
        self._most = most
        self._queue: queue.SimpleQueue[tuple[Target | None, Any, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the bytes that wait
        self._waiting = 0
        self._left_out = 0
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def add(self, target: Callable[[list[Item]], object], item: Item, size: int = 0) -> bool:
        """Queue an item, see :meth:`Writer.add`.

        Raises:
            Exception: An earlier item could not be written.
        """
        self._raise()
        with self._lock:
            taken = not size or self._waiting < self._most
            self._waiting += size if taken else 0
        if not taken:
            if not self._left_out:
                log.warning("the disk does not keep up: %d bytes wait, and lines are left out", self._waiting)
            self._left_out += 1
            return False
        self._queue.put((target, item, size))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return True

    def flush(self, seconds: float | None = None) -> None:
        """Wait until everything that was added before is written.

        Args:
            seconds: Longest wait; ``None`` for no limit.

        Raises:
            TimeoutError: The disk does not take it in time.
            Exception: An item could not be written.
        """
        done = threading.Event()
        if self._thread is not None:
            self._queue.put((lambda _: done.set(), None, 0))
            if not done.wait(seconds):
                raise TimeoutError(f"{self._waiting} bytes were not written within {seconds:g} s")
        self._raise()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits, and end the thread; may be called twice.

        What is not written in time is said: it is lost if the process ends.

        Raises:
            Exception: An item could not be written.
        """
        try:
            self.flush(seconds)
        except TimeoutError as error:
            log.warning("%s: %s", self._name, error)
        finally:
            self._queue.put((None, None, 0))
            self._thread = None
            if self._left_out:
                log.warning("%d lines were left out, for which the disk was too slow", self._left_out)
                self._left_out = 0

    def _raise(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _run(self) -> None:
        while True:
            found = [self._queue.get()]
            while not self._queue.empty():  # this thread alone takes
                found.append(self._queue.get())
            for target, run in groupby(found, key=lambda one: one[0]):
                if target is None:
                    return
                items = list(run)
                try:
                    target([item for _, item, _ in items])
                except Exception as error:  # the thread's boundary: the next call raises it
                    self._failure = error
                with self._lock:
                    self._waiting -= sum(size for _, _, size in items)
