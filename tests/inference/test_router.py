"""The router: sticky, balanced, and servers that die, hang, come back and leave."""

import asyncio

import pytest

from agentrl.inference.backend import Generation, SamplingParams, ServerUnreachable
from agentrl.inference.router import MISSED_PROBES, Lease, NoServer, Router
from tests.inference.fakes import FakeBackend, answer

PARAMS = SamplingParams(max_new_tokens=4)


def servers(count: int) -> list[FakeBackend]:
    return [FakeBackend(lambda ids, params: answer([7]), f"http://{index}") for index in range(count)]


async def ask(lease: Lease) -> Generation:
    return await lease.generate([1, 2], PARAMS, request_id="r")


async def test_an_episode_stays_on_its_server_and_episodes_are_spread() -> None:
    backends = servers(3)
    router = Router(backends)
    leases = [router.lease() for _ in range(6)]
    for _ in range(3):
        for lease in leases:
            await ask(lease)
    assert [len(backend.requests) for backend in backends] == [6, 6, 6]
    assert len({lease.url for lease in leases}) == 3
    for lease in leases:
        lease.release()
    assert [status.sessions for status in router.status()] == [0, 0, 0]


async def test_requests_of_a_server_that_dies_go_to_another_one() -> None:
    backends = servers(2)
    router = Router(backends)
    lease = router.lease()
    await ask(lease)
    backends[0].dead = True
    assert (await ask(lease)).token_ids == [7]
    assert lease.url == "http://1"
    assert [status.state for status in router.status()] == ["gone", "serving"]
    assert "is dead" in router.status()[0].error


async def test_a_hanging_server_is_noticed_by_its_probes_and_its_requests_move() -> None:
    backends = servers(2)
    router = Router(backends)
    backends[0].held = asyncio.Event()  # takes the request and never answers
    request = asyncio.create_task(ask(router.lease()))
    while not backends[0].requests:
        await asyncio.sleep(0)
    backends[0].dead = True
    for _ in range(MISSED_PROBES - 1):
        await router.probe()
    assert not request.done() and len(router.backends) == 2, "one missed probe is no death"
    await router.probe()
    assert (await request).token_ids == [7]
    assert len(backends[1].requests) == 1


async def test_a_connection_that_broke_is_tried_once_more_where_the_server_lives() -> None:
    (backend,) = servers(1)
    script, calls = backend.script, iter([True, False])

    def breaks_once(ids: list[int], params: SamplingParams) -> Generation:
        if next(calls):
            raise ServerUnreachable("connection reset")
        return script(ids, params)

    backend.script = breaks_once
    assert (await ask(Router([backend]).lease())).token_ids == [7]


async def test_a_connection_that_always_breaks_is_the_requests_error() -> None:
    (backend,) = servers(1)

    def breaks(ids: list[int], params: SamplingParams) -> Generation:
        raise ServerUnreachable("connection reset")

    backend.script = breaks
    router = Router([backend])
    with pytest.raises(ServerUnreachable, match="connection reset"):
        await ask(router.lease())
    assert router.backends == [backend]


async def test_without_a_server_the_wait_is_bounded_and_says_what_became_of_each() -> None:
    (backend,) = servers(1)
    backend.dead = True
    with pytest.raises(NoServer, match="http://0 gone: http://0 is dead"):
        await ask(Router([backend], patience=0.01).lease())


async def test_a_request_waits_for_a_server_that_arrives() -> None:
    router = Router([])
    request = asyncio.create_task(ask(router.lease()))
    await asyncio.sleep(0)
    router.admit(servers(1)[0])
    assert (await request).token_ids == [7]


async def test_a_removed_server_keeps_what_runs_and_gets_nothing_new() -> None:
    backends = servers(2)
    router = Router(backends)
    lease = router.lease()
    backends[0].held = asyncio.Event()
    running = asyncio.create_task(ask(lease))
    while not backends[0].requests:
        await asyncio.sleep(0)
    router.remove("http://0")
    backends[0].held.set()
    assert (await running).token_ids == [7]
    await ask(lease)
    assert lease.url == "http://1"
    with pytest.raises(LookupError, match="http://9"):
        router.remove("http://9")


async def test_a_server_that_is_back_is_brought_up_to_date_before_it_serves() -> None:
    backends = servers(2)
    router = Router(backends)
    backends[0].dead = True
    await ask(router.lease())
    backends[0].dead = False
    rejoined = []

    async def rejoin(backend: object) -> None:
        rejoined.append(backend)
        router.admit(backends[0])

    router.rejoin = rejoin
    await router.probe()
    assert rejoined == [backends[0]]
    assert [status.state for status in router.status()] == ["serving", "serving"]
    assert router.status()[0].sessions == 0, "a lease that moved away still counts"


async def test_a_server_that_waits_for_weights_does_not_hold_up_the_probes_of_the_others() -> None:
    backends = servers(2)
    router = Router(backends, probe_seconds=0.01)
    backends[0].dead = True
    await ask(router.lease())
    backends[0].dead = False
    never = asyncio.Event()
    calls = []

    async def rejoin(backend: object) -> None:
        calls.append(backend)
        await never.wait()

    router.rejoin = rejoin
    await router.probe()
    backends[1].dead = True
    for _ in range(3):
        await router.probe()
    assert calls == [backends[0]], "asked again while it waits"
    assert [status.state for status in router.status()] == ["gone", "gone"]
    backends[1].dead = False
    await router.close()


class TimesOut(FakeBackend):
    """Answers a number of its first requests too late, and lives."""

    def __init__(self, url: str, late: int) -> None:
        super().__init__(lambda ids, params: answer([7]), url)
        self.late = late

    async def generate(self, token_ids: list[int], params: SamplingParams, *, request_id: str) -> Generation:
        found = await super().generate(token_ids, params, request_id=request_id)
        if len(self.requests) <= self.late:
            raise ServerUnreachable(f"{self.url}: no answer within 600 s", timed_out=True)
        return found


async def test_a_request_that_was_not_answered_in_time_is_sent_once_more_to_the_least_loaded_server() -> None:
    slow, other = TimesOut("http://0", 1), TimesOut("http://1", 0)
    router = Router([slow, other])
    lease, beside = router.lease(), router.lease()
    assert (await ask(lease)).token_ids == [7] and len(slow.requests) == 2 and not other.requests
    slow.late = 9
    router._servers[slow.url].sessions += 1  # another episode
    assert (await ask(lease)).token_ids == [7] and lease.url == other.url
    assert [status.state for status in router.status()] == ["serving", "serving"], "a slow server is not gone"
    lease.release()
    beside.release()
    assert [status.sessions for status in router.status()] == [1, 0]


async def test_a_request_that_takes_too_long_twice_fails() -> None:
    slow = TimesOut("http://0", 9)
    lease = Router([slow]).lease()
    with pytest.raises(ServerUnreachable, match="no answer within 600 s"):
        await ask(lease)
    assert len(slow.requests) == 2
    once = TimesOut("http://1", 1)
    assert (await ask(Router([once]).lease())).token_ids == [7] and len(once.requests) == 2
