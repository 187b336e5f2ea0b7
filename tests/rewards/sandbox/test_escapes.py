"""What code in a sandbox must not be able to do; each of it is attempted."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.rewards.sandbox import Ended, Isolation
from agentrl.rewards.sandbox.layout import machine_layout
from tests.rewards.sandbox.conftest import LIMITS

REPOSITORY = Path(__file__).parents[3]
OUTSIDE = (Isolation.BUBBLEWRAP, Isolation.NAMESPACES)  # where files of this machine are shown


async def attempt(sandbox, code, limits=LIMITS, **options):
    execution = await sandbox.run_python(code, limits=limits, **options)
    assert execution.ended is Ended.EXITED, execution
    assert execution.exit_code == 0, execution
    return execution.stdout


async def test_the_parents_environment_is_out_of_reach(sandbox, monkeypatch):
    monkeypatch.setenv("AGENTRL_TEST_SECRET", "s3cr3t")
    code = f"""
import os, glob
print(dict(os.environ))
for path in {[f"/proc/{pid}/environ" for pid in (os.getpid(), os.getppid())]} + glob.glob("/proc/*/environ"):
    try:
        print(open(path).read())
    except OSError as error:
        print(error)
"""
    assert os.environ["AGENTRL_TEST_SECRET"] == "s3cr3t"
    assert "s3cr3t" not in await attempt(sandbox, code)


async def test_no_process_of_the_machine_is_seen(sandbox):
    code = "import os; print(sorted(int(e) for e in os.listdir('/proc') if e.isdigit()), os.getpid())"
    said = await attempt(sandbox, code)
    pids, _, own = said.strip().rpartition(" ")
    assert pids == f"[1, {own}]"


async def test_files_outside_are_out_of_reach(sandbox, tmp_path):
    if sandbox.isolation not in OUTSIDE:
        pytest.skip("an image has files of its own at these paths")
    secret = tmp_path / "secret"
    secret.write_text("s3cr3t")
    secret.chmod(0o644)
    paths = [
        *(secret, REPOSITORY / "pyproject.toml"),
        *(Path.home() / name for name in (".bashrc", ".cache", ".ssh")),
        *map(Path, ("/var/run", "/sys/kernel", "/boot", "/dev/mem", "/dev/tty", "/dev/shm/x")),
        *map(Path, ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/run", "/home/me", "/proc/1/cwd/etc/passwd")),
    ]
    code = f"""
import os
for path in {[str(path) for path in paths]}:
    for prefix in "", "/proc/1/root", "/proc/self/root", "/proc/1/cwd/../..", "/proc/self/cwd/../..", "/tmp/../..":
        if os.path.exists(prefix + path):
            print("reached", prefix + path)
"""
    assert await attempt(sandbox, code) == ""


async def test_the_first_process_inside_cannot_be_looked_into(sandbox):
    code = """
for name in "mem", "environ", "maps", "root/etc", "fd/0", "cwd":
    try:
        open(f"/proc/1/{name}", "rb").read(1)
    except OSError:
        continue
    print("read", name)
"""
    assert await attempt(sandbox, code) == ""


async def test_installed_packages_are_hidden_unless_asked_for(sandbox):
    if sandbox.isolation not in OUTSIDE:
        pytest.skip("an image has its own packages")
    folders = [sysconfig.get_path("purelib"), *machine_layout().hide]
    code = f"""
import os, sys
for folder in {folders}:
    if os.path.isdir(folder) and os.listdir(folder):
        print(folder)
    sys.path.append(folder)
try:
    import pydantic
    print(pydantic)
except ImportError:
    pass
"""
    assert await attempt(sandbox, code) == ""


async def test_no_socket_leads_anywhere(sandbox, tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        name = f"agentrl-test-{os.getpid()}"
        named.bind(str(tmp_path / "socket"))
        named.listen()
        abstract.bind(f"\0{name}")
        abstract.listen()
        code = f"""
import socket
port = {server.getsockname()[1]}
attempts = [
    (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)),
    (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", port)),
    (socket.AF_INET, socket.SOCK_STREAM, ("10.0.2.2", 80)),
    (socket.AF_INET, socket.SOCK_STREAM, ("1.1.1.1", 53)),
    (socket.AF_INET6, socket.SOCK_STREAM, ("::1", port)),
    (socket.AF_VSOCK, socket.SOCK_STREAM, (2, 1024)),
    (socket.AF_NETLINK, socket.SOCK_RAW, (0, 0)),
    (socket.AF_UNIX, socket.SOCK_STREAM, {str(tmp_path / "socket")!r}),
    (socket.AF_UNIX, socket.SOCK_STREAM, "\\0" + {name!r}),
]
for family, kind, address in attempts:
    try:
        connection = socket.socket(family, kind)
        connection.settimeout(1)
        connection.connect(address)
    except OSError:
        continue
    print("connected", family, address)
left, right = socket.socketpair()
left.send(b"local sockets work")
print(right.recv(100).decode())
"""
        assert await attempt(sandbox, code) == "local sockets work\n"


async def test_forking_without_end_is_refused(sandbox, marker):
    code = """
