"""Pauses: renewed while a push goes on, counted, noted, and ended however the run ends."""

import asyncio

import pytest

from agentrl.core.weight_manifest import BroadcastPlan, WeightManifest
from agentrl.inference.backend import InferenceError, PauseMode, ServerUnreachable
from agentrl.inference.router import Router
from agentrl.rollout.server_pool import ServerPool
from agentrl.weights import pauses as pauses_module
from agentrl.weights.pauses import Pauses, until_resumed
from agentrl.weights.transaction import Committed, WeightPushError, WeightTransaction
from tests.inference.fakes import FakeBackend, answer
from tests.rollout.instant import run_virtually
from tests.weights.test_transaction import MANIFEST, SENT


class Clock:
    """A clock that stands still until it is moved."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


def server(url: str = "http://0") -> FakeBackend:
    return FakeBackend(lambda ids, params: answer([1]), url)


def transaction(*backends: FakeBackend, pauses: Pauses | None = None) -> WeightTransaction:
    return WeightTransaction(Router(list(backends)), Committed(2, "/old"), "retract", 10.0, pauses)


async def held_in_load(backend: FakeBackend) -> asyncio.Event:
    """Have the server's next load wait for ever; returns the event of its beginning."""
    begun = asyncio.Event()

    async def load(path: str, version: int) -> None:
        begun.set()
        await asyncio.Event().wait()

    backend.load = load  # type: ignore[method-assign]
    return begun


async def test_a_run_that_ends_in_a_push_resumes_its_servers() -> None:
    """The controller's end cancels the push: before the mending the server stayed paused for ever."""
    backend = server()
    weights = transaction(backend)
    begun = await held_in_load(backend)
    pushing = asyncio.create_task(weights.push(MANIFEST))
    await begun.wait()
    pushing.cancel()
    await asyncio.gather(pushing, return_exceptions=True)
    assert [name for name, _ in backend.calls] == ["pause"]
    await weights.close()
    assert backend.calls[-1] == ("resume", None)


async def test_servers_left_paused_by_a_failed_broadcast_are_resumed_at_the_end() -> None:
    backends = [server("http://0"), server("http://1")]
    weights = transaction(*backends)
    await weights.push(SENT)
    backends[1].refuse = {"receive"}
    with pytest.raises(WeightPushError, match="stay paused"):
        await weights.push(SENT.model_copy(update={"version": 5}))
    await weights.close()
    assert all(backend.calls[-1] == ("resume", None) for backend in backends)


async def test_a_server_that_does_not_answer_at_the_end_is_left_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pauses_module, "END_SECONDS", 0.01)
    backend = server()
    pauses = Pauses()
    await pauses.pause(backend, "retract")

    async def never() -> None:
        await asyncio.Event().wait()

    backend.resume = never  # type: ignore[method-assign]
    await pauses.close()
    assert "http://0 may still be paused" in caplog.text


async def test_a_join_that_is_cancelled_leaves_no_server_paused() -> None:
    newcomer = server("http://new")
    weights = transaction(server())
    begun = await held_in_load(newcomer)
    joining = asyncio.create_task(weights.join(newcomer))
    await begun.wait()
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    assert newcomer.calls[-1] == ("resume", None)


async def test_paused_servers_are_noted_before_they_are_paused_and_until_they_go_on() -> None:
    backend, noted = server(), []
    weights = transaction(backend, pauses=Pauses(lambda urls: noted.append((list(urls), len(backend.calls)))))
    await weights.push(MANIFEST)
    assert noted == [(["http://0"], 0), ([], 4)]


async def test_the_metric_is_the_mean_over_servers_of_the_seconds_paused() -> None:
    clock = Clock()
    backends = [server("http://0"), server("http://1")]
    weights = transaction(*backends, pauses=Pauses(clock=clock))

    async def load(path: str, version: int) -> None:
        clock.now += 2.0

    for backend in backends:
        backend.load = load  # type: ignore[method-assign]
    assert await weights.push(MANIFEST) == {"weights/paused_s": 4.0}


async def test_a_lease_is_renewed_while_the_push_goes_on_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, clock = server(), Clock()
    backend.pause_lease = 0.003
    pauses = Pauses(longest=10.0, clock=clock)
    weights = transaction(backend, pauses=pauses)
    begun = await held_in_load(backend)
    pushing = asyncio.create_task(weights.push(MANIFEST))
    await begun.wait()
    await backend.renewed.wait()
    backend.renewed.clear()
    await backend.renewed.wait()
    clock.now += 11.0  # longer than any push may last
    while not pauses.lost:
        await asyncio.sleep(0)
    renewed = len(backend.calls)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert len(backend.calls) == renewed, "a push that hangs does not hold its servers for ever"
    pushing.cancel()
    await asyncio.gather(pushing, return_exceptions=True)
    await weights.close()
    assert pauses._renewal is not None and pauses._renewal.done()


async def test_a_broadcast_whose_server_went_on_in_the_middle_is_not_committed() -> None:
    """It may have sampled with the values of two versions; a file is loaded in one piece, so there it may go on."""
    backend = server()
    pauses = Pauses()
    weights = transaction(backend, pauses=pauses)

    async def late(*args: object) -> list[str]:
        pauses.lost.add(backend.url)
        return []

    backend.verify = late  # type: ignore[method-assign]
    with pytest.raises(WeightPushError, match="the pause of http://0 ended before the broadcast did"):
        await weights.push(SENT)
    assert weights.committed == Committed(2, "/old")
    await weights.push(MANIFEST)
    assert weights.committed == Committed(3, "/new")


