"""Chooses the strongest sandbox that works on this machine.

Guarantees: a returned sandbox was tested on this machine by code that attempts forbidden actions; ``isolation`` names
the isolation it really has. A weaker one is never returned instead.
"""

import asyncio
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from agentrl.core.registry import nearest
from agentrl.rewards.sandbox.backends import Backend, find_backend, source_of
from agentrl.rewards.sandbox.execute import execute
from agentrl.rewards.sandbox.layout import machine_layout
from agentrl.rewards.sandbox.protocol import (
    CODE_FILE,
    NO_FILES,
    Ended,
    Execution,
    Isolation,
    Limits,
    SandboxUnavailableError,
    checked_files,
)

AUTOMATIC = (Isolation.BUBBLEWRAP, Isolation.NAMESPACES, Isolation.DOCKER, Isolation.PODMAN)
HELD = "held"  # printed by the probe if all forbidden attempts failed
PROBE_LIMITS = Limits(processes=8)
HOW_TO = {
    Isolation.BUBBLEWRAP: "apt install bubblewrap (0.7 or newer)",
    Isolation.NAMESPACES: "Linux 5.12, with user namespaces allowed (sysctl user.max_user_namespaces, and "
    "kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu) or CAP_SYS_ADMIN in a container",
    Isolation.DOCKER: "a docker daemon that we may use, and docker pull {image}",
    Isolation.PODMAN: "apt install podman, and podman pull {image}",
    Isolation.NONE: "Linux",
}
_probed: dict[tuple[object, ...], str | None] = {}  # result of each probe in this process: why it failed, or None


class BackendSandbox:
    """A sandbox that runs commands by a backend; see :class:`~agentrl.rewards.sandbox.protocol.Sandbox`."""

    def __init__(self, backend: Backend, limits: Limits, at_once: int) -> None:
        self.backend = backend
        self.isolation = backend.isolation
        self.limits = limits
        self.at_once = at_once
        # one semaphore per event loop: a semaphore cannot be shared between loops
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str | bytes] = NO_FILES,
        stdin: str = "",
        limits: Limits | None = None,
    ) -> Execution:
        """Run a command; see :meth:`Sandbox.run`."""
        limits = limits or self.limits
        if isinstance(command, str) or not command or any("\0" in part for part in command):
            raise ValueError(f"command={command!r}: want a program and its arguments")
        contents = checked_files(files, limits)
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.at_once))
        async with slots:
            launch = self.backend.launch(limits)
            try:
                return await execute(launch, command, contents, stdin, limits)
            finally:
                if self.isolation is Isolation.NONE:  # only without isolation is the folder on this machine's disk
                    await asyncio.to_thread(shutil.rmtree, launch.folder, ignore_errors=True)

    async def run_python(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] = NO_FILES,
        limits: Limits | None = None,
    ) -> Execution:
        """Run Python code; see :meth:`Sandbox.run_python`."""
        if CODE_FILE in files:
            raise ValueError(f"files[{CODE_FILE!r}]: this name is reserved for the code")
        command = (*self.backend.code, CODE_FILE)
        return await self.run(command, files={**files, CODE_FILE: code}, stdin=stdin, limits=limits)


async def make_sandbox(
    backend: str = "auto",
    *,
    limits: Limits | None = None,
    at_once: int = 8,
    packages: bool = False,
    read_only: Iterable[Path] = (),
    image: str = "python:3.12-slim",
) -> BackendSandbox:
    """Return a sandbox that was tested on this machine.

    Args:
        backend: Value of an :class:`Isolation`, or ``auto`` for the first of bubblewrap, namespaces, docker and podman
            that works. ``none`` is used only if named here.
        limits: Default limits of a run; ``None`` is ``Limits()``.
        at_once: Largest number of concurrent runs; further ones wait.
        packages: Whether Python code can import the packages installed here (in a container: in its image), or only
            the standard library.
        read_only: Further files and folders of this machine to make visible; not in a container.
        image: Image for a container; it must be present, it is never pulled.

    Raises:
        SandboxUnavailableError: No requested backend works; the message says why, and how to get one.
        ValueError: ``backend`` is unknown, or ``at_once`` is below 1.
    """
    if at_once < 1:
        raise ValueError(f"make_sandbox(at_once={at_once}): want 1 or more")
    names = ["auto", *(isolation.value for isolation in Isolation)]
    if backend not in names:
        raise ValueError(f"no sandbox backend is called {backend!r}{nearest(backend, names)} ({', '.join(names)})")
    layout = machine_layout(packages=packages, read_only=read_only)
    failures = []
    for isolation in AUTOMATIC if backend == "auto" else (Isolation(backend),):
        try:
            sandbox = BackendSandbox(find_backend(isolation, layout, image), limits or Limits(), at_once)
            await _probe(sandbox, (isolation, layout.show, layout.code, image))
        except SandboxUnavailableError as error:
            failures.append(f"  {isolation}: {error}\n    to get it: {HOW_TO[isolation].format(image=image)}")
        else:
            return sandbox
    raise SandboxUnavailableError("\n".join((f"no sandbox works here (asked for: {backend}). Tried:", *failures)))


async def _probe(sandbox: BackendSandbox, key: tuple[object, ...]) -> None:
    """Test a sandbox, once per process; raise ``SandboxUnavailableError`` if it failed."""
    if key not in _probed:
        _probed[key] = await _attempt(sandbox)
    problem = _probed[key]
    if problem is not None:
        raise SandboxUnavailableError(problem)


async def _attempt(sandbox: BackendSandbox) -> str | None:
    code = f"print({HELD!r})" if sandbox.isolation is Isolation.NONE else source_of("probe")
    try:
        execution = await sandbox.run_python(code, limits=PROBE_LIMITS)
    except (SandboxUnavailableError, OSError) as error:
        return str(error)
    if execution.ended is not Ended.EXITED or execution.stdout.strip() != HELD:
        said = (execution.stdout + execution.stderr).strip()[-1000:]
        return f"it started, but does not isolate ({execution.ended}): {said}"
    return None
