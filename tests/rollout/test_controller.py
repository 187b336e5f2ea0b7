"""The controller with a scripted server: batches, staleness, failures, evaluation, restart."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, Task
from agentrl.core.weight_manifest import WeightManifest
from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow
from agentrl.inference.backend import SamplingParams
from agentrl.inference.client import ChatClient
from agentrl.inference.router import Router
from agentrl.inference.session import SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.rollout.controller import Controller, hash_seed
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.http_api import make_app
from agentrl.rollout.journal import Journal
from agentrl.rollout.server_pool import ServerPool
from agentrl.rollout.tasks import TaskStream
from agentrl.weights.transaction import Committed, WeightTransaction
from tests.inference.fakes import FakeBackend, answer

TASKS = [Task(id=f"train/{i}", data={"n": i}) for i in range(6)]


class Says(RolloutWorkflow):
    """One message per episode; the reward depends on the seed, or the workflow fails."""

    def __init__(self) -> None:
        self.broken = False
        self.uniform = False

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        if self.broken:
            raise RuntimeError("no such file: prices.csv")
        await llm.session().chat.completions.create(messages=[{"role": "user", "content": task.id}])
        return Outcome(reward=1.0 if self.uniform else float(seed % 97))


class Harness:
    """A controller and what it touches."""

    def __init__(self, folder: Path, model: Path, *overrides: str, seed: int = 0) -> None:
        settings = ["rollout.batch_size=2", "rollout.group_size=3", "rollout.max_staleness=1", *overrides]
        self.recipe: Recipe = load_recipe("arithmetic_grpo", settings, device="cpu")
        self.backend = FakeBackend(lambda ids, params: answer([5, 6], version=self.controller.gate.version))
        session = SessionSettings(SamplingParams(max_new_tokens=8), 500, locked=True, model="m")
        router = Router([self.backend])
        client = ChatClient(router, ChatTemplate.from_folder(model), session, session)
        self.workflow = Says()
        self.journal = Journal(folder, episodes=True)
        self.folder = folder
        self.written: list[tuple[int, dict[str, float]]] = []
        self.evaluated: list[int] = []
        self.judged = asyncio.Event()  # an evaluation goes on until it is set
        self.judged.set()
        self.eval_error: Exception | None = None
        weights = WeightTransaction(router, Committed(0, "/start"), "retract", 10.0)
        self.connected: list[FakeBackend] = []
        self.server_pool = ServerPool(router, weights, self._connect)
        self.controller = Controller(
            self.recipe,
            TaskStream(TASKS, seed),
            self.workflow,
            client,
            weights,
            self.journal,
            lambda step, metrics: self.written.append((step, metrics)),
            self._evaluate,
        )

    def _connect(self, url: str) -> FakeBackend:
        self.connected.append(FakeBackend(self.backend.script, url))
        return self.connected[-1]

    async def _evaluate(self, version: int) -> dict[str, float]:
        self.evaluated.append(version)
        await self.judged.wait()
        if self.eval_error is not None:
            raise self.eval_error
        return {"eval/accuracy": 0.5}

    def manifest(self, version: int) -> WeightManifest:
        return WeightManifest(
            version=version, path=f"/v{version}", transport="disk", dtype="F32", nbytes=0, fingerprints={}
        )

    async def publish(self, version: int, *, final: bool = False) -> None:
        """One step's end, as the trainer does it, and the end of its evaluation where that is due."""
        assert await self.controller.ready(1.0)
        await self.controller.publish(self.manifest(version), final=final)
        self.controller.record(version, {"train/loss": 0.1}, final=final)
        if self.judged.is_set():
            assert await self.controller.ready(1.0)

    def outcomes(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.folder / "journal.jsonl").read_text().splitlines()]


def episodes_of(batch: bytes) -> list[Episode]:
    """What a batch on its way to the trainer holds."""
    return Columns.from_bytes(batch)[0].to_episodes()


async def settle() -> None:
    """Let every ready task run until nothing moves."""
    for _ in range(200):
        await asyncio.sleep(0)


async def test_admission_runs_ahead_by_the_bound_and_no_further(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model)
    harness.controller.start()
    await settle()
    assert len(harness.backend.requests) == 2 * 2 * 3  # (staleness 1 + 1) batches of 2 groups of 3
    batch = await harness.controller.next_batch(0)
    await settle()
    assert len(harness.backend.requests) == 12, "consuming alone must not admit more: the version is still 0"
    assert len(episodes_of(batch)) == 6
    assert batch == await harness.controller.next_batch(0), "asked again, the same batch"
    await harness.publish(1)
    await settle()
    assert len(harness.backend.requests) == 18
    await harness.controller.close()


async def test_a_record_has_the_metrics_of_rollout_trainer_and_evaluation(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model, "eval.every=2")
    harness.controller.start()
    for step in range(2):
        await harness.controller.next_batch(step)
        await harness.publish(step + 1)
    assert harness.evaluated == [0, 2]
    assert [step for step, _ in harness.written] == [0, 1, 2]
    metrics = harness.written[1][1]
    assert metrics["train/loss"] == 0.1 and "reward/mean_drawn" in metrics and "eval/accuracy" not in metrics
    assert harness.written[2][1]["staleness/max"] == 1.0
    assert "eval/accuracy" in harness.written[2][1]
    await harness.controller.close()


