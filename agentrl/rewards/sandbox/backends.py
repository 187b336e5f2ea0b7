"""Backends of the sandbox: each class turns limits into the command line of its isolation.

Guarantees: a caller's text never reaches a shell; as root each run gets its own, otherwise unused user id, so that the
kernel counts its processes separately and it owns no files outside.
"""

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Protocol

from agentrl.rewards.sandbox.execute import Launch
from agentrl.rewards.sandbox.layout import (
    CODE_FLAGS,
    DEVICES,
    DISK,
    NO_PACKAGES,
    SUPERVISOR_FLAGS,
    WORKING_FOLDER,
    Layout,
)  # fmt: skip
from agentrl.rewards.sandbox.protocol import MEBIBYTE, Isolation, Limits, SandboxUnavailableError
from agentrl.rewards.sandbox.syscalls import syscall_filter

INNER_UID = 1000  # user id inside, if the sandbox is started by an ordinary user
OWN_UIDS = (1_900_000_000, 2_100_000_000)  # above the ranges of distributions, containers and systemd
NOBODY = 65534
CAP_SYS_ADMIN = 1 << 21
SUPERVISORS = 1  # a container's process limit includes our supervisor
CLIENT_VARIABLES = ("PATH", "HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG",
                    "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "CONTAINER_HOST")  # fmt: skip


class Backend(Protocol):
    """Isolates runs in one way."""

    isolation: Isolation
    code: tuple[str, ...]  # command that runs Python code inside; the file's name follows

    def launch(self, limits: Limits) -> Launch:
        """Return how to start one run."""
        ...


def source_of(stage: str) -> str:
    """Return the source text of a sandbox module that runs as a separate process."""
    return resources.files("agentrl.rewards.sandbox").joinpath(f"{stage}.py").read_text()


def privileged() -> bool:
    """Whether this process can create namespaces as root and then change its user id."""
    capabilities = next(line for line in Path("/proc/self/status").read_text().splitlines() if line[:7] == "CapEff:")
    return os.geteuid() == 0 and bool(int(capabilities.split()[1], 16) & CAP_SYS_ADMIN) and mapped_uids()[1] > 1


def mapped_uids() -> tuple[int, int]:
    """Return first id and size of the largest range of user ids mapped into our user namespace."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    ranges = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    return max(ranges, key=lambda one: one[1])


def own_uid() -> int:
    """Return a random user id outside the usual ranges; in a container with few ids, one of the last."""
    first, count = mapped_uids()
    low, high = OWN_UIDS
    if first > low or first + count < high:
        high = first + count
        low = max(first + 1, high - max(1, count // 16))
    return low + secrets.randbelow(high - low)


class Bubblewrap:
    """Namespaces set up by ``bwrap`` (0.7 or newer)."""

    isolation = Isolation.BUBBLEWRAP

    def __init__(self, layout: Layout, program: str, *, as_root: bool) -> None:
        self.layout = layout
        self.code = layout.code
        self.program = program
        self.as_root = as_root
        self._filter = syscall_filter().hex()
        self._inside = source_of("inside")

    def launch(self, limits: Limits) -> Launch:
        """Return how to start one run."""
        options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        options += ["--hostname", "sandbox", "--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"]
        if self.as_root:  # no user namespace: the supervisor becomes another user, which needs two capabilities
            options += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            options += ["--unshare-user", "--uid", str(INNER_UID), "--gid", str(INNER_UID)]
        options += ["--perms", "1777", "--size", str(limits.disk_mb * MEBIBYTE), "--tmpfs", DISK]
        for path in self.layout.parents():  # otherwise root's home would not be readable inside
            options += ["--perms", "0755", "--dir", path]
        for path in self.layout.show:
            options += ["--ro-bind", path, path]
        for path in self.layout.hide:
            options += ["--tmpfs", path, "--remount-ro", path]
        for path in DEVICES:
            options += ["--dev-bind", path, path]
        for path, target in self.layout.links.items():
            options += ["--symlink", target, path]
        options += ["--proc", "/proc"]
        options += ["--remount-ro", "/", "--chdir", "/"]
        python = (self.layout.python, *SUPERVISOR_FLAGS, "-c", self._inside)
        return Launch(
            (self.program, *options, "--", *python),
            self.isolation,
            WORKING_FOLDER,
            DISK,
            uid=own_uid() if self.as_root else None,
            filter=self._filter,
            count_processes=True,
        )


class Namespaces:
    """The namespaces of bubblewrap, set up by a process of agentrl."""

    isolation = Isolation.NAMESPACES

    def __init__(self, layout: Layout, *, as_root: bool) -> None:
        self.layout = layout
        self.code = layout.code
        self.as_root = as_root
        self._filter = syscall_filter().hex()
        self._enter, self._inside = source_of("enter"), source_of("inside")

    def launch(self, limits: Limits) -> Launch:
        """Return how to start one run."""
        plan = {
            "privileged": self.as_root,
            "inner_uid": INNER_UID,
            "show": self.layout.show,
            "hide": self.layout.hide,
            "links": self.layout.links,
            "devices": DEVICES,
            "disk": DISK,
            "disk_bytes": limits.disk_mb * MEBIBYTE,
            "inodes": limits.disk_mb * 256,
        }
        python = (self.layout.python, *SUPERVISOR_FLAGS, "-c")
        return Launch(
            (*python, self._enter, json.dumps(plan), *python, self._inside),
            self.isolation,
            WORKING_FOLDER,
            DISK,
            uid=own_uid() if self.as_root else None,
            filter=self._filter,
            count_processes=True,
        )


class Container:
    """A docker or podman container without network; its image needs Python 3.10 or newer as ``python3``."""

    def __init__(self, program: str, isolation: Isolation, image: str, *, packages: bool = False) -> None:
        self.program = program
        self.isolation = isolation
        self.image = image
        self.code: tuple[str, ...] = ("python3", *CODE_FLAGS, *(() if packages else (NO_PACKAGES,)))
        self._filter = syscall_filter().hex()
        self._inside = source_of("inside")

    def launch(self, limits: Limits) -> Launch:
        """Return how to start one run."""
        name = f"agentrl-sandbox-{secrets.token_hex(8)}"
        memory, disk = f"{limits.memory_mb}m", f"rw,nosuid,nodev,mode=1777,size={limits.disk_mb}m"
        options = ["--rm", "--interactive", "--name", name, "--pull", "never", "--log-driver", "none"]
        options += [
            "--network",
            "none",
            "--ipc",
            "none",
            "--hostname",
            "sandbox",
            "--read-only",
            "--tmpfs",
            f"{DISK}:{disk}",
        ]
        if self.isolation is Isolation.PODMAN:
            options += ["--read-only-tmpfs=false"]  # otherwise it adds writable folders without a size limit
        options += ["--user", f"{NOBODY}:{NOBODY}", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        options += ["--memory", memory, "--memory-swap", memory]
        options += [
            "--pids-limit",
            str(limits.processes + SUPERVISORS),
            "--workdir",
            "/",
            "--entrypoint",
            "python3",
        ]
        environment = {key: os.environ[key] for key in CLIENT_VARIABLES if key in os.environ}

        async def end() -> None:
            killing = await asyncio.create_subprocess_exec(
                self.program, "rm", "--force", name, env=environment,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            await killing.wait()

        return Launch(
            (self.program, "run", *options, self.image, *SUPERVISOR_FLAGS, "-c", self._inside),
            self.isolation,
            WORKING_FOLDER,
            DISK,
            filter=self._filter,
            lifeline=False,
            environment=environment,
            end=end,
        )


class Unisolated:
    """Only limits and a process group: no protection against malicious code."""

    isolation = Isolation.NONE

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.code = layout.code
        self._inside = source_of("inside")

    def launch(self, limits: Limits) -> Launch:
        """Return how to start one run; its folder is removed by the supervisor, and again from outside."""
        folder = os.path.join(tempfile.gettempdir(), f"agentrl-sandbox-{secrets.token_hex(8)}")
        command_line = (self.layout.python, *SUPERVISOR_FLAGS, "-c", self._inside)
        return Launch(command_line, self.isolation, folder, folder, own_disk=False)


def find_backend(isolation: Isolation, layout: Layout, image: str) -> Backend:
    """Return the untested backend of an isolation.

    Raises:
        SandboxUnavailableError: The backend's program is not installed, or the machine is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailableError(f"sandboxes need Linux, and this is {sys.platform}")
    if isolation is Isolation.NAMESPACES:
        return Namespaces(layout, as_root=privileged())
    if isolation is Isolation.NONE:
        return Unisolated(layout)
    name = "bwrap" if isolation is Isolation.BUBBLEWRAP else isolation.value
    program = shutil.which(name)
    if program is None:
        raise SandboxUnavailableError(f"{name} is not installed")
    if isolation is Isolation.BUBBLEWRAP:
        return Bubblewrap(layout, program, as_root=privileged())
    return Container(program, isolation, image, packages=NO_PACKAGES not in layout.code)
