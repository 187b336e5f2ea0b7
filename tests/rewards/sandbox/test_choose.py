import asyncio
import tempfile
from dataclasses import replace

import pytest

from agentrl.rewards.sandbox import Ended, Execution, Isolation, Limits, SandboxUnavailableError, choose, make_sandbox
from agentrl.rewards.sandbox.backends import Unisolated
from agentrl.rewards.sandbox.layout import machine_layout
from agentrl.rewards.sandbox.protocol import Sandbox


@pytest.fixture(autouse=True)
def nothing_tried_yet(monkeypatch, tmp_path):
    monkeypatch.setattr(choose, "_probed", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # nobody removes what a pretender leaves


def missing(isolation, layout, image):
    raise SandboxUnavailableError(f"{isolation} is missing")


class Pretender(Unisolated):
    """Says that it isolates, and does not."""

    isolation = Isolation.NAMESPACES

    def launch(self, limits):
        return replace(super().launch(limits), isolation=Isolation.NONE)


async def test_a_supervisor_that_is_not_the_first_process_starts_nothing(monkeypatch):
    def launch(self, limits):
        return replace(Unisolated.launch(self, limits), isolation=Isolation.NAMESPACES)

    monkeypatch.setattr(Pretender, "launch", launch)
    sandbox = choose.BackendSandbox(Pretender(machine_layout()), Limits(), at_once=1)
    with pytest.raises(SandboxUnavailableError, match="is not the first of its namespace"):
        await sandbox.run(["true"])


async def test_without_any_isolation_the_error_says_what_was_tried_and_how_to_get_it(monkeypatch):
    monkeypatch.setattr(choose, "find_backend", missing)
    with pytest.raises(SandboxUnavailableError) as raised:
        await make_sandbox(image="python:test")
    text = str(raised.value)
    for word in ("bubblewrap is missing", "namespaces is missing", "docker is missing", "podman is missing"):
        assert word in text
    assert "apt install bubblewrap" in text
    assert "docker pull python:test" in text
    assert "none is missing" not in text


async def test_a_sandbox_that_does_not_hold_is_refused(monkeypatch):
    monkeypatch.setattr(choose, "find_backend", lambda isolation, layout, image: Pretender(layout))
    with pytest.raises(SandboxUnavailableError) as raised:
        await make_sandbox("namespaces")
    assert "does not isolate" in str(raised.value)
    assert "it can make a socket" in str(raised.value)
    assert "it sees processes from outside" in str(raised.value)


async def test_the_next_one_is_taken_where_the_first_does_not_work(monkeypatch):
    tried = []

    def find(isolation, layout, image):
        tried.append(isolation)
        return missing(isolation, layout, image) if len(tried) == 1 else Pretender(layout)

    async def works(sandbox):
        return None

    monkeypatch.setattr(choose, "find_backend", find)
    monkeypatch.setattr(choose, "_attempt", works)
    assert (await make_sandbox()).isolation is Isolation.NAMESPACES
    assert tried == [Isolation.BUBBLEWRAP, Isolation.NAMESPACES]


async def test_none_is_given_only_by_name_and_says_so():
    sandbox: Sandbox = await make_sandbox("none")
    assert sandbox.isolation is Isolation.NONE
    assert (await sandbox.run(["true"])).isolation is Isolation.NONE
    assert Isolation.NONE not in choose.AUTOMATIC


async def test_a_sandbox_is_tried_once_in_a_process(monkeypatch):
    tried = []

    async def attempt(sandbox):
        tried.append(sandbox.isolation)

    monkeypatch.setattr(choose, "_attempt", attempt)
    for _ in range(3):
        await make_sandbox("namespaces")
    assert tried == [Isolation.NAMESPACES]


@pytest.mark.parametrize(("name", "said"), [("bublewrap", "did you mean 'bubblewrap'"), ("x", "auto, bubblewrap")])
async def test_an_unknown_backend_is_an_error(name, said):
    with pytest.raises(ValueError, match=said):
        await make_sandbox(name)


async def test_at_most_so_many_run_at_once(monkeypatch):
    running, most, full, release = 0, 0, asyncio.Event(), asyncio.Event()

    async def execute(launch, command, files, stdin, limits):
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            full.set()
        await release.wait()
        running -= 1
        return Execution("", "", 0, Ended.EXITED, 0.0, launch.isolation)

    monkeypatch.setattr(choose, "execute", execute)
    sandbox = choose.BackendSandbox(Pretender(machine_layout()), Limits(), at_once=3)
    runs = [asyncio.create_task(sandbox.run(["true"])) for _ in range(10)]
    await full.wait()
    assert running == 3
    release.set()
    await asyncio.gather(*runs)
    assert most == 3


async def test_at_once_must_let_one_run():
    with pytest.raises(ValueError, match="at_once=0"):
        await make_sandbox(at_once=0)


def test_a_sandbox_works_in_one_event_loop_after_another():
    sandbox = asyncio.run(make_sandbox("none", at_once=1))

    async def two():
        return await asyncio.gather(sandbox.run(["true"]), sandbox.run(["true"]))

    for _ in range(2):
        assert [execution.exit_code for execution in asyncio.run(two())] == [0, 0]
