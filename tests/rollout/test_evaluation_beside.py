"""Evaluation that goes on beside training (``eval.on_push``): mixed versions that are said, or servers kept for it."""

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest

from agentrl.core.episode import NOT_SAMPLED, Episode, Node, StopReason, Trajectory
from agentrl.evaluate.versions import version_metrics
from agentrl.inference.backend import SamplingParams
from agentrl.inference.router import Router
from agentrl.observe.sinks import MetricsWriter
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.held_groups import owed_step
from agentrl.rollout.server_pool import ServerPool
from agentrl.weights.transaction import Committed, WeightTransaction
from tests.inference.fakes import FakeBackend, answer
from tests.rollout.test_controller import Harness, settle
from tests.weights.test_transaction import MANIFEST, SENT

PARAMS = SamplingParams(max_new_tokens=1)


async def beside(tiny_model: Path, tmp_path: Path, *overrides: str) -> Harness:
    """A run whose evaluation of version 2 goes on; version 3 is not evaluated, version 4 is."""
    harness = Harness(tmp_path, tiny_model, "eval.every=2", *overrides)
    harness.controller.start()
    for step in (1, 2):
        await harness.controller.next_batch(step - 1)
        await settle()
        if step == 2:
            harness.judged.clear()
        await harness.publish(step)
    await settle()
    assert harness.evaluated == [0, 2] and [step for step, _ in harness.written] == [0, 1]
    return harness


@pytest.mark.parametrize("choice", ["mix", "reserve"])
async def test_a_version_is_published_beside_an_evaluation(tiny_model: Path, tmp_path: Path, choice: str) -> None:
    harness = await beside(tiny_model, tmp_path, f"eval.on_push={choice}")
    await harness.controller.next_batch(2)
    assert await harness.controller.ready(0.0, version=3)
    await harness.controller.publish(harness.manifest(3))
    harness.controller.record(3, {"train/loss": 0.1}, final=False)
    assert [step for step, _ in harness.written] == [0, 1, 3], "the record of step 2 waits for its evaluation"
    assert owed_step(await harness.controller.checkpoint()) == 2, "a resumed run still owes it"
    harness.judged.set()
    await settle()
    step, metrics = harness.written[-1]
    assert step == 2 and metrics["eval/accuracy"] == 0.5 and metrics["train/loss"] == 0.1
    await harness.controller.close()


async def test_evaluations_do_not_pile_up(tiny_model: Path, tmp_path: Path) -> None:
    """A version that is evaluated itself waits for the evaluation before it."""
    harness = await beside(tiny_model, tmp_path, "eval.on_push=mix")
    assert await harness.controller.ready(0.0, version=3)
    assert not await harness.controller.ready(0.0, version=4)
    with pytest.raises(RolloutError, match="version 2 is being evaluated: version 4 has to wait"):
        await harness.controller.publish(harness.manifest(4))
    harness.judged.set()
    assert await harness.controller.ready(1.0, version=4)
    await harness.controller.close()


async def test_nothing_is_published_beside_an_evaluation_that_the_final_version_waits_for(
    tiny_model: Path, tmp_path: Path
) -> None:
    harness = await beside(tiny_model, tmp_path, "eval.on_push=mix")
    assert not await harness.controller.ready(0.0, version=3, final=True)
    assert not await harness.controller.ready(0.0), "the end of a run waits for every evaluation"
    harness.judged.set()
    await settle()
    harness.judged.clear()
    await harness.controller.publish(harness.manifest(3), final=True)
    assert not harness.controller.ending
    harness.controller.record(3, {}, final=True)
    assert harness.controller.ending and not await harness.controller.ready(0.0)
    harness.judged.set()
    await harness.controller.finished.wait()
    await harness.controller.close()


