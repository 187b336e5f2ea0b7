"""Runs blocking code in worker processes that can be killed.

Guarantees: if a call takes too long or its caller is cancelled, its process is killed, and no other; if a process dies,
its call fails, and no other; a killed or dead process is replaced when the next call needs one. Processes are fresh
interpreters, never forks of one with threads or torch, and die with this one, even by ``kill -9``; the run's secret and
its servers' key are not in their environment. A pool may be used from several event loops, also at the same time, and
starts nothing before its first call.

Each worker has a pipe and a thread of its own. The package ``pebble`` is not used: its workers share one locked pipe,
which is held for up to 3 s while a worker that computes in C is ended, and an idle worker that dies ends its pool.
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

from agentrl.host.cores import usable_cores
from agentrl.host.key_guard import KEY_ENV
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

START_SECONDS = 60.0  # limit for the interpreter, and again for the function's imports (torch from a cold disk is slow)
END_SECONDS = 5.0  # limit for the kernel to end a process after SIGKILL; it takes milliseconds
OWN_KEYS = ("AGENTRL_SECRET", KEY_ENV)  # of the run: a function of its user needs neither
SHARED_MEMORY = 4 << 30  # bytes per process: far more than a verifier needs, too little to exhaust a trainer's machine


class _Worker:
    """A worker process and its pipe; used by one thread, killed from any thread."""

    def __init__(self, memory: int | None) -> None:
        self._lock = threading.Lock()
        self._killed = False
        self.connection, theirs = Pipe()
        # multiprocessing's spawn is not used: it imports the parent's __main__ in each child, which may import torch.
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
                start_new_session=True,  # Ctrl-C does not reach it, and its process group can be killed as a whole
                env={name: value for name, value in os.environ.items() if name not in OWN_KEYS},
            )

    def alive(self) -> bool:
        with self._lock:
            return not self._killed and self.process.poll() is None  # a killed process takes a moment to end

    def wait_ready(self) -> None:
        """Wait until the interpreter has started."""
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
            WorkerCrashedError: The process ended during the call.
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
        """Kill the process and its process group."""
        with self._lock:
            self._killed = True
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int | None:
        """Make sure that the process has ended, and close the pipe; returns the exit status."""
        try:
            self.process.wait(0.5)  # its end of the pipe closes a moment before it has an exit status
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait(END_SECONDS)
        self.connection.close()
        return self.process.returncode


class _Call:
    """A call and the worker that runs it; giving up the call kills this worker and no other."""

    def __init__(self, request: bytes, name: str, timeout: float) -> None:
        self.request, self.name, self.timeout = request, name, timeout
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._given_up = False

    def run_in(self, worker: _Worker) -> bytes | None:
        """Run the call; returns its answer, or ``None`` if it was given up before it started."""
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
    """Pool of processes for functions that block or compute.

    Args:
        size: Most processes; by default half the number of cores, but at least 2, so that one call that hangs does not
            stop the others, and at most 8.
        memory: Most bytes of data that each process may hold; beyond it a function gets a MemoryError. ``None`` for no
            limit.
    """

    def __init__(self, size: int | None = None, *, memory: int | None = None) -> None:
        if size is not None and size < 1:
            raise ValueError(f"WorkerPool(size={size}): want at least 1")
        self.size = size or max(2, min(8, usable_cores() // 2))
        self._memory = memory
        self._own = threading.local()
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._closed = False
        self._threads = DaemonThreads(self.size, "agentrl-worker", leave=self._drop)

    async def run(self, function: Callable[..., Any] | str, *args: Any, timeout: float) -> Any:
        """Run a function in a worker process.

        Args:
            function: Function at the top level of a module, or ``"module:name"``, which only the worker imports.
            args: Positional arguments of ``function``; they and the result must be picklable.
            timeout: Most seconds of the function. The wait for a free worker, which is limited by the timeouts of
                earlier calls, and the function's imports do not count.

        Returns:
            The function's result; its errors are raised here, with the worker's traceback as a note.

        Raises:
            WorkerTimeoutError: The function exceeded ``timeout``; its process was killed.
            WorkerCrashedError: The process ended (a signal, ``os._exit``, ``sys.exit``, out of memory).
            WorkerCallError: The function raised an error that cannot be pickled.
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
        """Kill all processes; waiting and running calls fail with WorkerPoolClosedError. May be called again."""
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
        """Run a call in this thread's process."""
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
        """Returns this thread's process; this thread starts it, because the kernel ends it with the starting thread."""
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
    """The pool of this process: created on first use and again after a close, closed when the interpreter ends."""
    global _shared
    with _shared_lock:
        if _shared is None or _shared.closed:
            _shared = WorkerPool(memory=SHARED_MEMORY)
        return _shared


def _close_shared() -> None:
    if _shared is not None:
        _shared.close()


def _forget() -> None:
    """Drops the pool in a forked child, which has no threads of its parent and must not end its parent's workers."""
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


atexit.register(_close_shared)
os.register_at_fork(after_in_child=_forget)
