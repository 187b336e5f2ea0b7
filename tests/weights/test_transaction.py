"""Weight pushes: all servers or none, whatever fails."""

import asyncio

import pytest

from agentrl.core.weight_manifest import BroadcastPlan, WeightManifest
from agentrl.inference.backend import InferenceError, ServerUnreachable
from agentrl.inference.router import Router
from agentrl.weights.transaction import Committed, WeightPushError, WeightTransaction
from tests.inference.fakes import FakeBackend, answer

MANIFEST = WeightManifest(version=3, path="/new", transport="disk", dtype="F32", nbytes=4, fingerprints={"a": "1"})


def make(lease: float = 10.0, patience: float = 60.0) -> tuple[WeightTransaction, list[FakeBackend]]:
    backends = [FakeBackend(lambda ids, params: answer([1]), f"http://{i}") for i in range(2)]
    router = Router(list(backends), patience=patience)
    return WeightTransaction(router, Committed(2, "/old"), "retract", lease), backends


async def test_a_push_pauses_loads_verifies_and_resumes_every_server() -> None:
    transaction, backends = make()
    await transaction.push(MANIFEST)
    for backend in backends:
        assert backend.calls == [("pause", "retract"), ("load", ("/new", 3)), ("verify", 3), ("resume", None)]
    assert transaction.committed == Committed(3, "/new")


async def test_a_version_is_brought_near_before_the_servers_pause_and_loaded_from_there() -> None:
    transaction, backends = make()
    asked: list[tuple[str, str, int]] = []

    async def near(server: str, path: str, version: int) -> str:
        assert not any(backend.calls for backend in backends), "servers sample while it is copied"
        asked.append((server, path, version))
        return f"/near{path}"

    transaction._near = near
    await transaction.push(MANIFEST)
    assert asked == [(backend.url, "/new", 3) for backend in backends]
    for backend in backends:
        assert backend.calls == [("pause", "retract"), ("load", ("/near/new", 3)), ("verify", 3), ("resume", None)]
    assert transaction.committed == Committed(3, "/new"), "the folder that all see"


async def test_servers_go_on_when_a_version_cannot_be_brought_near() -> None:
    transaction, backends = make()

    async def near(server: str, path: str, version: int) -> str:
        raise InferenceError("No space left on device")

    transaction._near = near
    with pytest.raises(WeightPushError, match="version 3 was not taken: No space left on device"):
        await transaction.push(MANIFEST)
    assert [backend.calls for backend in backends] == [[], []] and transaction.committed == Committed(2, "/old")


@pytest.mark.parametrize("wrong", [False, True])
async def test_a_push_of_unchanged_weights_must_leave_what_servers_compute(wrong: bool) -> None:
    backends = [FakeBackend(lambda ids, params: answer([1]), f"http://{i}") for i in range(3)]
    backends[2].dead = True
    transaction = WeightTransaction(Router(list(backends)), Committed(2, "/old"), "retract", 10.0, probe=[5, 6, 7])
    if wrong:
        backends[1].shift_after = "load"
        with pytest.raises(WeightPushError, match=r"changed the logprobs of http://1 \(by 1 nats on average\)"):
            await transaction.push(MANIFEST.model_copy(update={"version": 2}))
        assert backends[0].calls[-1] == backends[1].calls[-1] == ("resume", None)
    else:
        await transaction.push(MANIFEST.model_copy(update={"version": 2}))
    assert backends[0].scored == [([5, 6, 7], 1)] * 2
    await transaction.push(MANIFEST)
    assert backends[0].scored == [([5, 6, 7], 1)] * 2, "new weights change what servers compute"