async def test_a_failed_evaluation_ends_a_run_that_does_not_wait_for_it(tiny_model: Path, tmp_path: Path) -> None:
    harness = await beside(tiny_model, tmp_path, "eval.on_push=mix")
    harness.eval_error = LookupError("no column")
    harness.judged.set()
    await settle()
    with pytest.raises(RolloutError, match="no column"):
        await harness.controller.ready(0.0, version=3)
    await harness.controller.close()


async def test_a_resumed_run_writes_the_record_of_an_earlier_step_that_was_still_evaluated(
    tiny_model: Path, tmp_path: Path
) -> None:
    writer = MetricsWriter(tmp_path / "m", tensorboard=False)
    for step in (0, 1, 3, 4):
        writer.write(step, {})
    assert not writer.void_after(3, 2) and writer.void_after(3)
    writer.close()
    folder = tmp_path / "run"
    folder.mkdir()
    harness = await beside(tiny_model, folder, "eval.on_push=mix")
    await harness.controller.next_batch(2)
    await harness.controller.publish(harness.manifest(3))
    harness.controller.record(3, {}, final=False)
    state = await harness.controller.checkpoint()
    await harness.controller.close()
    again = Harness(folder, tiny_model, "eval.every=2", "eval.on_push=mix")
    again.controller.restore(3, state, recorded=False)
    again.controller.start()
    await again.controller.publish(again.manifest(3))
    await settle()
    assert [step for step, _ in again.written] == [2] and again.evaluated == [2]
    await again.controller.close()


def episode(versions: list[int], **more: object) -> Episode:
    mask = [int(version != NOT_SAMPLED) for version in versions]
    said = {"role": "assistant", "content": "x"}
    tokens = {"token_ids": versions, "versions": versions, "loss_mask": mask, "logprobs": [0.0] * len(mask)}
    node = Node(parent=-1, message=said, **tokens)
    facts = {
        "group_id": "g",
        "task_id": "t",
        "index": 0,
        "seed": 0,
        "reward": 1.0,
        "stop_reason": StopReason.TERMINATED,
    }
    return Episode(**(facts | more), trajectories={"assistant": Trajectory(nodes=[node])})


def test_an_evaluation_of_several_versions_says_which_and_one_of_its_own_says_nothing() -> None:
    own = episode([NOT_SAMPLED, 4, 4])
    assert version_metrics([own, own], 4) == {}
    assert version_metrics([own, episode([NOT_SAMPLED, 4, 6])], 4) == {"eval/version_min": 4.0, "eval/version_max": 6.0}
    assert version_metrics([own], 2) == {"eval/version_min": 4.0, "eval/version_max": 4.0}, "a resumed run's"
    failed = episode([9], reward=None, stop_reason=StopReason.TIMEOUT)
    assert version_metrics([own, failed], 4) == {}


def make(count: int) -> tuple[ServerPool, WeightTransaction, Router, list[FakeBackend]]:
    backends = [FakeBackend(lambda ids, params: answer([1]), f"http://{i}") for i in range(count)]
    router = Router(list(backends))
    weights = WeightTransaction(router, Committed(2, "/old"), "retract", 10.0)
    router.rejoin = weights.join
    return ServerPool(router, weights, lambda url: backends[0]), weights, router, backends


async def asked(router: Router, backends: list[FakeBackend], *, evaluation: bool) -> set[str]:
    """URLs of the servers that four episodes are sent to."""
    for backend in backends:
        backend.requests.clear()
    leases = [router.lease(evaluation=evaluation) for _ in range(4)]
    for number, lease in enumerate(leases):
        await lease.generate([1], PARAMS, request_id=str(number))
    for lease in leases:
        lease.release()
    return {backend.url for backend in backends if backend.requests}