async def test_a_server_found_paused_is_waited_for_and_then_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses_module, "LOOK_SECONDS", 0.001)
    backend = server("http://new")
    router = Router([server()])
    weights = WeightTransaction(router, Committed(2, "/old"), "retract", 10.0)
    backend.held_by_other = True
    await ServerPool(router, weights, lambda url: backend, grace=0.01).add("http://new")
    assert backend.calls == [("pause", "abort"), ("load", ("/old", 2)), ("resume", None)]
    assert [one.url for one in router.backends] == ["http://0", "http://new"]


async def test_whoever_paused_a_server_gets_the_time_of_a_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses_module, "LOOK_SECONDS", 0.001)
    backend, looks = server(), []

    async def paused() -> bool:
        looks.append(1)
        return len(looks) < 4

    backend.paused = paused  # type: ignore[method-assign]
    assert await until_resumed(backend, 60.0)
    assert len(looks) == 4 and backend.calls == []
    backend.held_by_other = True
    del backend.paused
    assert not await until_resumed(backend, 0.01)


async def test_a_lost_renewal_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    backend = server()
    backend.pause_lease = 0.003
    backend.refuse = {"renew"}
    pauses = Pauses()
    await pauses.pause(backend, "retract")
    await backend.renewed.wait()
    assert pauses.lost == {"http://0"} and "could not be renewed: http://0 refuses renew" in caplog.text
    await pauses.close()


async def test_a_server_that_is_taken_out_in_a_push_is_resumed_at_the_end_if_it_lives() -> None:
    """Its connection broke; it may stand paused still, and does not come back before the run ends."""
    backends = [server("http://0"), server("http://1")]
    weights = transaction(*backends)

    async def load(path: str, version: int) -> None:
        raise ServerUnreachable("http://0: ServerDisconnectedError")

    backends[0].load = load  # type: ignore[method-assign]
    await weights.push(MANIFEST)
    assert [name for name, _ in backends[0].calls] == ["pause"]
    await weights.close()
    assert backends[0].calls[-1] == ("resume", None)


class Leased(FakeBackend):
    """A server that goes on by itself when its lease ends, on the loop's clock; it notes what it then samples with."""

    pause_lease = 20.0

    def __init__(self, url: str, seconds: dict[str, float]) -> None:
        super().__init__(lambda ids, params: answer([1]), url)
        self.seconds = seconds  # that a load takes, by path
        self.holds = "/old"
        self.went_on: list[str] = []
        self.lease: asyncio.TimerHandle | None = None

    def _go_on(self) -> None:
        self.lease = None
        self.went_on.append(self.holds)

    def _begin(self) -> None:
        if self.lease is not None:
            self.lease.cancel()
        self.lease = asyncio.get_running_loop().call_later(self.pause_lease or 0.0, self._go_on)

    async def pause(self, mode: PauseMode) -> None:
        await super().pause(mode)
        self._begin()

    async def renew(self) -> None:
        await super().renew()
        if self.lease is None:
            raise InferenceError(f"{self.url} is not paused")
        self._begin()

    async def resume(self) -> None:
        await super().resume()
        if self.lease is not None:
            self.lease.cancel()
            self._go_on()

    async def load(self, path: str, version: int) -> None:
        await super().load(path, version)
        await asyncio.sleep(self.seconds.get(path, 0.0))
        self.holds = path

    async def receive(self, manifest: WeightManifest, plan: BroadcastPlan) -> None:
        self.holds = "half of a broadcast"
        await super().receive(manifest, plan)


async def leased_transaction(*backends: Leased) -> WeightTransaction:
    pauses = Pauses(longest=60.0, clock=asyncio.get_running_loop().time)
    return WeightTransaction(Router(list(backends)), Committed(2, "/old"), "retract", 60.0, pauses)


def test_no_server_goes_on_with_the_new_version_while_the_push_is_rolled_back() -> None:
    """One server hangs until the push is over its time; going back takes the other one longer than its lease."""

    async def work() -> None:
        quick, hangs = Leased("http://0", {"/old": 50.0}), Leased("http://1", {"/new": 1e6})
        weights = await leased_transaction(quick, hangs)
        with pytest.raises(WeightPushError, match="no end within"):
            await weights.push(MANIFEST)
        assert quick.went_on == hangs.went_on == ["/old"]
        await weights.close()

    run_virtually(work())


def test_a_server_whose_pause_was_lost_is_stopped_again_before_the_push_is_rolled_back() -> None:
    async def work() -> None:
        quick, hangs = Leased("http://0", {"/old": 50.0}), Leased("http://1", {"/new": 1e6})
        weights = await leased_transaction(quick, hangs)
        quick.refuse = {"renew"}
        with pytest.raises(WeightPushError, match="no end within"):
            await weights.push(MANIFEST)
        assert [name for name, _ in quick.calls if name in ("pause", "load", "resume")] == [
            "pause", "load", "pause", "load", "resume"
        ]  # fmt: skip
        await weights.close()

    run_virtually(work())


def test_servers_that_a_failed_broadcast_left_with_a_mixture_wait_for_the_trainers_file() -> None:
    """It takes the trainer longer to write than any push may last."""

    async def work() -> None:
        backends = [Leased("http://0", {}), Leased("http://1", {})]
        weights = await leased_transaction(*backends)
        await weights.push(SENT)
        backends[1].refuse = {"receive"}
        with pytest.raises(WeightPushError, match="stay paused"):
            await weights.push(SENT.model_copy(update={"version": 5}))
        await asyncio.sleep(200.0)
        await weights.push(MANIFEST.model_copy(update={"version": 5}))
        assert [one.went_on for one in backends] == [["half of a broadcast", "/new"]] * 2, "the first was whole"
        await weights.close()

    run_virtually(work())
