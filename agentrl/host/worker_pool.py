"""Runs blocking code in worker processes that can be killed.

Guarantees: a call that takes too long, or whose caller is cancelled, has its process killed, and only that one; a
process that dies fails the call it was in and no other; both are replaced when the next call needs them. Processes are
fresh interpreters, never forks of one with threads or torch, and die with this one, even by ``kill -9``. A pool works
from any event loop, one after the other or at the same time, and starts nothing before its first call.

Each worker has a pipe and a thread of its own. ``pebble``'s pool was looked at and left: its workers share one locked
pipe, which it holds for up to 3 s while it ends a worker that computes in C, and one that dies idle ends the pool.
"""

import asyncio
import atexit
import functools
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

from agentrl.host.worker_errors import (
    WorkerCallError,
    WorkerCrashedError,
    WorkerPoolClosedError,
    WorkerTimeoutError,
    checked_timeout,
    exit_text,
    function_name,
)
from agentrl.host.worker_process import LOADED, READY, RETURNED, pack, unpack_error
from agentrl.host.worker_threads import DaemonThreads, HungThreadsError, in_thread

__all__ = [
    "HungThreadsError",
    "WorkerCallError",
    "WorkerCrashedError",
    "WorkerPool",
    "WorkerPoolClosedError",
    "WorkerTimeoutError",
    "in_thread",
    "shared_pool",
]

START_SECONDS = 60.0  # for the interpreter, and again for the function's imports: sympy or torch from a cold disk
END_SECONDS = 5.0  # for the kernel to end what was sent SIGKILL; it takes milliseconds
SHARED_MEMORY = 4 << 30  # bytes: far above what a verifier needs, and below what brings a trainer's machine down


class _Worker:
    """A worker process and its pipe; used by one thread, killed from any thread."""

    def __init__(self, memory: int | None) -> None:
        self._lock = threading.Lock()
        self._killed = False
        self.connection, theirs = Pipe()
        # Not multiprocessing's spawn: that imports the parent's __main__ in each child, a trainer's with torch.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from agentrl.host.worker_process import main; "
            f"main({theirs.fileno()}, {os.getpid()}, {memory})"
        )
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=2,  # a function's prints go to stderr: this process's stdout may carry data
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # out of Ctrl-C's reach, and a group to end with all it started
            )

    def alive(self) -> bool:
        with self._lock:
            return not self._killed and self.process.poll() is None  # one that was killed takes a moment to be gone

    def wait_ready(self) -> None:
        """Wait for the interpreter."""
        try:
            if self._receive(START_SECONDS, "its start") != READY:
                raise WorkerCrashedError("a worker process did not report that it is ready")
        except WorkerTimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise WorkerCrashedError("a worker process could not start; stderr says why", self.end()) from error

    def call(self, request: bytes, name: str, timeout: float) -> bytes:
        """Send a call and wait for the answer.

        Raises:
            WorkerTimeoutError: The call exceeded its timeout, or its imports took over START_SECONDS.
            WorkerCrashedError: The process is gone.
        """
        try:
            self.connection.send_bytes(request)
            answer = self._receive(START_SECONDS, f"{name}: its imports")
            return self._receive(timeout, name) if answer == LOADED else answer
        except WorkerTimeoutError:  # an OSError too
            raise
        except (EOFError, OSError) as error:
            code = self.end()
            raise WorkerCrashedError(f"the worker process of {name} ended with {exit_text(code)}", code) from error

    def _receive(self, timeout: float, name: str) -> bytes:
        if not self.connection.poll(timeout):
            raise WorkerTimeoutError(f"{name} took over {timeout:g} s in a worker process")
        return self.connection.recv_bytes()

    def kill(self) -> None:
        """End the process and what it started in its group."""
        with self._lock:
            self._killed = True
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int | None:
        """Make sure that the process is over, and forget the pipe; its own exit status, where it ended by itself."""
        try:
            self.process.wait(0.5)  # its end of the pipe closes a moment before it has an exit status
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait(END_SECONDS)
        self.connection.close()
        return self.process.returncode


class _Call:
    """A call and the worker it is in; whoever gives it up ends that worker, and no other call's."""

    def __init__(self, request: bytes, name: str, timeout: float) -> None:
        self.request, self.name, self.timeout = request, name, timeout
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._given_up = False

    def run_in(self, worker: _Worker) -> bytes | None:
        """The answer; ``None`` where nobody waits for it any more and it was not started."""
        with self._lock:
            if self._given_up:
                return None
            self._worker = worker
        try:
            return worker.call(self.request, self.name, self.timeout)
        finally:
            with self._lock:
                self._worker = None

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            if self._worker is not None:
                self._worker.kill()


