"""Finds leaked tasks, threads, child processes, files and sockets, and the line that opened each.

Guarantees: a leak is a resource opened after a :class:`Snapshot` and still open after the grace period; idle
threads of a pool and ended child processes are no leaks.
"""

import asyncio
import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from agentrl.envkit.check.source_lines import UserLines

GRACE_SECONDS = 1.0  # grace period for resources that are being closed
_LOOK_SECONDS = 0.01
_DESCRIPTORS = Path("/proc/self/fd")
_KIND_OF_EVENT = {  # Python's audit events
    "open": "file",
    "socket.__new__": "socket",
    "subprocess.Popen": "process",
    "os.fork": "process",
    "os.posix_spawn": "process",
    "_thread.start_new_thread": "thread",
    "_thread.start_joinable_thread": "thread",
    "os.putenv": "environment",
    "os.unsetenv": "environment",
    "os.chdir": "folder",
}
_SETTERS = (
    "os.py",
    "<frozen os>",
    "_collections_abc.py",
    "<frozen _collections_abc>",
    "contextlib.py",
)  # files whose frames lie between the user's line and the audit event
_WORKERS = {("_worker", "thread.py"), ("_serve", "worker_threads.py")}  # idle threads of concurrent.futures and agentrl


@dataclass(frozen=True)
class Leak:
    """A resource that is still open.

    Attributes:
        kind: Kind of resource: ``task``, ``thread``, ``process``, ``file`` or ``socket``.
        name: Name of the task or thread, command line of the process, or path of the file.
        where: The user's line that opened it, or at which it waits; empty if unknown.
    """

    kind: str
    name: str
    where: str


@dataclass(frozen=True)
class Snapshot:
    """The resources that are open at one moment."""

    tasks: frozenset["asyncio.Task[Any]"]
    threads: frozenset[threading.Thread]
    processes: frozenset[psutil.Process]
    descriptors: frozenset[tuple[str, str]]

    @classmethod
    def take(cls, tasks: set["asyncio.Task[Any]"]) -> "Snapshot":
        """Records all resources that are open now; ``tasks`` are the event loop's."""
        threads = {thread for thread in threading.enumerate() if not is_idle(thread)}
        return cls(frozenset(tasks), frozenset(threads), frozenset(children()), frozenset(_descriptors()))

    def minus(self, earlier: "Snapshot") -> "Snapshot":
        """Returns the resources opened since ``earlier``."""
        return Snapshot(
            self.tasks - earlier.tasks,
            self.threads - earlier.threads,
            self.processes - earlier.processes,
            self.descriptors - earlier.descriptors,
        )

    def __bool__(self) -> bool:
        return bool(self.tasks or self.threads or self.processes or self.descriptors)


def children() -> list[psutil.Process]:
    """Lists the running child processes."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_children(besides: set[psutil.Process]) -> None:
    """Kill child processes and wait for their end, without ``wait``, which would steal their status from asyncio."""
    left = set(children()) - besides
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    until = time.monotonic() + GRACE_SECONDS
    while left & set(children()) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)


class OpenWatch:
    """Context manager that records which of the user's lines open resources; ignores the thread that created it."""

    def __init__(self, lines: UserLines) -> None:
        self.opened: list[tuple[str, str, str]] = []  # kind, path, line
        self._lines = lines
        self._own_thread = threading.get_ident()

    def __enter__(self) -> "OpenWatch":
        _Hook.watch = self
        _Hook.install()
        return self

    def __exit__(self, *exception: object) -> None:
        _Hook.watch = None

    def note(self, kind: str, arguments: tuple[Any, ...]) -> None:
        """Record the user's line of an audit event."""
        if threading.get_ident() == self._own_thread:
            return
        frame: FrameType | None = sys._getframe(2)
        if kind in ("environment", "folder"):
            while frame is not None and os.path.basename(frame.f_code.co_filename) in _SETTERS:
                frame = frame.f_back
            if frame is None or not self._lines.is_user(frame.f_code.co_filename) or frame.f_code.co_name == "<module>":
                return  # changed by a library, or once at import
        where = self._lines.of_frame(frame)
        if where:
            path = os.path.realpath(arguments[0]) if kind == "file" and isinstance(arguments[0], str) else ""
            self.opened.append((kind, path, where))

    def leaks(self, since: Snapshot, tasks: Callable[[], set["asyncio.Task[Any]"]]) -> list[Leak]:
        """Resources opened since a snapshot that are still open after the grace period."""
        until = time.monotonic() + GRACE_SECONDS
        left = Snapshot.take(tasks()).minus(since)
        if left:
            gc.collect()  # unreferenced objects are no leaks
        while left and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            left = Snapshot.take(tasks()).minus(since)
        return self._named(left) if left else []

    def _named(self, left: Snapshot) -> list[Leak]:
        found = [Leak("task", task.get_name(), self._lines.of_tasks([task])) for task in left.tasks]
        frames = sys._current_frames()
        for thread in left.threads:
            if left.processes and thread.name.startswith("asyncio-waitpid"):
                continue  # ends with its process
            runs = self._lines.of_frame(frames.get(thread.ident or 0))
            found.append(Leak("thread", thread.name, runs or self._line("thread")))
        for process in left.processes:
            with contextlib.suppress(psutil.Error):
                found.append(Leak("process", " ".join(process.cmdline())[:80], self._line("process")))
        if left.processes or left.tasks:  # their pipes end with them
            pipes: tuple[str, ...] = ("pipe:", "anon_inode:", "socket:")
        else:
            pipes = ("anon_inode:",)
        for _, target in sorted(left.descriptors):
            if not target.startswith(pipes):
                kind = "socket" if target.startswith("socket:") else "file"
                found.append(Leak(kind, target, self._line(kind, target) or self._line("process")))
        return found

    def _line(self, kind: str, path: str = "") -> str:
        same = [where for one, opened, where in self.opened if one == kind and (kind != "file" or opened == path)]
        return same[-1] if same else ""


class _Hook:
    """The process's only audit hook, because Python cannot remove one; it does nothing while no watch is active."""

    watch: OpenWatch | None = None
    _installed = False

    @classmethod
    def install(cls) -> None:
        if not cls._installed:
            cls._installed = True
            sys.addaudithook(cls._heard)

    @classmethod
    def _heard(cls, event: str, arguments: tuple[Any, ...]) -> None:
        kind = _KIND_OF_EVENT.get(event)
        if kind is not None and cls.watch is not None:
            cls.watch.note(kind, arguments)


def is_idle(thread: threading.Thread) -> bool:
    """Whether a thread is an idle worker of a pool, which ends with the interpreter."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and (frame.f_code.co_name, os.path.basename(frame.f_code.co_filename)) in _WORKERS


def _descriptors() -> set[tuple[str, str]]:
    """Returns number and target of each open file descriptor."""
    if not _DESCRIPTORS.is_dir():
        process = psutil.Process()
        files = {(str(file.fd), file.path) for file in process.open_files()}
        return files | {(str(one.fd), f"socket:{one.laddr}") for one in process.net_connections()}
    found = set()
    for number in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # the descriptor used to list the folder is closed already
            found.add((number, os.readlink(_DESCRIPTORS / number)))
    return found
