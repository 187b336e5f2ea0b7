"""Evaluation beside the trainer's calls: it has no time limit of theirs, and its version stays while it goes on."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn

from agentrl.rollout.errors import RolloutError
from agentrl.rollout.http_api import make_app
from agentrl.train import controller_client
from agentrl.train.controller_client import ControllerClient, ControllerError
from tests.rollout.test_controller import Harness, episodes_of, settle

BATCH_TIMEOUT = 1.0  # of the client, in seconds


@asynccontextmanager
async def served(harness: Harness) -> AsyncIterator[str]:
    """The controller's service on a port of its own."""
    config = uvicorn.Config(
        make_app(harness.controller, harness.server_pool, ""), port=0, log_level="error", lifespan="off"
    )
    socket = config.bind_socket()
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([socket]))
    while not server.started:
        await asyncio.sleep(0)
    try:
        yield "http://{}:{}".format(*socket.getsockname()[:2])
    finally:
        harness.judged.set()
        await harness.controller.close()
        server.should_exit = True
        await serving


async def test_an_evaluation_longer_than_any_call_of_the_trainer_does_not_end_the_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends only after more waiting calls than fit into the client's timeout."""
    monkeypatch.setattr(controller_client, "READY_SECONDS", BATCH_TIMEOUT / 4)
    harness = Harness(tmp_path, tiny_model, "eval.every=1")
    harness.controller.start()
    await harness.controller.next_batch(0)
    assert await harness.controller.ready(1.0)
    harness.judged.clear()
    asked = 0

    def wait(client: ControllerClient, judged: Callable[[], object]) -> None:
        nonlocal asked
        while not client.ready():
            asked += 1
            if asked == 6:
                judged()

    async with served(harness) as url:
        client = ControllerClient(url, BATCH_TIMEOUT)
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(client.publish, 1, harness.manifest(1), final=False)
        await asyncio.to_thread(client.record, 1, {"train/loss": 0.1}, final=False)
        await asyncio.to_thread(wait, client, lambda: loop.call_soon_threadsafe(harness.judged.set))
        await asyncio.to_thread(client.publish, 2, harness.manifest(2), final=False)
    assert asked >= 6
    assert [(step, metrics.get("eval/accuracy")) for step, metrics in harness.written] == [(0, 0.5), (1, 0.5)]


async def test_weights_are_not_pushed_while_a_version_is_evaluated(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model, "eval.every=1")
    harness.judged.clear()
    harness.controller.start()
    await settle()
    assert harness.evaluated == [0] and harness.backend.requests, "rollouts go on beside the first evaluation"
    assert not await harness.controller.ready(0.0)
    with pytest.raises(RolloutError, match="version 0 is being evaluated: version 1 has to wait"):
        await harness.controller.publish(harness.manifest(1))
    assert not [name for name, _ in harness.backend.calls if name == "load"]
    harness.judged.set()
    await harness.publish(1)
    assert [name for name, _ in harness.backend.calls if name == "load"] == ["load"]
    await harness.controller.close()


async def test_the_next_batch_does_not_wait_for_an_evaluation(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model, "eval.every=1")
    harness.controller.start()
    await harness.controller.next_batch(0)
    await settle()
    harness.judged.clear()
    await harness.publish(1)
    assert len(episodes_of(await harness.controller.next_batch(1))) == 6
    assert [step for step, _ in harness.written] == [0], "the record of step 1 waits for its evaluation"
    harness.judged.set()
    await harness.publish(2)
    assert [step for step, _ in harness.written] == [0, 1, 2], "one record a step, in order"
    await harness.controller.close()


async def test_a_failed_evaluation_ends_the_run_with_its_reason(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model, "eval.every=1")
    harness.controller.start()
    await harness.controller.next_batch(0)
    await settle()
    harness.eval_error = LookupError("no column 'answer'")
    harness.judged.clear()
    await harness.publish(1)
    harness.judged.set()
    await settle()
    with pytest.raises(RolloutError, match=r"(?s)the evaluation failed.*no column 'answer'"):
        await harness.controller.ready(1.0)
    with pytest.raises(RolloutError, match="no column 'answer'"):
        await harness.controller.next_batch(1)
    assert [step for step, _ in harness.written] == [0]
    await harness.controller.close()


async def test_the_final_evaluation_comes_before_the_end(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model, "eval.every=0")
    harness.controller.start()
    await harness.controller.next_batch(0)
    await settle()
    harness.judged.clear()
    await harness.publish(1, final=True)
    await settle()
    assert not harness.controller.finished.is_set() and not await harness.controller.ready(0.0)
    harness.judged.set()
    assert await harness.controller.ready(1.0) and harness.controller.finished.is_set()
    await harness.controller.close()


async def test_nothing_is_sampled_for_training_from_the_final_version(tiny_model: Path, tmp_path: Path) -> None:
    """Not even between its publication and the record of its step, which are two calls."""
    harness = Harness(tmp_path, tiny_model)
    harness.controller.start()
    await harness.controller.next_batch(0)
    await settle()
    before = len(harness.backend.requests)
    await harness.controller.publish(harness.manifest(1), final=True)
    await settle()
    assert len(harness.backend.requests) == before
    await harness.controller.close()


@pytest.mark.parametrize("recorded", [False, True])
async def test_a_run_that_was_cut_in_an_evaluation_writes_its_record_when_it_goes_on(
    tiny_model: Path, tmp_path: Path, recorded: bool
) -> None:
    first = Harness(tmp_path, tiny_model, "eval.every=1")
    first.controller.start()
    await first.controller.next_batch(0)
    await settle()
    first.judged.clear()
    await first.publish(1)
    state = await first.controller.checkpoint()
    await first.controller.close()
    assert [step for step, _ in first.written] == [0]

    second = Harness(tmp_path, tiny_model, "eval.every=1")
    second.controller.restore(1, state, recorded=recorded)
    second.controller.start()
    await second.controller.publish(second.manifest(1))
    assert await second.controller.ready(1.0)
    expected = [] if recorded else [(1, 0.1, 0.5)]
    assert [(s, m["train/loss"], m["eval/accuracy"]) for s, m in second.written] == expected
    await second.controller.close()


async def test_a_controller_that_is_gone_is_noticed_by_a_trainer_that_waits(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model)
    harness.judged.clear()
    harness.controller.start()
    async with served(harness) as url:
        client = ControllerClient(url, BATCH_TIMEOUT)
        waiting: Awaitable[bool] = asyncio.ensure_future(asyncio.to_thread(client.ready))
        await settle()
    with pytest.raises(ControllerError):
        assert not await waiting  # a no that was on its way
        await asyncio.to_thread(client.ready)
