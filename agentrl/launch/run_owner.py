"""Keeps a run's folder to one launcher at a time.

Guarantees: while a launcher holds a folder, :class:`RunOwner` of any other is refused, with the host and the process id
of the first. The hold ends with its process, also after ``kill -9``, because it is a lock of the kernel (``flock``).

- On one machine, in any container of it, and on network file systems that carry locks between hosts (NFS since version
  4, NFS 3 with its lock service, Lustre and GPFS mounted with ``flock``), the lock alone decides: a second launcher is
  refused as long as the first lives, and not a moment longer.
- Where locks are kept to one host (``local_lock``, ``localflock``, ``nolock``) or are missing, a launcher on another
  host is known by its heartbeat, the time of its file on the file server: it is refused while the heartbeat is younger
  than :data:`ALIVE_SECONDS`, so at most that long after ``kill -9``. Two that start in the same instant on two such
  hosts are not told apart.
- An object store that is mounted as files has neither: use one folder from one host.
"""

import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from agentrl.config.errors import UserError

FILE = "owner.json"
BEAT_SECONDS = 15.0
ALIVE_SECONDS = 60.0  # age of a heartbeat from which a launcher on another host is taken for dead


class RunOwned(UserError):
    """Another process holds the run's folder."""


class RunOwner:
    """Holds a run's folder for this process, as a context manager.

    Args:
        run_dir: Folder of the run.

    Raises:
        RunOwned: On entering: another process holds it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._handle = -1
        self._record: dict[str, Any] = {}
        self._before: dict[str, Any] = {}  # record of the owner before
        self._stop = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="run-owner", daemon=True)

    def __enter__(self) -> Self:
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._refuse_if_held()
        except RunOwned:
            os.close(self._handle)
            raise
        self._record = this_process() | {"started": time.time()}
        self._write()
        self._beats.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, UserError) and self._before:  # nothing was begun: the folder is as it was
            self._record = self._before
            self._write()
        elif "ended" not in self._record:
            self.end(None, "" if kind is None else f"{kind.__name__}: {error}")
        self._stop.set()
        self._beats.join()
        os.close(self._handle)

    def end(self, code: int | None, reason: str) -> None:
        """Record how the run ended.

        Args:
            code: Exit code of the launcher.
            reason: Why it ended, where it did not succeed.
        """
        self._record |= {"ended": time.time(), "code": code, "reason": reason}
        self._write()

    def _refuse_if_held(self) -> None:
        locked = _lock(self._handle, fcntl.LOCK_EX)
        said = _parsed(os.pread(self._handle, 1 << 16, 0))
        if locked is False:
            raise RunOwned(_refusal(self._path.parent, said))
        before = os.fstat(self._handle).st_mtime
        os.utime(self._handle)  # with the file server's clock, which heartbeats are of too
        age = os.fstat(self._handle).st_mtime - before
        if _lives(said, age, locked=locked is True):
            os.utime(self._handle, (before, before))
            raise RunOwned(_refusal(self._path.parent, said, f"; its heartbeat is {age:.0f} s old"))
        self._before = said

    def _write(self) -> None:
        """Writes the record in place: a new file would be another one than the locked."""
        text = json.dumps(self._record).encode()
        try:
            os.pwrite(self._handle, text, 0)
            os.ftruncate(self._handle, len(text))
        except OSError:  # a full disk: the lock holds without the record
            return

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            os.utime(self._handle)


def this_process() -> dict[str, Any]:
    """Returns what tells this process from all others: host, boot of the host, process id and its start."""
    process = psutil.Process()
    return {"host": socket.gethostname(), "boot": _boot(), "pid": process.pid, "born": process.create_time()}


def read_owner(run_dir: Path) -> dict[str, Any]:
    """Reads the record of the folder's latest launcher; empty without one.

    ``living`` says whether it holds the folder, ``beat`` is the age of its heartbeat in seconds.
    """
    path = run_dir / FILE
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return {}
    try:
        said = _parsed(os.read(handle, 1 << 16))
        age = time.time() - os.fstat(handle).st_mtime
        locked = _lock(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)
    return said | {"living": locked is False or _lives(said, age, locked=locked is True), "beat": age}


def _lock(handle: int, kind: int) -> bool | None:
    """Takes a lock without waiting; returns whether it is free, ``None`` if the file system has no locks."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _lives(said: dict[str, Any], age: float, *, locked: bool) -> bool:
    """Whether the recorded process holds the folder although its lock was not seen.

    Args:
        said: Record of the owner.
        age: Age of its heartbeat in seconds.
        locked: Whether a lock was free, which proves that no process on this host holds the folder.
    """
    if not said or "ended" in said:
        return False
    if said["host"] != socket.gethostname():
        return age < ALIVE_SECONDS
    if locked or said["boot"] != _boot():
        return False
    try:
        return abs(psutil.Process(said["pid"]).create_time() - said["born"]) < 1.0
    except psutil.NoSuchProcess:
        return False


def _refusal(run_dir: Path, said: dict[str, Any], more: str = "") -> str:
    who = f"process {said['pid']} on {said['host']}" if said else "another process"
    return f"run {run_dir.name!r} is still going: {who} holds {run_dir}{more}; stop it before --resume"


def _parsed(text: bytes) -> dict[str, Any]:
    """Reads a record; empty if it is being written."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _boot() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.is_file() else str(int(psutil.boot_time()))
