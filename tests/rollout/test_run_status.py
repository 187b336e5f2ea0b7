"""What a running run says that its processes wait for."""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from agentrl.core.columns import Columns
from agentrl.rollout.http_api import make_app
from agentrl.rollout.run_status import TrainerCalls, run_status
from tests.rollout.test_controller import Harness, episodes_of, settle


async def test_the_status_says_what_each_process_waits_for_and_until_when(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model, "rollout.max_staleness=0", "trainer.batch_timeout=1800")
    transport = httpx.ASGITransport(make_app(harness.controller, harness.server_pool, "s3cret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://c") as http:
        assert (await http.get("/status")).status_code == 401
        http.headers["Authorization"] = "Bearer s3cret"

        async def waits() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
            status = (await http.get("/status")).json()
            return status, {one["process"]: one for one in status["waits"]}

        assert (await waits())[1]["trainer"]["doing"] == "loads the model"
        harness.judged.clear()
        harness.controller.start()
        batch = await http.post("/next_batch", json={"step": 0})
        assert len(episodes_of(batch.content)) == 6
        status, found = await waits()
        assert found["trainer"]["doing"] == "computes the update" and found["trainer"]["seconds_left"] > 0
        assert "evaluates version 0" in found["controller"]["doing"] and status["evaluating"] == 0
        assert found["http://fake"]["doing"].startswith("serving, ")
        assert [(one["url"], one["state"]) for one in status["servers"]] == [("http://fake", "serving")]
        ready = asyncio.create_task(http.post("/ready", json={"seconds": 60.0}))
        await settle()
        assert (await waits())[1]["trainer"]["doing"] == "waits for the end of the evaluation of version 0"
        harness.judged.set()
        assert (await ready).json() == {"ready": True}
        waiting = asyncio.create_task(http.post("/next_batch", json={"step": 1}))
        await settle()
        status, found = await waits()
        assert found["trainer"]["doing"] == "waits for the batch of step 1: 0 of 2 groups are finished"
        assert 1790 < found["trainer"]["seconds_left"] <= 1800
        assert "leaves room for no group" in found["controller"]["doing"]
        await harness.publish(1)
        assert Columns.from_bytes((await waiting).content)[0].episodes
    await harness.controller.close()


async def test_a_controller_that_runs_nothing_says_why(tiny_model: Path, tmp_path: Path) -> None:
    """After a resume it waits for the trainer's version, at the end for the trainer: neither is the bound's doing."""
    harness = Harness(tmp_path, tiny_model, "trainer.epochs=1", "rollout.batch_size=6", "rollout.group_size=2")
    controller = harness.controller

    def doing() -> str:
        return run_status(controller, [], TrainerCalls())["waits"][0]["doing"]

    controller.rollouts.served.clear()
    controller.start()
    await harness.controller.ready(60.0)  # the evaluation of version 0
    assert doing() == "waits for the version that the resumed trainer starts from"
    controller.rollouts.served.set()
    assert len(episodes_of(await asyncio.wait_for(controller.next_batch(0), 30))) == 12
    await settle()
    assert doing() == "waits for the end of the trainer: no further group is needed"
    await controller.close()