class WorkerPool:
    """Processes for functions that block or compute.

    Args:
        size: Processes at most; by default half the cores, at least 2 so that one call that hangs stops no other, at
            most 8.
        memory: Bytes of data that each may hold; beyond it the function gets a MemoryError. ``None`` for no limit.
    """

    def __init__(self, size: int | None = None, *, memory: int | None = None) -> None:
        if size is not None and size < 1:
            raise ValueError(f"WorkerPool(size={size}): want at least 1")
        self.size = size or max(2, min(8, len(os.sched_getaffinity(0)) // 2))
        self._memory = memory
        self._own = threading.local()
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._closed = False
        self._threads = DaemonThreads(self.size, "agentrl-worker", leave=self._drop)

    async def run(self, function: Callable[..., Any] | str, *args: Any, timeout: float) -> Any:
        """Run a function in a worker process.

        Args:
            function: Function at the top level of a module, or ``"module:name"``, imported in the worker only.
            args: Positional arguments of ``function``; they and the result must be picklable.
            timeout: Seconds the function may take, from its start: neither the wait for a free worker, which is
                bounded by the timeouts of those before it, nor the function's imports count.

        Returns:
            What the function returns; what it raises is raised here, with the worker's traceback as a note.

        Raises:
            WorkerTimeoutError: The function exceeded ``timeout``; its process was killed.
            WorkerCrashedError: The process ended (a signal, ``os._exit``, ``sys.exit``, out of memory).
            WorkerCallError: The function raised something that cannot be pickled.
            WorkerPoolClosedError: The pool is closed.
            TypeError: The function or an argument cannot be pickled.
        """
        call = _Call(pack(function, args), function_name(function), checked_timeout(timeout))
        with self._lock:
            self._check_open()
            future = self._threads.submit(functools.partial(self._serve, call))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel():
                call.give_up()
            raise

    def close(self) -> None:
        """Kill all processes; calls that wait or run fail with WorkerPoolClosedError. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for worker in self._workers:
                worker.kill()
            left = self._threads.close()
        for future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(WorkerPoolClosedError("the worker pool was closed before the call began"))
        self._threads.join(END_SECONDS)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def _serve(self, call: _Call) -> Any:
        """Carry out a call in this thread's process."""
        try:
            answer = call.run_in(self._worker())
        except (WorkerTimeoutError, WorkerCrashedError) as error:
            self._drop()
            if self._closed:
                raise WorkerPoolClosedError(f"the worker pool was closed during {call.name}") from error
            raise
        if answer is None:
            return None
        if answer[:1] == RETURNED:
            return pickle.loads(answer[1:])
        error, text = unpack_error(answer[1:])
        if error is None:
            raise WorkerCallError(f"{call.name} raised in a worker process:\n{text}")
        error.add_note(f"in a worker process:\n{text}")
        raise error

    def _worker(self) -> _Worker:
        """Returns this thread's process, started in this thread: the kernel ends it with the thread that started it."""
        worker: _Worker | None = getattr(self._own, "worker", None)
        if worker is not None and worker.alive():
            return worker
        self._drop()
        with self._lock:
            self._check_open()
            worker = self._own.worker = _Worker(self._memory)
            self._workers.add(worker)
        worker.wait_ready()
        return worker

    def _drop(self) -> None:
        """End this thread's process."""
        worker: _Worker | None = getattr(self._own, "worker", None)
        if worker is not None:
            self._own.worker = None
            worker.kill()
            worker.end()
            with self._lock:
                self._workers.discard(worker)

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerPoolClosedError("the worker pool is closed")


_shared: WorkerPool | None = None
_shared_lock = threading.Lock()


def shared_pool() -> WorkerPool:
    """The pool of this process: made on first use, closed when the interpreter ends, made anew where it was closed."""
    global _shared
    with _shared_lock:
        if _shared is None or _shared.closed:
            _shared = WorkerPool(memory=SHARED_MEMORY)
        return _shared


def _close_shared() -> None:
    if _shared is not None:
        _shared.close()


def _forget() -> None:
    """A forked child has none of its parent's threads, and its parent's workers are not its own to end."""
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


atexit.register(_close_shared)
os.register_at_fork(after_in_child=_forget)
