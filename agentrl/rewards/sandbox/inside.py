"""The first process inside a sandbox: starts the command, watches over it, and says how it ended.

Guarantees: the command starts only after every limit is in force, or not at all; whichever way it ends, no process it
started is left when this one exits, and this one exits when the process that ordered the run is gone.

How: it runs as ``python -I -S -c <this file>``, with the standard library only. On standard input comes the order, one
line of JSON, then the files' bytes, then what the command reads. On standard error it marks with a secret of the order
where the command's own output begins and ends, and what became of it. Where it is process 1 of a PID namespace the
kernel kills the rest with it, and signals from inside do not reach it.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from typing import Any, NoReturn

TICK = 0.05  # seconds between two looks at memory and CPU time, which one process alone cannot overdraw anyway
INODE_BYTES = 1024  # about what an empty file costs in the kernel
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
SECCOMP_MODE_FILTER = 2
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int, argument: Any = None) -> None:
    """Set one property of this process, or raise ``OSError``."""
    if libc.prctl(option, ctypes.c_ulong(value), argument, None, None):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def install_filter(instructions: bytes) -> None:
    """Let the kernel refuse system calls, of this process and all it starts."""
    held = ctypes.create_string_buffer(instructions)
    program = struct.pack("@HP", len(instructions) // 8, ctypes.addressof(held))  # struct sock_fprog
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program)


def read_exactly(count: int) -> bytes:
    """Read bytes from standard input and not one more: the rest is the command's."""
    parts = []
    while count:
        part = os.read(0, min(count, 1 << 20))
        if not part:
            raise EOFError("the order ended early")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_order() -> dict[str, Any]:
    """Read the order; its length comes first, as eight bytes."""
    return json.loads(read_exactly(int.from_bytes(read_exactly(8), "big")))