async def test_a_batch_of_failures_stops_the_run_with_their_reason(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model)
    harness.workflow.broken = True
    harness.controller.start()
    with pytest.raises(RolloutError, match=r"(?s)100% of the latest 6 episodes failed.*prices\.csv"):
        await harness.controller.next_batch(0)
    await settle()
    assert {f["outcome"] for f in harness.outcomes()} == {"failed"}
    await harness.controller.close()


async def test_uniform_groups_are_filtered_where_asked_and_replaced(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model, "rollout.skip_uniform_groups=true")
    harness.workflow.uniform = True
    harness.controller.start()
    await settle()
    harness.workflow.uniform = False
    batch = await harness.controller.next_batch(0)
    assert len({e.reward for e in episodes_of(batch)}) > 1
    assert any(
        f == {"outcome": "filtered", "draw": 0, "task": f["task"], "reason": "uniform rewards"}
        for f in harness.outcomes()
    )
    await harness.controller.close()


async def test_the_final_version_ends_all_rollouts_and_accounts_for_them(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model)
    harness.controller.start()
    await harness.controller.next_batch(0)
    await harness.publish(1, final=True)
    assert harness.controller.finished.is_set()
    assert harness.evaluated == [0, 1]
    outcomes = harness.outcomes()
    assert [f["outcome"] for f in outcomes if f["outcome"] == "trained"] == ["trained"] * 2
    assert len({f["draw"] for f in outcomes}) == len(outcomes), "a draw with two outcomes"
    await harness.controller.close()


async def test_a_restart_runs_what_was_owed_and_waits_for_its_weights(tiny_model: Path, tmp_path: Path) -> None:
    first = Harness(tmp_path, tiny_model)
    first.controller.start()
    await first.controller.next_batch(0)
    await first.publish(1)
    state = json.loads(json.dumps(first.controller.checkpoint()))
    await first.controller.close()

    second = Harness(tmp_path, tiny_model)
    second.controller.restore(1, state)
    second.controller.start()
    await settle()
    assert second.backend.requests == [], "nothing may be sampled before the servers hold the resumed version"
    assert second.evaluated == []
    assert await second.controller.ready(1.0)
    await second.controller.publish(second.manifest(1))
    seen = []
    for step in (1, 2):
        seen += [e.task_id for e in episodes_of(await second.controller.next_batch(step))[::3]]
        await second.publish(step + 1)
    trained = [f["task"] for f in first.outcomes() if f["outcome"] == "trained"]
    assert sorted(trained) == [t.id for t in TASKS], "the epoch, each task once"
    assert sorted(seen) == sorted(trained[2:])
    await second.controller.close()


async def test_the_service_checks_the_secret_and_answers_failures(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model)
    transport = httpx.ASGITransport(make_app(harness.controller, harness.server_pool, "s3cret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://c") as http:
        assert (await http.post("/heartbeat", json={"done": False})).status_code == 401
        http.headers["Authorization"] = "Bearer s3cret"
        assert (await http.post("/heartbeat", json={"done": True})).status_code == 200
        assert harness.controller.trainer_done.is_set()
        assert (await http.post("/next_batch", json={})).status_code == 400
        assert (await http.post("/publish", content=b"{")).status_code == 400
        harness.controller.start()
        assert len(episodes_of((await http.post("/next_batch", json={"step": 0})).content)) == 6
        harness.backend.refuse = {"load"}
        body = {"manifest": {"version": 1, "path": "/x", "transport": "disk", "dtype": "F32", "nbytes": 0}}
        body["manifest"]["fingerprints"] = {}
        assert (await http.post("/ready", json={"seconds": 1.0})).json() == {"ready": True}
        refused = await http.post("/publish", json={**body, "final": False})
        assert refused.status_code == 409 and "refuses load" in refused.text
        assert (await http.post("/record", json={"step": 1})).status_code == 400
    await harness.controller.close()


def test_seeds_differ_for_each_episode_and_repeat_in_another_process() -> None:
    seeds = {hash_seed(0, draw, index) for draw in range(100) for index in range(16)}
    assert len(seeds) == 1600
    assert hash_seed(1, 2, 3) == hash_seed(1, 2, 3) != hash_seed(1, 3, 2)


async def test_servers_are_listed_added_and_removed_over_the_service(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model)
    await harness.publish(1)
    transport = httpx.ASGITransport(make_app(harness.controller, harness.server_pool, "s3cret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://c") as http:
        assert (await http.get("/servers")).status_code == 401
        http.headers["Authorization"] = "Bearer s3cret"
        (only,) = (await http.get("/servers")).json()
        assert (only["url"], only["state"], only["version"]) == ("http://fake", "serving", 1)
        last = await http.request("DELETE", "/servers", json={"url": "http://fake"})
        assert last.status_code == 400 and "last server" in last.text
        both = (await http.post("/servers", json={"url": "http://new"})).json()
        assert [server["url"] for server in both] == ["http://fake", "http://new"]
        assert ("load", ("/v1", 1)) in harness.connected[0].calls, "it got traffic without the current weights"
        again = await http.post("/servers", json={"url": "http://new"})
        assert again.status_code == 409 and "serves already" in again.text
        left = (await http.request("DELETE", "/servers", json={"url": "http://fake"})).json()
        assert {server["url"]: server["state"] for server in left} == {
            "http://fake": "leaving",
            "http://new": "serving",
        }
        unknown = await http.request("DELETE", "/servers", json={"url": "http://x"})
        assert unknown.status_code == 400 and "no server http://x" in unknown.text
