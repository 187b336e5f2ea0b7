"""Defines the interface of a sandbox.

Guarantees: whatever the code does, a run ends within its limits and returns an :class:`Execution` with a typed reason;
a machine that cannot provide an isolation raises :class:`SandboxUnavailableError`, so this is never mistaken for a
failure of the code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from math import ceil
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Protocol

from agentrl.core.infrastructure import InfrastructureError

MEBIBYTE = 1 << 20
PAGE_BYTES = 4096  # a temporary file occupies whole pages
NO_FILES: Mapping[str, str | bytes] = MappingProxyType({})
CODE_FILE = "main.py"  # file to which run_python writes its code


class Isolation(StrEnum):
    """Kind of isolation between the code and the machine."""

    BUBBLEWRAP = "bubblewrap"  # namespaces, set up by bwrap
    NAMESPACES = "namespaces"  # the same namespaces, set up by agentrl itself
    DOCKER = "docker"  # a container without network; memory and processes are counted by its cgroup
    PODMAN = "podman"  # the same, run by podman
    NONE = "none"  # only limits and a process group: the code can read files, open sockets and send signals as we can


class Ended(StrEnum):
    """Reason why a run ended."""

    EXITED = "exited"  # the command returned an exit code
    TIMEOUT = "timeout"  # it took longer than ``seconds``
    CPU = "cpu"  # all its processes together used more than ``cpu_seconds``
    MEMORY = "memory"  # its processes and files together took more than ``memory_mb``
    PROCESSES = "processes"  # it had more than ``processes``; only without isolation, otherwise forking fails
    OUTPUT = "output"  # stdout or stderr was longer than ``output_chars``; only its start is kept
    KILLED = "killed"  # a signal ended it; the exit code is the signal's number, negative
    NOT_STARTED = "not_started"  # there is no such command, or it cannot be executed; stderr says why


@dataclass(frozen=True)
class Limits:
    """Resource limits of a run.

    Attributes:
        seconds: Wall time of the command in seconds, without the set-up of the sandbox.
        cpu_seconds: CPU time of all processes together, in seconds.
        memory_mb: Memory of all processes and temporary files together, in MiB; see the package for its enforcement.
        disk_mb: Size of all temporary files, which are kept in memory, in MiB.
        file_mb: Size of the largest file, in MiB.
        processes: Number of concurrent processes and threads, including the command itself.
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
        stderr: Text written to stderr, decoded the same way.
        exit_code: 0 to 255 if the command returned, the negative signal number if a signal ended it, ``None`` if the
            sandbox ended it.
        ended: Reason why the run ended.
        seconds: Wall time of the command.
        isolation: Isolation of the run.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    ended: Ended
    seconds: float
    isolation: Isolation


class SandboxUnavailableError(InfrastructureError):
    """Raised when this machine cannot provide the requested isolation; the text says why and how to get it."""


class Sandbox(Protocol):
    """Runs untrusted commands, any number of them concurrently."""

    isolation: Isolation

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str | bytes] = NO_FILES,
        stdin: str = "",
        limits: Limits | None = None,
    ) -> Execution:
        """Run a command in a temporary folder; afterwards the folder and all processes it started are removed.

        The environment variables are ``PATH``, ``HOME``, ``TMPDIR``, ``LANG`` and ``PYTHONDONTWRITEBYTECODE``, with
        values of the sandbox.

        Args:
            command: The program, looked up in ``/usr/local/bin:/usr/bin:/bin``, and its arguments; no shell.
            files: Maps relative paths to the contents of files to create in the folder.
            stdin: Text on the command's stdin.
            limits: Limits of this run; by default the sandbox's own.

        Raises:
            SandboxUnavailableError: The sandbox could not be set up, whatever the command.
            ValueError: ``command`` is empty, a path leads out of the folder, or the files exceed ``disk_mb``.
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
        """Run Python code as ``main.py`` in the folder; it can import modules among ``files``."""
        ...


def checked_files(files: Mapping[str, str | bytes], limits: Limits) -> dict[str, bytes]:
    """Return the files as bytes; raise ``ValueError`` for a path outside the folder or more than ``disk_mb``."""
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
