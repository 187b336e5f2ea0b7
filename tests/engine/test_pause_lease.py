"""A pause whose client died ends by itself, at its lease's end and not before; a fake clock decides when."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agentrl.engine.engine import Engine
from agentrl.engine.model import load_model
from agentrl.engine.pause_lease import HeldError
from agentrl.engine.runner import ModelRunner
from agentrl.inference.kinds import embedded
from agentrl.inference.kinds.embedded import EmbeddedBackend
from agentrl.weights.pauses import Pauses
from tests.engine.driving import SECONDS, Driver


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def still(tiny: Path, clock: Clock) -> Iterator[Driver]:
    """An engine that makes a turn only when it is told to."""
    engine = Engine(lambda: ModelRunner(load_model(str(tiny), "float32", "cpu"), 4), max_running=4, clock=clock)
    engine.build()
    yield Driver(engine)


def test_a_pause_that_nobody_renews_ends_with_its_lease_and_held_requests_go_on(still: Driver, clock: Clock) -> None:
    engine = still.engine
    engine.pause("retract", "run-1", 20.0)
    engine.turn()
    held = still.make([1, 2])
    engine.submit([held])
    clock.now += 19.9
    engine.turn()
    assert engine.paused and held.output == []
    clock.now += 0.1
    while held.finish is None:
        engine.turn()
    assert not engine.paused and len(held.output) == 8
    assert engine.lease.left() is None and engine.lease.holder == ""


def test_a_renewed_pause_goes_on_and_one_that_ended_cannot_be_renewed(still: Driver, clock: Clock) -> None:
    engine = still.engine
    engine.pause("retract", "run-1", 20.0)
    engine.turn()
    clock.now += 15.0
    engine.lease.renew("run-1", 20.0)
    clock.now += 15.0
    engine.turn()
    assert engine.paused
    clock.now += 5.0
    engine.turn()
    assert not engine.paused
    with pytest.raises(HeldError, match="run-1 holds no pause any more"):
        engine.lease.renew("run-1", 20.0)


def test_a_renewal_that_waits_behind_a_long_command_comes_in_time(still: Driver, clock: Clock) -> None:
    """A load may take longer than the lease; what arrived meanwhile counts before the lease is looked at."""
    engine = still.engine
    engine.pause("retract", "run-1", 20.0)
    engine.turn()

    def load() -> None:
        clock.now += 60.0

    engine.call(load)
    engine.call(lambda: engine.lease.renew("run-1", 20.0))
    engine.turn()
    assert engine.paused


def test_a_pause_without_a_lease_lasts(still: Driver, clock: Clock) -> None:
    still.engine.pause("retract")
    still.engine.turn()
    clock.now += 1e9
    still.engine.turn()
    assert still.engine.paused


def test_the_blocked_loop_wakes_at_the_end_of_the_lease(driver: Driver) -> None:
    """With the real clock: nothing is sent to the engine after the pause but the request that waits for its end."""
    driver.engine.pause("retract", "run-1", 0.05).result(SECONDS)
    (request,) = driver.run(driver.make([1, 2]))
    assert len(request.output) == 8


def test_over_http_a_running_lease_keeps_other_holders_out(client: httpx.Client) -> None:
    held = {"mode": "retract", "lease_seconds": 600, "holder": "run-1"}
    assert client.post("/pause_generation", json=held).status_code == 200
    info = client.get("/server_info").json()
    assert info["paused"] and info["pause_holder"] == "run-1" and 590 < info["pause_lease_seconds"] <= 600
    for path, body in (
        ("/pause_generation", held | {"holder": "run-2"}),
        ("/renew_pause", {"holder": "run-2", "lease_seconds": 9}),
        ("/continue_generation", {"holder": "run-2"}),
    ):
        refused = client.post(path, json=body)
        assert (refused.status_code == 409 and "run-1" in refused.text) or "run-2 holds no pause" in refused.text
    assert client.post("/renew_pause", json={"holder": "run-1", "lease_seconds": 9}).status_code == 200
    assert client.post("/continue_generation", json={}).status_code == 200, "a client that names no holder may resume"
    assert not client.get("/server_info").json()["paused"]
    assert client.post("/renew_pause", json={"holder": "run-1", "lease_seconds": 9}).status_code == 409


@pytest.mark.parametrize("lease", [0, -1, "long", True])
def test_a_lease_of_no_length_is_refused(client: httpx.Client, lease: object) -> None:
    refused = client.post("/pause_generation", json={"lease_seconds": lease, "holder": "x"})
    assert refused.status_code == 400 and "lease_seconds" in refused.text
    assert not client.get("/server_info").json()["paused"]


ASKED = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}


def test_the_clients_of_a_server_whose_run_was_killed_in_a_push_are_answered(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody renews or resumes the pause, as after ``kill -9``; without a lease the request never came back."""
    monkeypatch.setattr(embedded, "PAUSE_SECONDS", 0.05)

    async def run_until_killed() -> None:
        backend = EmbeddedBackend(str(client.base_url), SECONDS)
        await backend.pause("retract")
        await backend.close()

    asyncio.run(run_until_killed())
    assert len(client.post("/generate", json=ASKED).json()["output_ids"]) == 3


def test_a_push_that_takes_longer_than_a_lease_stays_paused_to_its_end(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The renewals come from the run: three of them are waited for."""
    monkeypatch.setattr(embedded, "PAUSE_SECONDS", 2.0)
    monkeypatch.setattr(EmbeddedBackend, "pause_lease", 0.003)  # how often it is renewed

    async def push() -> tuple[bool | None, bool | None]:
        backend, renewals = EmbeddedBackend(str(client.base_url), SECONDS), asyncio.Semaphore(0)
        renew = backend.renew

        async def counted() -> None:
            await renew()
            renewals.release()

        backend.renew = counted  # type: ignore[method-assign]
        pauses = Pauses()
        await pauses.pause(backend, "retract")
        for _ in range(3):
            await renewals.acquire()
        during = await backend.paused()
        await pauses.resume(backend)
        after = await backend.paused()
        await pauses.close()
        await backend.close()
        return during, after

    assert asyncio.run(push()) == (True, False)
