"""Starts, watches and stops the child processes of a run.

Guarantees: every child has its own session and log file; when a child fails, the error carries the tail of its log, or
the one line with which it refused what the user asked for;
:meth:`Supervisor.stop` ends all children and their descendants, and may be called again.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from agentrl.core.valid_text import printable
from agentrl.host.entry import REFUSED, refusal_in

TAIL_LINES = 30
POLL_SECONDS = 0.2
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class ChildFailed(RuntimeError):
    """A child ended too early or did not start; the message ends with the tail of its log."""


class ChildRefused(ChildFailed):
    """A child could not do what the user asked for; the message is the child's own, one line."""


@dataclass
class Child:
    """A supervised child process.

    Attributes:
        name: Name in messages and of the log file.
        process: Process of the child, leader of its own session.
        log: File with the child's standard output and error.
        peer: Role that several children share: the run continues while one of them lives. Empty if none shares it.
        brief: Whether the child may end before the run does.
        replaceable: Whether another takes care of the child's end, so that it does not end the run.
    """

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path
    peer: str = ""
    brief: bool = False
    replaceable: bool = False

    def tail(self) -> str:
        """The last lines of the log, without colors, and with other control characters as escapes."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(printable(_COLOR.sub("", line)) for line in lines[-TAIL_LINES:])


def lower_priority(pid: int, niceness: int) -> None:
    """Lower the scheduling priority of a session leader and of everything it starts.

    If Linux schedules sessions against each other (``autogroup``), a process's niceness only counts within its session,
    so the session's niceness is set too.
    """
    os.setpriority(os.PRIO_PROCESS, pid, niceness)  # threads that the process starts later inherit it
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))


class Supervisor:
    """Starts, watches and stops the children of one run.

    Args:
        log_dir: Folder for ``<name>.log``.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._children: list[Child] = []
        self._reported: set[str] = set()
        log_dir.mkdir(parents=True, exist_ok=True)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        niceness: int = 0,
        peer: str = "",
        brief: bool = False,
        replaceable: bool = False,
    ) -> Child:
        """Start a child.

        Args:
            name: Name of the child, unique in the run.
            command: Program and arguments; no shell is used.
            env: Environment variables, added to those of this process.
            niceness: Scheduling niceness; 0 leaves the priority unchanged.
            peer: Role shared with other children, see :class:`Child`.
            brief: Whether the child may end before the run does.
            replaceable: Whether the caller takes care of the child's end, see :class:`Child`.
        """
        log = self._log_dir / f"{name}.log"
        with open(log, "ab") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        if niceness:
            lower_priority(process.pid, niceness)
        child = Child(name, process, log, peer, brief, replaceable)
        self._children.append(child)
        return child

    def wait_ready(self, child: Child, ready_file: Path, timeout: float) -> dict[str, Any]:
        """Wait until ``child`` has written its ready file; returns the file's JSON.

        Raises:
            ChildFailed: ``child`` ended, another child failed, or the timeout passed.
        """
        deadline = time.monotonic() + timeout
        while not ready_file.is_file():
            self.check()
            if child.process.poll() is not None:
                raise self._failure(child, "ended before it was ready")
            if time.monotonic() > deadline:
                raise ChildFailed(
                    f"{child.name} was not ready within {timeout:g} s; the end of {child.log}:\n{child.tail()}"
                )
            time.sleep(POLL_SECONDS)
        return json.loads(ready_file.read_text())

    def check(self) -> None:
        """Raise if any child has ended with an error and no peer of it lives.

        Raises:
            ChildFailed: A child ended with an error.
        """
        for child in [one for one in self._children if not one.replaceable]:
            if child.process.poll() not in (None, 0) and not self._has_living_peer(child):
                raise self._failure(child, self._end(child))

    def lost(self) -> list[str]:
        """Returns one message per child that has ended since the last call while a peer of it lives."""
        ended = (c for c in self._children if c.process.poll() is not None and c.name not in self._reported)
        gone = [child for child in ended if self._has_living_peer(child)]
        self._reported.update(child.name for child in gone)
        return [self.end_message(child) for child in gone]

    def forget(self, child: Child) -> None:
        """Forget a child that has ended, after killing what it left in its session."""
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if os.getsid(process.pid) == child.process.pid:
                    _kill(process)
        self._children.remove(child)

    def _has_living_peer(self, child: Child) -> bool:
        peers = [c for c in self._children if child.peer and c.peer == child.peer]
        return any(c.process.poll() is None for c in peers)

    def _end(self, child: Child) -> str:
        code = child.process.poll()
        return f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"

    def end_message(self, child: Child, how: str = "") -> str:
        """Says that a child has ended, ``how`` or with its exit code or signal, and shows the tail of its log."""
        return f"{child.name} {how or self._end(child)}; the end of {child.log}:\n{child.tail()}"

    def _failure(self, child: Child, how: str) -> ChildFailed:
        """The error for a child that ended: its own words if it refused what the user asked for."""
        refusal = refusal_in(child.tail()) if child.process.poll() == REFUSED else ""
        return ChildRefused(refusal) if refusal else ChildFailed(self.end_message(child, how))

    def wait(self, children: Sequence[Child], on_poll: Callable[[], None]) -> None:
        """Wait until all of ``children`` have ended without an error, calling ``on_poll`` repeatedly.

        Raises:
            ChildFailed: A child failed, or a child that is not in ``children`` ended before them.
        """
        while True:
            on_poll()
            self.check()
            if all(child.process.poll() == 0 for child in children):
                return
            for child in self._children:
                if child in children or child.brief or child.replaceable:
                    continue
                if child.process.poll() is not None and not self._has_living_peer(child):
                    raise self._failure(child, "ended too early")
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """End all children, the last started first: SIGTERM, then SIGKILL to all remaining descendants."""
        descendants = [(child, _descendants(child.process.pid)) for child in reversed(self._children)]
        for child, _ in descendants:
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for child, family in descendants:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            for relative in family:
                _kill(relative)
        psutil.wait_procs([relative for _, family in descendants for relative in family], timeout=GRACE_SECONDS)
        self._children.clear()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