class Supervisor:
    """Starts the command of an order and watches over it."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.limits = order["limits"]
        self.alone = order["alone"]  # process 1 of a PID namespace: everything else in it is the command's
        if self.alone and os.getpid() != 1:
            raise OSError(f"process {os.getpid()} is not the first of its namespace")
        self.status: int | None = None
        self.child = 0
        self.limited = False

    def settle(self) -> None:
        """Become nobody in particular, and go when the one outside goes."""
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the first to go where the whole machine is short of memory
        uid = self.order["uid"]
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)  # drops every capability too
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        prctl(PR_SET_DUMPABLE, 0)  # the command cannot look into this process
        if not self.alone:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        lifeline = self.order["lifeline"]
        if lifeline is not None:  # in a container the parent is a thread of its runtime, which may end at any time
            os.set_inheritable(lifeline, False)
            if self.alone:
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def write_files(self) -> None:
        """Put the files into the working folder, and go there."""
        os.makedirs(self.order["folder"], exist_ok=True)
        os.chdir(self.order["folder"])
        for name, size in self.order["files"]:
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            with open(name, "wb") as file:
                file.write(read_exactly(size))

    def start(self) -> str | None:
        """Start the command; return why it cannot be, or ``None``."""
        ready, failed = os.pipe()  # closed by exec, so that nothing to read means that the command runs
        self.child = os.fork()
        if self.child == 0:
            os.close(ready)
            try:
                self.become_command()
            except BaseException as error:  # the child must not run on as a second supervisor
                stage = "exec" if self.limited else "limits"
                os.write(failed, f"{stage} {error}"[:1000].encode(errors="replace"))
            os._exit(127)
        os.close(failed)
        with open(ready, "rb") as file:
            stage, _, problem = file.read().decode(errors="replace").partition(" ")
        if stage == "limits":
            raise OSError(problem)
        return problem if stage else None

    def become_command(self) -> None:
        """Take on the limits, then turn into the command."""
        if self.alone:  # otherwise one process group holds both, so that it can be killed from outside
            os.setsid()
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)
        for name, value in self.order["rlimits"].items():
            limit_resource(name, value)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        if self.order["filter"]:
            install_filter(bytes.fromhex(self.order["filter"]))
        self.limited = True
        folder = self.order["home"]
        command = self.order["command"]
        os.execvpe(command[0], command, {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder})

    def watch(self) -> str:
        """Wait for the command's end or for a limit; return which it was."""
        poller = select.poll()
        ended = os.pidfd_open(self.child)
        poller.register(ended, select.POLLIN)
        lifeline = self.order["lifeline"]
        if lifeline is not None:
            poller.register(lifeline, select.POLLIN)
        deadline = time.monotonic() + self.limits["seconds"]
        while True:
            left = deadline - time.monotonic()
            ready = [fd for fd, _ in poller.poll(max(0.0, min(TICK, left)) * 1000)]
            if lifeline in ready:
                return "orphaned"
            self.reap()
            if self.status is not None:
                return self.verdict(self.status)
            if time.monotonic() >= deadline:
                return "timeout"
            over = self.over_limit()
            if over:
                return over

    def reap(self) -> None:
        """Collect who has ended: the command, or orphans it left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.child:
                    self.status = status

    def verdict(self, status: int) -> str:
        """Name the end of the command from its status."""
        signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        spent = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        if signum == signal.SIGXCPU or (signum == signal.SIGKILL and spent >= self.limits["cpu_seconds"]):
            return "cpu"
        return "killed" if signum else "exited"

    def over_limit(self) -> str | None:
        """Say which limit all processes together are over."""
        running = self.processes()
        if not self.alone and len(running) > self.limits["processes"]:  # otherwise the kernel counts
            return "processes"
        spent = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        spent += sum(cpu for _, cpu in running.values())
        if spent > self.limits["cpu_seconds"]:
            return "cpu"
        allowed = self.limits["memory_mb"] << 20
        files = files_bytes(self.order["home"]) if self.order["own_disk"] else 0
        if files + sum(map(resident_bytes, running)) <= allowed:
            return None  # counts shared pages once for each process, so the truth is at most this
        return "memory" if files + sum(map(proportional_bytes, running)) > allowed else None

    def processes(self) -> dict[int, tuple[int, float]]:
        """Return parent and CPU seconds of every process but this one; outside a PID namespace, of descendants."""
        found = {}
        ticks = os.sysconf("SC_CLK_TCK")
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                    stat = file.read().rpartition(b")")[2].split()
                    found[int(entry)] = (int(stat[1]), sum(map(int, stat[11:15])) / ticks)
        if self.alone:
            return found
        family, size = {os.getpid()}, 0
        while len(family) > size:
            size = len(family)
            family.update(pid for pid, (parent, _) in found.items() if parent in family)
        return {pid: found[pid] for pid in family if pid in found}

    def end_all(self) -> None:
        """Kill everything the command started, and see it dead."""
        while True:
            for pid in [-1] if self.alone else self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            if pid == self.child and self.status is None:
                self.status = status

    def leave(self) -> NoReturn:
        """Go with the one outside: nobody is left to be told."""
        self.end_all()
        if not self.alone:
            import shutil  # only where no namespace takes the folder along

            os.chdir("/")
            shutil.rmtree(self.order["folder"], ignore_errors=True)
        os._exit(0)


def limit_resource(name: str, value: int) -> None:
    """Set a limit of this process for good; one that is lower already stays."""
    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    # a second between both limits of CPU time, so that the first one's signal tells what happened
    resource.setrlimit(kind, (value, value + 1 if name == "RLIMIT_CPU" and value != hard else value))


def files_bytes(folder: str) -> int:
    """Return the memory that the temporary files take, empty ones too."""
    disk = os.statvfs(folder)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize + (disk.f_files - disk.f_ffree) * INODE_BYTES


def resident_bytes(pid: int) -> int:
    """Return a process's pages in memory, shared ones in full."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0  # gone meanwhile


def proportional_bytes(pid: int) -> int:
    """Return a process's share of memory; where that cannot be read, its pages in full."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return resident_bytes(pid)


def main() -> None:
    """Do what the order says."""
    supervisor = Supervisor(read_order())
    order = supervisor.order
    supervisor.settle()
    supervisor.write_files()
    os.write(2, f"{order['begin']}\n".encode())
    started = time.monotonic()
    try:
        problem = supervisor.start()
        ended = "not_started" if problem is not None else supervisor.watch()
    except OSError as error:  # of this machine, or of a limit that cannot be had
        ended, problem = "failed", str(error)
    seconds = time.monotonic() - started
    if ended == "orphaned":
        supervisor.leave()
    supervisor.end_all()
    status = supervisor.status
    code = os.waitstatus_to_exitcode(status) if status is not None and ended in ("exited", "killed") else None
    report = {"ended": ended, "exit_code": code, "seconds": seconds, "problem": problem}
    os.set_blocking(2, True)  # the command may have changed it
    os.write(2, f"{order['end']}{json.dumps(report)}".encode())


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # the boundary: outside it becomes the reason why the sandbox is unavailable
        sys.exit(f"sandbox: {type(error).__name__}: {error}")
