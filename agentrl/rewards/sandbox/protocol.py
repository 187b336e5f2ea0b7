"""The interface of a sandbox.

Guarantees: whatever the code does, a run ends within its limits and gives an :class:`Execution` with a typed reason; a
machine that cannot keep the promise of an isolation raises :class:`SandboxUnavailableError`, so that it is never taken
for an answer of the code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from math import ceil
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Protocol

MEBIBYTE = 1 << 20
PAGE_BYTES = 4096  # a temporary file takes whole ones
NO_FILES: Mapping[str, str | bytes] = MappingProxyType({})
CODE_FILE = "main.py"  # what run_python writes its code to


class Isolation(StrEnum):
    """Kind of isolation between the code and the machine."""

    BUBBLEWRAP = "bubblewrap"  # namespaces, set up by bwrap
    NAMESPACES = "namespaces"  # the same namespaces, set up by us
    DOCKER = "docker"  # a container without network; memory and processes are counted by its cgroup
    PODMAN = "podman"  # the same, of podman
    NONE = "none"  # limits and a process group only: the code reads files, opens sockets and sends signals as we do


class Ended(StrEnum):
    """Why a run is over."""

    EXITED = "exited"  # the command returned; its exit code is there
    TIMEOUT = "timeout"  # it took longer than ``seconds``
    CPU = "cpu"  # all its processes together used more than ``cpu_seconds``
    MEMORY = "memory"  # its processes and files together took more than ``memory_mb``
    PROCESSES = "processes"  # it had more than ``processes``; without isolation only, else the next one is refused
    OUTPUT = "output"  # stdout or stderr was longer than ``output_chars``; what is kept is its start
    KILLED = "killed"  # a signal ended it; the exit code is the signal's number, negative
    NOT_STARTED = "not_started"  # there is no such command, or it cannot be executed; stderr says why


@dataclass(frozen=True)
class Limits:
    """Resource limits of a run.

    Attributes:
        seconds: Wall time of the command; the set-up of the sandbox does not count.
        cpu_seconds: CPU time of all its processes together.
        memory_mb: MiB of its processes and temporary files together; the package says how hard this is kept.
        disk_mb: MiB of its temporary files, which are kept in memory.
        file_mb: MiB of its largest file.
        processes: Processes and threads at the same time, the command's own included.
        output_chars: Characters of stdout, and as many of stderr.
    """

    seconds: float = 5.0
    cpu_seconds: float = 5.0
    memory_mb: int = 512
    disk_mb: int = 16
    file_mb: int = 16
    processes: int = 32
    output_chars: int = 20_000

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"Limits({field.name}={getattr(self, field.name)}): want more than 0")


@dataclass(frozen=True)
class Execution:
    """Result of a run.

    Attributes:
        stdout: Text written to stdout; bytes that are not UTF-8 become U+FFFD.
        stderr: Likewise.
        exit_code: 0 to 255 of a command that returned, minus the signal's number of one that a signal ended, ``None``
            of one that we ended.
        ended: Why it is over.
        seconds: Wall time of the command.
        isolation: Isolation of the run.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    ended: Ended
    seconds: float
    isolation: Isolation


class SandboxUnavailableError(RuntimeError):
    """This machine cannot give the isolation that was asked for; the text says why and how to get it."""


class Sandbox(Protocol):
    """Runs commands that nobody has read; any number of them at the same time."""

    isolation: Isolation

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str | bytes] = NO_FILES,
        stdin: str = "",
        limits: Limits | None = None,
    ) -> Execution:
        """Run a command in an empty temporary folder that is gone afterwards, with everything the command started.

        Its environment is ``PATH``, ``HOME``, ``TMPDIR``, ``LANG`` and ``PYTHONDONTWRITEBYTECODE``, none of it ours.

        Args:
            command: The program, looked up in ``/usr/local/bin:/usr/bin:/bin``, and its arguments; no shell.
            files: Contents of the folder at the start, by relative path.
            stdin: Text on the command's stdin.
            limits: Other limits than the sandbox's own.

        Raises:
            SandboxUnavailableError: The sandbox could not be set up; says nothing about the command.
            ValueError: An empty command, a path that leads out of the folder, or files above ``disk_mb``.
        """
        ...

    async def run_python(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] = NO_FILES,
        limits: Limits | None = None,
    ) -> Execution:
        """Run Python code, as ``main.py`` of the folder; modules among ``files`` can be imported."""
        ...


def checked_files(files: Mapping[str, str | bytes], limits: Limits) -> dict[str, bytes]:
    """Return the files as bytes; raise ``ValueError`` for a path out of the folder or more than ``disk_mb``."""
    contents: dict[str, bytes] = {}
    for name, content in files.items():
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
            raise ValueError(f"files[{name!r}]: want a path inside the working folder")
        encoded = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else bytes(content)
        contents[str(path)] = encoded
    below_files = [name for name in contents if any(str(parent) in contents for parent in PurePosixPath(name).parents)]
    if below_files:
        raise ValueError(f"files[{below_files[0]!r}]: lies below another file")
    total = sum(max(1, ceil(len(content) / PAGE_BYTES)) * PAGE_BYTES for content in contents.values())
    if total > limits.disk_mb * MEBIBYTE:
        raise ValueError(f"files: {total} bytes, in whole pages, but disk_mb={limits.disk_mb}")
    return contents
