"""Supervises a run as the first process inside a sandbox: starts the command, enforces limits, reports how it ended.

Guarantees: the command starts only after all limits are set, or not at all; however it ends, no process it
started is left when the supervisor exits, and the supervisor exits when the process that ordered the run is gone.

How: it runs as ``python -I -S -c <this file>``, with the standard library only. Its standard input has the length of
the order, the order as one line of JSON, the files' bytes, and the command's input. On standard error it writes secret
marks where the command's own output begins and ends, then a report. If it is process 1 of a PID namespace, the
kernel kills all other processes with it, and signals from inside do not reach it.
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

TICK = 0.05  # seconds between checks of total memory and CPU time; the kernel limits each single process
INODE_BYTES = 1024  # about the kernel memory of an empty file
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
    """Install a filter of system calls for this process and all its children."""
    held = ctypes.create_string_buffer(instructions)
    program = struct.pack("@HP", len(instructions) // 8, ctypes.addressof(held))  # struct sock_fprog
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program)


def read_exactly(count: int) -> bytes:
    """Read exactly ``count`` bytes from standard input: the rest belongs to the command."""
    parts = []
    while count:
        part = os.read(0, min(count, 1 << 20))
        if not part:
            raise EOFError("the order ended early")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def read_order() -> dict[str, Any]:
    """Read the order, which is preceded by its length in eight bytes."""
    return json.loads(read_exactly(int.from_bytes(read_exactly(8), "big")))


class Supervisor:
    """Starts the command of an order and enforces its limits."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.limits = order["limits"]
        self.alone = order["alone"]  # process 1 of a PID namespace: all other processes in it are the command's
        if self.alone and os.getpid() != 1:
            raise OSError(f"process {os.getpid()} is not the first of its namespace")
        self.status: int | None = None
        self.child = 0
        self.limited = False

    def settle(self) -> None:
        """Drop privileges, and arrange to end when the process outside ends."""
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the first to be killed if the machine runs out of memory
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
        """Write the order's files into the working folder, and change to it."""
        os.makedirs(self.order["folder"], exist_ok=True)
        os.chdir(self.order["folder"])
        for name, size in self.order["files"]:
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            with open(name, "wb") as file:
                file.write(read_exactly(size))

    def start(self) -> str | None:
        """Start the command; return why it could not be executed, or ``None``."""
        ready, failed = os.pipe()  # closed by exec: end of file without data means that the command runs
        self.child = os.fork()
        if self.child == 0:
            os.close(ready)
            try:
                self.become_command()
            except BaseException as error:  # the child must not continue as a second supervisor
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
        """Set all limits, then execute the command."""
        if self.alone:  # otherwise both stay in one process group, so that it can be killed from outside
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
        """Wait until the command ends or exceeds a limit; return which."""
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
        """Reap ended processes: the command, or orphans it left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.child:
                    self.status = status

    def verdict(self, status: int) -> str:
        """Return the reason of the command's end from its wait status."""
        signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        spent = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        if signum == signal.SIGXCPU or (signum == signal.SIGKILL and spent >= self.limits["cpu_seconds"]):
            return "cpu"
        return "killed" if signum else "exited"

    def over_limit(self) -> str | None:
        """Return the limit that all processes together exceed, or ``None``."""
        running = self.processes()
        if not self.alone and len(running) > self.limits["processes"]:  # otherwise the kernel enforces it
            return "processes"
        spent = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        spent += sum(cpu for _, cpu in running.values())
        if spent > self.limits["cpu_seconds"]:
            return "cpu"
        allowed = self.limits["memory_mb"] << 20
        files = files_bytes(self.order["home"]) if self.order["own_disk"] else 0
        if files + sum(map(resident_bytes, running)) <= allowed:
            return None  # an upper bound: shared pages are counted once per process
        return "memory" if files + sum(map(proportional_bytes, running)) > allowed else None

    def processes(self) -> dict[int, tuple[int, float]]:
        """Return parent and CPU seconds of all other processes; outside a PID namespace only of descendants."""
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
        """Kill all processes that the command started, and wait for their end."""
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
        """Clean up and exit without a report: the process outside is gone."""
        self.end_all()
        if not self.alone:
            import shutil  # needed only here: with a namespace the folder disappears by itself

            os.chdir("/")
            shutil.rmtree(self.order["folder"], ignore_errors=True)
        os._exit(0)


def limit_resource(name: str, value: int) -> None:
    """Set a hard limit of this process; never raises a lower limit."""
    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    # a second between soft and hard limit of CPU time, so that the soft limit's signal identifies the reason
    resource.setrlimit(kind, (value, value + 1 if name == "RLIMIT_CPU" and value != hard else value))


def files_bytes(folder: str) -> int:
    """Return the memory of the temporary files, including empty ones."""
    disk = os.statvfs(folder)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize + (disk.f_files - disk.f_ffree) * INODE_BYTES


def resident_bytes(pid: int) -> int:
    """Return a process's resident memory in bytes, shared pages in full."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0  # the process has ended


def proportional_bytes(pid: int) -> int:
    """Return a process's proportional share of memory in bytes; if unreadable, its resident memory."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return resident_bytes(pid)


def main() -> None:
    """Execute the order and report how the command ended."""
    supervisor = Supervisor(read_order())
    order = supervisor.order
    supervisor.settle()
    supervisor.write_files()
    os.write(2, f"{order['begin']}\n".encode())
    started = time.monotonic()
    try:
        problem = supervisor.start()
        ended = "not_started" if problem is not None else supervisor.watch()
    except OSError as error:  # the machine failed, or a limit cannot be set
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
    except Exception as error:  # reported outside as the reason why the sandbox is unavailable
        sys.exit(f"sandbox: {type(error).__name__}: {error}")