async def test_reserved_servers_keep_their_version_for_evaluation_and_rejoin_with_the_committed_one() -> None:
    pool, weights, router, backends = make(2)
    training = router.lease()
    await training.generate([1], PARAMS, request_id="t")
    async with pool.reserved():
        (kept,) = [one for one in backends if one not in router.backends]
        (other,) = [one for one in backends if one is not kept]
        assert {one.url: one.state for one in router.status()} == {kept.url: "reserved", other.url: "serving"}
        assert await asked(router, backends, evaluation=True) == {kept.url}
        assert await asked(router, backends, evaluation=False) == {other.url}
        await weights.push(MANIFEST)
        assert kept.calls == [] and [name for name, _ in other.calls] == ["pause", "load", "verify", "resume"]
    await settle()
    assert kept.calls == [("pause", "abort"), ("load", ("/new", 3)), ("verify", 3), ("resume", None)]
    assert router.backends == backends and await asked(router, backends, evaluation=False) == {"http://0", "http://1"}


async def test_a_training_episode_leaves_a_server_that_is_reserved() -> None:
    pool, _, router, backends = make(2)
    lease = router.lease()
    await lease.generate([1], PARAMS, request_id="a")
    async with pool.reserved():
        (kept,) = [one for one in backends if one not in router.backends]
        other = router.lease()
        await other.generate([1], PARAMS, request_id="b")
        await lease.generate([1], PARAMS, request_id="c")
        assert lease.url != kept.url and other.url != kept.url


async def test_reserved_servers_without_a_push_go_on_without_a_load() -> None:
    pool, _, router, backends = make(5)
    async with pool.reserved():
        assert len(router.backends) == 4
    assert router.backends == backends and not any(backend.calls for backend in backends)


async def test_a_single_server_is_not_reserved() -> None:
    pool, _, router, backends = make(1)
    async with pool.reserved():
        assert router.backends == backends


async def test_a_reserved_server_that_died_is_replaced_by_the_others() -> None:
    pool, weights, router, backends = make(2)
    async with pool.reserved():
        (kept,) = [one for one in backends if one not in router.backends]
        kept.dead = True
        router.take_out(kept, "it died")
        (other,) = router.backends
        assert await asked(router, backends, evaluation=True) == {other.url}
        await weights.push(MANIFEST)
    await settle()
    assert router.backends == [other] and kept.calls == []
    assert {status.url: status.error for status in router.status()}[kept.url] == "it died"


async def test_after_a_broadcast_a_reserved_server_rejoins_with_the_next_version_in_a_file() -> None:
    """The evaluation ends before: the next version may be one that waits for its end, and neither would ever come."""
    pool, weights, router, _ = make(2)
    async with pool.reserved():
        (member,) = router.backends
        assert (await weights.members())["ranks"] == {member.url: 1}
        await weights.push(SENT)
    await settle()
    assert router.backends == [member] and (await weights.members())["by_file"]
    async with pool.reserved():
        assert router.backends == [member], "one that serves no more evaluates no other version"
    await weights.push(MANIFEST.model_copy(update={"version": 5}))
    await settle()
    assert len(router.backends) == 2
    await router.close()


async def test_a_reserved_server_that_takes_no_newer_version_says_so() -> None:
    pool, weights, router, _ = make(2)
    async with pool.reserved():
        (member,) = router.backends
        await weights.push(MANIFEST)
        (kept,) = [one for one in all_of(router) if one is not member]
        kept.refuse = {"load"}
    await settle()
    errors = {status.url: status.error for status in router.status()}
    assert "does not take the current weights: http" in errors[kept.url] and router.backends == [member]
    await router.close()


def all_of(router: Router) -> list[FakeBackend]:
    """The connections to all servers, reserved or not."""
    return [server.backend for server in router._servers.values()]  # type: ignore[misc]


async def test_a_cancelled_evaluation_waits_for_no_server() -> None:
    pool, weights, _, backends = make(2)

    async def evaluation() -> None:
        async with pool.reserved(), nullcontext():
            await asyncio.Event().wait()

    running = asyncio.create_task(evaluation())
    await settle()
    await weights.push(MANIFEST)
    calls = [len(backend.calls) for backend in backends]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [len(backend.calls) for backend in backends] == calls