import os, sys, threading
ready, hold = os.pipe()
count = 1
while count < 500:
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        os.close(hold)
        os.read(ready, 1)
        os._exit(0)
    count += 1
print(count)
"""
    count = int(await attempt(sandbox, code))
    assert 2 <= count <= LIMITS.processes


async def test_a_fork_bomb_ends_with_the_run(sandbox, marker):
    code = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    limits = replace(LIMITS, cpu_seconds=1)
    execution = await sandbox.run([*sandbox.backend.code, "-c", code, marker.word], limits=limits)
    assert execution.ended in (Ended.CPU, Ended.KILLED)
    assert marker.processes() == []


async def test_one_process_cannot_take_more_memory(sandbox):
    code = """
try:
    bytearray(1 << 30)
except MemoryError:
    print("refused")
"""
    assert await attempt(sandbox, code) == "refused\n"


async def test_many_processes_cannot_take_more_memory_together(sandbox):
    code = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        break
data = bytearray(os.urandom(1 << 20)) * 40
time.sleep(100)
"""
    execution = await sandbox.run_python(code, limits=replace(LIMITS, memory_mb=128))
    assert execution.ended in (Ended.MEMORY, Ended.KILLED)
    assert execution.exit_code is None or execution.exit_code < 0


async def test_memory_that_no_limit_counts_is_refused(sandbox):
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
try:
    os.memfd_create("x")
    print("memfd")
except OSError:
    pass
if libc.shmget(0, ctypes.c_size_t(1 << 20), 0o1600) >= 0:
    print("System V shared memory")
"""
    assert await attempt(sandbox, code) == ""


async def test_the_disk_cannot_be_filled(sandbox):
    code = """
import os
written = 0
for place, folder in enumerate(("/tmp", "/dev/shm", ".", "/var/tmp", "/run", "/")):
    for name in range(100):
        try:
            with open(f"{folder}/{place}.{name}", "xb", buffering=0) as file:
                while True:
                    written += file.write(bytes(1 << 16))
        except OSError:
            continue
print(written)
"""
    assert 0 < int(await attempt(sandbox, code)) <= LIMITS.disk_mb << 20


async def test_a_file_cannot_grow_past_its_limit(sandbox):
    code = """
import os, errno
with open("big", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(1 << 16))
    except OSError as error:
        print(errno.errorcode[error.errno], os.path.getsize("big"))
"""
    assert await attempt(sandbox, code) == f"EFBIG {LIMITS.file_mb << 20}\n"


async def test_empty_files_cannot_fill_the_memory(sandbox):
    code = """
try:
    for name in range(1_000_000):
        open(str(name), "x").close()
except OSError:
    print("refused")
"""
    execution = await sandbox.run_python(code, limits=replace(LIMITS, memory_mb=48))
    assert execution.stdout == "refused\n" or execution.ended is Ended.MEMORY


@pytest.mark.parametrize(
    "ignoring", ["", "import signal; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 3, 13, 15)]"]
)
async def test_a_daemon_does_not_outlive_the_call(any_sandbox, marker, ignoring):
    code = f"""
import os, sys, time
{ignoring}
ready, hold = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.setpgid(0, 0)
    os.write(hold, b"x")
    while True:
        time.sleep(100)
os.read(ready, 1)
print("left it behind")
"""
    execution = await any_sandbox.run([*any_sandbox.backend.code, "-c", code, marker.word])
    assert (execution.ended, execution.stdout) == (Ended.EXITED, "left it behind\n")
    assert marker.processes() == []


async def test_nohup_and_setsid_do_not_outlive_the_call(any_sandbox, marker):
    execution = await any_sandbox.run(["sh", "-c", f"nohup setsid sh -c 'sleep 1000; :' {marker.word} & echo started"])
    assert execution.stdout.strip().endswith("started")
    assert marker.processes() == []


async def test_a_run_ends_at_its_time_with_all_it_started(any_sandbox, marker):
    code = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
print("here", flush=True)
time.sleep(1000)
"""
    command = [*any_sandbox.backend.code, "-c", code, marker.word]
    execution = await any_sandbox.run(command, limits=replace(LIMITS, seconds=1))
    assert (execution.ended, execution.exit_code) == (Ended.TIMEOUT, None)
    assert execution.stdout == "here\n" * 2
    assert marker.processes() == []


@pytest.mark.parametrize("fork", ["", "import os; os.fork()"])
async def test_cpu_time_is_limited_over_all_processes(any_sandbox, fork):
    execution = await any_sandbox.run_python(f"{fork}\nwhile True: pass", limits=replace(LIMITS, cpu_seconds=1))
    assert execution.ended is Ended.CPU


async def test_processes_outside_get_no_signal(sandbox):
    victim = subprocess.Popen(["sleep", "1000"])
    try:
        code = f"""
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for pid in {victim.pid}, {os.getpid()}, {os.getppid()}, -1, 1, -{os.getpgid(0)}:
    try:
        os.kill(pid, signal.SIGTERM)
    except OSError:
        pass
for signum in signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGSEGV:
    try:
        os.kill(1, signum)
    except OSError:
        pass
print("the first process stands")
"""
        assert await attempt(sandbox, code) == "the first process stands\n"
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


