import asyncio
import os
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest

from agentrl.rewards.sandbox import Isolation, Limits, SandboxUnavailableError, make_sandbox

ISOLATED = [isolation for isolation in Isolation if isolation is not Isolation.NONE]
LIMITS = Limits(seconds=20, cpu_seconds=20, memory_mb=256, disk_mb=8, file_mb=4, processes=12)


@pytest.fixture(params=ISOLATED)
async def sandbox(request):
    """Every isolation of this machine."""
    return await sandbox_or_skip(request.param)


@pytest.fixture(params=list(Isolation))
async def any_sandbox(request):
    """Every isolation of this machine, and none."""
    return await sandbox_or_skip(request.param)


async def sandbox_or_skip(isolation):
    try:
        return await make_sandbox(isolation, limits=LIMITS)
    except SandboxUnavailableError as error:
        pytest.skip(str(error).splitlines()[1].strip())


class Marker:
    """A word in a command line, by which its processes are found from outside, in whatever namespace they are."""

    def __init__(self):
        self.word = f"marker-{uuid.uuid4().hex}"

    def processes(self):
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if self.word.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    async def wait_for(self, count):
        async with asyncio.timeout(60):
            while len(self.processes()) < count if count else self.processes():
                await asyncio.sleep(0.01)


@pytest.fixture
def marker():
    return Marker()


@pytest.fixture
def leaves_nothing(tmp_path, monkeypatch):
    """What a run could leave on the machine is as before; its folders lie apart from those of tests beside this one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def state():
        children = {child.pid for child in psutil.Process().children(recursive=True)}
        folders = {path.name for path in tmp_path.glob("agentrl-sandbox-*")}
        return children, folders, Path("/proc/self/mountinfo").read_text(), set(os.listdir("/proc/self/fd"))

    before = state()
    yield
    after = state()
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert after[2] == before[2]
    assert len(after[3]) <= len(before[3])