@pytest.mark.parametrize("failure", ["load", "verify", "values"])
async def test_when_one_server_fails_all_go_back_to_the_committed_version_and_go_on(failure: str) -> None:
    transaction, backends = make()
    if failure == "values":
        backends[1].wrong = ["a"]
    elif failure == "load":
        original = backends[1].load

        async def load(path: str, version: int) -> None:
            backends[1].refuse = {"load"} if path == "/new" else set()
            await original(path, version)

        backends[1].load = load  # type: ignore[method-assign]
    else:
        backends[1].refuse = {"verify"}
    with pytest.raises(WeightPushError, match="version 3 was not taken") as caught:
        await transaction.push(MANIFEST)
    assert ("does it compute in another type than inference.dtype" in str(caught.value)) == (failure == "values")
    assert transaction.committed == Committed(2, "/old")
    for backend in backends:
        assert backend.calls[-2:] == [("load", ("/old", 2)), ("resume", None)]


async def test_a_push_that_outlives_its_lease_is_rolled_back() -> None:
    transaction, backends = make(lease=0.01)
    never = asyncio.Event()
    original = backends[0].load

    async def load(path: str, version: int) -> None:
        if path == "/new":
            await never.wait()
        await original(path, version)

    backends[0].load = load  # type: ignore[method-assign]
    with pytest.raises(WeightPushError, match="lease_seconds"):
        await transaction.push(MANIFEST)
    assert all(backend.calls[-1] == ("resume", None) for backend in backends)


async def test_a_server_that_dies_during_a_push_is_taken_out_and_the_others_get_the_weights() -> None:
    transaction, backends = make()
    backends[0].dead = True
    await transaction.push(MANIFEST)
    assert transaction.committed == Committed(3, "/new")
    assert [call for call, _ in backends[1].calls] == ["pause", "load", "verify", "resume"]
    await transaction.push(MANIFEST.model_copy(update={"version": 4}))
    assert backends[0].calls == [], "a server that is gone is not asked again"