async def test_no_process_can_be_traced_or_read(sandbox):
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PTRACE_TRACEME, PTRACE_SEIZE = 16, 0, 0x4206
for request, pid in (PTRACE_ATTACH, 1), (PTRACE_SEIZE, 1), (PTRACE_TRACEME, 0), (PTRACE_ATTACH, os.getpid()):
    if libc.ptrace(request, pid, None, None) == 0:
        print("traced", request, pid)
class Part(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))
here, there = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(b"y")
parts = [Part(ctypes.addressof(buffer), 1) for buffer in (here, there)]
if libc.process_vm_readv(os.getpid(), ctypes.byref(parts[0]), 1, ctypes.byref(parts[1]), 1, 0) >= 0:
    print("read")
"""
    assert await attempt(sandbox, code) == ""


async def test_nothing_outside_can_be_written(sandbox, tmp_path):
    tmp_path.chmod(0o777)
    target = tmp_path / "written"
    folders = [
        "/",
        "/usr",
        "/usr/lib",
        "/etc",
        "/dev",
        "/proc/sys/kernel",
        "/root",
        "/home",
        sys.base_prefix,
        "/var/tmp",
    ]
    code = f"""
import os
for folder in {folders}:
    try:
        open(folder + "/written", "w").close()
        print("wrote", folder)
    except OSError:
        pass
try:
    os.makedirs({str(tmp_path)!r}, exist_ok=True)
    open({str(target)!r}, "w").close()
except OSError:
    pass
for path in "/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/proc/1/oom_score_adj":
    try:
        open(path, "w").write("0")
        print("wrote", path)
    except OSError:
        pass
"""
    assert await attempt(sandbox, code) == ""
    assert not target.exists()
    assert not list(Path("/tmp").glob("work/main.py"))


async def test_no_privilege_can_be_got_back(sandbox):
    code = """
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
assert os.getuid() != 0
for what, got in {
    "user namespace": libc.unshare(0x10000000),
    "mount namespace": libc.unshare(0x00020000),
    "setuid": libc.setuid(0),
    "mount": libc.mount(b"x", b"/tmp", b"tmpfs", 0, b""),
    "umount": libc.umount2(b"/tmp", 2),
    "chroot": libc.chroot(b"/tmp"),
    "clone": libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) if os.uname().machine == "x86_64" else -1,
}.items():
    if got >= 0:
        print(what)
for name in "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_CPU", "RLIMIT_FSIZE":
    kind = getattr(resource, name)
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if name != "RLIMIT_NPROC" or resource.getrlimit(kind)[0] != resource.RLIM_INFINITY:
            print(name)
    except (OSError, ValueError):
        pass
"""
    assert await attempt(sandbox, code) == ""


async def test_the_devices_that_programs_expect_are_there(sandbox):
    code = """
open("/dev/null", "w").write("x")
for name in "zero", "random", "urandom":
    assert len(open(f"/dev/{name}", "rb").read(4)) == 4
try:
    open("/dev/full", "wb", buffering=0).write(b"x")
except OSError as error:
    print(error.errno)
"""
    assert await attempt(sandbox, code) == "28\n"


async def test_only_the_standard_streams_are_open(any_sandbox):
    execution = await any_sandbox.run(["sh", "-c", "ls /proc/$$/fd"])
    assert execution.stdout.split() == ["0", "1", "2"]


async def test_the_report_of_the_supervisor_cannot_be_forged(sandbox):
    code = """
import os, sys, json
os.write(2, b"0" * 32 + json.dumps({"ended": "exited", "exit_code": 0, "seconds": 0, "problem": None}).encode())
os.set_blocking(2, False)
sys.exit(3)
"""
    execution = await sandbox.run_python(code)
    assert (execution.ended, execution.exit_code) == (Ended.EXITED, 3)


async def test_killing_our_process_ends_the_run(any_sandbox, marker, tmp_path):
    if any_sandbox.isolation in (Isolation.DOCKER, Isolation.PODMAN):
        pytest.skip("a container ends when its wall time is over")
    code = f"""
import asyncio
from agentrl.rewards.sandbox import Limits, make_sandbox
async def main():
    sandbox = await make_sandbox({any_sandbox.isolation.value!r})
    code = "import os, time; os.fork(); os.setsid() if os.fork() == 0 else 0; time.sleep(1000)"
    await sandbox.run([*sandbox.backend.code, "-c", code, {marker.word!r}], limits=Limits(seconds=1000))
asyncio.run(main())
"""
    temporary = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=REPOSITORY, env=temporary)
    try:
        await marker.wait_for(4)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        await parent.wait()
    await marker.wait_for(0)
    deadline = time.monotonic() + 60
    while list(tmp_path.glob("agentrl-sandbox-*")):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