@pytest.mark.parametrize("name", ["pause", "load", "verify", "resume"])
async def test_a_server_that_stands_still_in_a_push_is_left_behind_when_the_probes_find_it(name: str) -> None:
    """It has the connection and answers nothing, as a stopped process does."""
    transaction, backends = make()
    asked = asyncio.Event()

    async def never(*arguments: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    setattr(backends[0], name, never)
    pushing = asyncio.create_task(transaction.push(MANIFEST))
    await asked.wait()
    transaction._router.take_out(backends[0], "no answer to 3 probes in a row")
    await pushing
    assert transaction.committed == Committed(3, "/new")
    assert [call for call, _ in backends[1].calls] == ["pause", "load", "verify", "resume"]


async def test_a_server_that_stands_still_does_not_keep_the_others_from_going_back() -> None:
    transaction, backends = make(lease=0.05)
    original = backends[1].load

    async def load(path: str, version: int) -> None:
        if path == "/new":
            await asyncio.Event().wait()
        await original(path, version)

    async def still(path: str, version: int) -> None:
        transaction._router.take_out(backends[0], "no answer to 3 probes in a row")
        await asyncio.Event().wait()

    backends[0].load, backends[1].load = still, load  # type: ignore[method-assign]
    with pytest.raises(WeightPushError, match="lease_seconds"):
        await transaction.push(MANIFEST)
    assert backends[1].calls[-2:] == [("load", ("/old", 2)), ("resume", None)]


@pytest.mark.parametrize("manifest", ["file", "broadcast"])
async def test_a_push_without_any_server_left_says_what_became_of_each(manifest: str) -> None:
    """A version in a file waits for a server, as long as ``inference.patience``; a broadcast cannot wait."""
    transaction, backends = make(patience=0.01)
    for backend in backends:
        backend.dead = True
    wanted = {
        "file": r"version 3 was not taken: no inference server for 0.01 s \(inference.patience\): http://0 gone: "
        "http://0 is dead; http://1",
        "broadcast": "version 4 was not taken: no inference server is left: http://0: http://0 is dead; http://1",
    }
    with pytest.raises(WeightPushError, match=wanted[manifest]):
        await transaction.push(MANIFEST if manifest == "file" else SENT)


async def rejoin(transaction: WeightTransaction, backend: FakeBackend) -> None:
    """What the router's probe does when a server is back."""
    backend.dead = False
    await transaction.join(backend)


@pytest.mark.parametrize("dies_at", ["pause", "load", "verify", "resume"])
async def test_the_only_server_restarts_in_a_push_and_gets_the_version_when_it_is_back(dies_at: str) -> None:
    backend = FakeBackend(lambda ids, params: answer([1]), "http://only")
    transaction = WeightTransaction(Router([backend], patience=60.0), Committed(2, "/old"), "retract", 10.0)
    gone = asyncio.Event()
    original = backend._control

    def control(name: str, argument: object) -> None:
        if name == dies_at and not gone.is_set():
            backend.dead = True
            gone.set()
        original(name, argument)

    backend._control = control  # type: ignore[method-assign]
    pushing = asyncio.create_task(transaction.push(MANIFEST))
    await gone.wait()
    for _ in range(50):
        await asyncio.sleep(0)
    assert not pushing.done(), "the push waits for the server"
    backend.calls.clear()
    await rejoin(transaction, backend)
    await pushing
    assert backend.calls == [("pause", "abort"), ("load", ("/new", 3)), ("verify", 3), ("resume", None)]
    assert transaction.committed == Committed(3, "/new")


async def test_a_server_that_restarted_so_fast_that_it_answers_again_is_brought_to_the_version() -> None:
    """The connection broke in the load, and the server lives: it holds the weights that it was started with."""
    transaction, backends = make()
    broken = iter([True])

    async def load(path: str, version: int) -> None:
        if next(broken, False):
            raise ServerUnreachable("http://0: ServerDisconnectedError")
        backends[0]._control("load", (path, version))

    backends[0].load = load  # type: ignore[method-assign]
    await transaction.push(MANIFEST)
    assert [b.url for b in transaction._router.backends] == ["http://1"]
    await rejoin(transaction, backends[0])
    assert backends[0].calls[-4:] == [("pause", "abort"), ("load", ("/new", 3)), ("verify", 3), ("resume", None)]


async def test_a_server_that_does_not_take_the_version_when_it_is_back_is_named_when_patience_ends() -> None:
    backend = FakeBackend(lambda ids, params: answer([1]), "http://only")
    backend.dead = True
    router = Router([backend], probe_seconds=0.001, patience=0.05)
    transaction = WeightTransaction(router, Committed(2, "/old"), "retract", 10.0)
    router.rejoin = transaction.join
    pushing = asyncio.create_task(transaction.push(MANIFEST))
    while router.backends:
        await asyncio.sleep(0)
    backend.dead, backend.refuse = False, {"load"}
    await router.probe()
    with pytest.raises(WeightPushError, match=r"inference.patience.*does not take the current weights.*refuses load"):
        await pushing
    assert backend.calls[-1] == ("resume", None), "a server that does not join is not left paused"
    await router.close()


async def test_a_server_that_joins_is_loaded_and_verified_before_it_serves() -> None:
    backend = FakeBackend(lambda ids, params: answer([1]), "http://new")
    router = Router([FakeBackend(lambda ids, params: answer([1]), "http://old")])
    transaction = WeightTransaction(router, Committed(0, "/start"), "retract", 10.0)
    await transaction.push(MANIFEST)
    backend.wrong = ["a"]
    with pytest.raises(InferenceError, match="holds other values"):
        await transaction.join(backend)
    assert [b.url for b in router.backends] == ["http://old"]
    backend.wrong = []
    await transaction.join(backend)
    assert backend.calls[-4:] == [("pause", "abort"), ("load", ("/new", 3)), ("verify", 3), ("resume", None)]
    assert [b.url for b in router.backends] == ["http://old", "http://new"]


PLAN = BroadcastPlan(
    group="g", address="host", port=5, backend="gloo", world_size=3, offsets={"http://0": 1, "http://1": 2}, join=True,
    buckets=(),
)  # fmt: skip
SENT = WeightManifest(version=4, transport="broadcast", dtype="F32", nbytes=4, fingerprints={}, broadcast=PLAN)


async def test_a_broadcast_is_received_by_all_and_committed_without_a_file() -> None:
    transaction, backends = make()
    assert await transaction.members() == {"ranks": {"http://0": 1, "http://1": 1}, "by_file": False}
    await transaction.push(SENT)
    for backend in backends:
        assert [call for call, _ in backend.calls] == ["pause", "receive", "verify", "resume"]
    assert transaction.committed == Committed(4, None)


async def test_a_broadcast_that_fails_leaves_the_servers_paused_until_the_version_comes_by_file() -> None:
    transaction, backends = make()
    await transaction.push(SENT)
    backends[1].refuse = {"receive"}
    with pytest.raises(WeightPushError, match="version 4 was broadcast and cannot be loaded again: the servers stay"):
        await transaction.push(SENT.model_copy(update={"version": 5}))
    assert all(backend.calls[-1][0] != "resume" for backend in backends)
    await transaction.push(MANIFEST.model_copy(update={"version": 5}))
    assert all(backend.calls[-1] == ("resume", None) for backend in backends)
    assert transaction.committed == Committed(5, "/new")


async def test_a_server_that_joins_after_a_broadcast_has_the_next_version_come_by_file() -> None:
    transaction, _ = make()
    newcomer = FakeBackend(lambda ids, params: answer([1]), "http://new")
    await transaction.push(SENT)
    joining = asyncio.create_task(transaction.join(newcomer))
    while not (await transaction.members())["by_file"]:
        await asyncio.sleep(0)
    assert newcomer.calls == []
    await transaction.push(MANIFEST.model_copy(update={"version": 5}))
    await joining
    assert [call for call in newcomer.calls if call[0] == "load"] == [("load", ("/new", 5))]
    assert await transaction.members() == {"ranks": {"http://0": 1, "http://1": 1, "http://new": 1}, "by_file": False}


async def test_a_server_does_not_join_between_the_members_of_a_broadcast_and_its_push() -> None:
    """It would be asked to receive in a group that it is not in, and the version would be refused for all."""
    transaction, _ = make()
    newcomer = FakeBackend(lambda ids, params: answer([1]), "http://new")
    assert (await transaction.members())["by_file"] is False
    joining = asyncio.create_task(transaction.join(newcomer))
    for _ in range(20):
        await asyncio.sleep(0)
    await transaction.push(SENT)
    assert newcomer.calls == [] and not joining.done()
    assert (await transaction.members())["by_file"] is True
    await transaction.push(MANIFEST.model_copy(update={"version": 5}))
    await joining
    assert [call for call in newcomer.calls if call[0] == "load"] == [("load", ("/new", 5))]


async def test_a_broadcast_that_was_not_taken_lets_a_server_join_again() -> None:
    transaction, backends = make()
    newcomer = FakeBackend(lambda ids, params: answer([1]), "http://new")
    assert (await transaction.members())["by_file"] is False
    joining = asyncio.create_task(transaction.join(newcomer))
    backends[0].refuse = {"receive"}
    with pytest.raises(WeightPushError, match="version 4 was not taken"):
        await transaction.push(SENT)
    await joining
    assert [call for call in newcomer.calls if call[0] == "load"] == [("load", ("/old", 2))]


async def test_a_dead_server_cannot_join_and_does_not_wait() -> None:
    transaction, _ = make()
    await transaction.push(SENT)
    newcomer = FakeBackend(lambda ids, params: answer([1]), "http://new")
    newcomer.dead = True
    with pytest.raises(InferenceError, match="http://new is dead"):
        await transaction.join(newcomer)
