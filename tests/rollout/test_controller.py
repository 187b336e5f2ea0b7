"""The controller with a scripted server: batches, staleness, failures, evaluation, restart."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, Task
from agentrl.core.weight_manifest import WeightManifest
from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow
from agentrl.data.datasets import LoadedTasks
from agentrl.inference.backend import SamplingParams
from agentrl.inference.client import ChatClient
from agentrl.inference.random_streams import stream_seed
from agentrl.inference.router import Router
from agentrl.inference.session import SessionSettings
from agentrl.inference.template import ChatTemplate
from agentrl.launch.controller_process import make_stream
from agentrl.rollout.controller import Controller
from agentrl.rollout.episode_runs import EpisodeRuns
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.held_groups import unpack
from agentrl.rollout.http_api import make_app
from agentrl.rollout.journal import Journal
from agentrl.rollout.journal_lines import read_journal
from agentrl.rollout.journal_proof import valid_outcomes
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
        self.solves = lambda task: True  # whether a uniform group solves its task
        self.broken_draws: set[int] = set()  # calls that fail, in the order of the calls
        self.calls = 0

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        self.calls += 1
        if self.broken or self.calls - 1 in self.broken_draws:
            raise RuntimeError("no such file: prices.csv")
        await llm.session().chat.completions.create(messages=[{"role": "user", "content": task.id}])
        return Outcome(reward=float(self.solves(task)) if self.uniform else float(seed % 97))


class Harness:
    """A controller and what it touches."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *overrides: str,
        seed: int = 0,
        tasks: list[Task] = TASKS,
        runs: EpisodeRuns | None = None,
    ) -> None:
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
            make_stream(self.recipe.model_copy(update={"seed": seed}), LoadedTasks(tasks, "")),
            self.workflow,
            client,
            weights,
            self.journal,
            lambda step, metrics: self.written.append((step, metrics)),
            self._evaluate,
            runs=runs,
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

    def outcomes(self) -> list[dict[str, Any]]:
        """Ends of groups, in the order of the journal, void ones included."""
        records = read_journal(self.folder / "journal.jsonl").records
        return [one for one in records if one["outcome"] not in ("admitted", "checkpoint", "resumed")]


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
        f == {"outcome": "filtered", "draw": 0, "task": f["task"], "step": 0, "reason": "uniform rewards"}
        for f in harness.outcomes()
    )
    await harness.controller.close()


async def test_groups_that_failed_as_a_whole_are_counted_in_the_step_that_follows(
    tiny_model: Path, tmp_path: Path
) -> None:
    harness = Harness(tmp_path, tiny_model, "rollout.max_failure_rate=1")
    harness.workflow.broken_draws = {6, 7, 8, 12, 13, 14}  # the third and the fifth group
    harness.controller.start()
    for step in range(3):
        await harness.controller.next_batch(step)
        await harness.publish(step + 1)
        await settle()
    steps = [metrics for _, metrics in harness.written[1:]]
    assert sum(m["rollout/failed"] for m in steps) == 6.0
    assert sum(m.get("rollout/failed_environment_error", 0.0) for m in steps) == 6.0
    assert sum(m["rollout/groups_failed"] for m in steps) == 2.0
    assert sum(m["rollout/groups_kept"] for m in steps) == 6.0
    assert all(m["rollout/groups_drawn"] == m["rollout/groups_kept"] + m["rollout/groups_failed"] for m in steps)
    assert [f["step"] for f in harness.outcomes() if f["outcome"] == "failed"] == [
        step for step, m in enumerate(steps) for _ in range(int(m["rollout/groups_failed"]))
    ]
    await harness.controller.close()


async def test_the_reward_of_all_groups_and_of_the_kept_ones_are_told_apart(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model, "rollout.skip_uniform_groups=true")
    harness.workflow.uniform, harness.workflow.solves = True, lambda task: task.id != "train/0"
    harness.controller.start()
    await settle()
    filtered = len(harness.outcomes())
    unsolved = sum(f["task"] == "train/0" for f in harness.outcomes())
    harness.workflow.uniform = False
    batch = await harness.controller.next_batch(0)
    await harness.publish(1)
    found = harness.written[1][1]
    kept = [e.reward for e in episodes_of(batch)]
    assert found["reward/mean_kept"] == pytest.approx(sum(kept) / 6)  # type: ignore[arg-type]
    solved = [f for f in harness.outcomes() if f["outcome"] == "filtered" and f["step"] == 0]
    assert len(solved) >= filtered > unsolved
    assert found["rollout/groups_filtered"] == len(solved) and found["rollout/groups_kept"] == 2
    assert found["rollout/filtered_none_solved"] == sum(f["task"] == "train/0" for f in solved)
    assert found["reward/mean_drawn"] < found["reward/mean_kept"]
    await harness.controller.close()


async def test_constant_rewards_end_the_run_with_a_diagnosis_where_uniform_groups_are_skipped(
    tiny_model: Path, tmp_path: Path
) -> None:
    harness = Harness(tmp_path, tiny_model, "rollout.skip_uniform_groups=true", "rollout.max_uniform_groups=5")
    harness.workflow.uniform = True
    harness.controller.start()
    with pytest.raises(RolloutError, match=r"5 groups in a row had equal rewards .* all solved"):
        await asyncio.wait_for(harness.controller.next_batch(0), 30)
    await harness.controller.close()


async def test_the_epochs_end_with_a_smaller_batch_that_is_the_last(tiny_model: Path, tmp_path: Path) -> None:
    settings = ("trainer.epochs=2", "rollout.batch_size=4", "rollout.group_size=2")
    harness = Harness(tmp_path, tiny_model, *settings, tasks=TASKS[:5])
    harness.controller.start()
    facts, sizes = [], []
    for step in range(3):
        batch = await asyncio.wait_for(harness.controller.next_batch(step), 30)
        sizes.append(len(episodes_of(batch)) // 2)
        facts.append(Columns.from_bytes(batch)[1])
        await harness.publish(step + 1, final=facts[-1]["last"])
        await settle()
    assert sizes == [4, 4, 2]
    assert [f["last"] for f in facts] == [False, False, True]
    assert [(f["epochs_before"], f["epochs"]) for f in facts] == [(0, 0), (0, 1), (1, 2)]
    assert [f["done"] for f in facts] == [0.0, 0.4, 0.8]
    assert harness.controller.finished.is_set()
    assert sorted(f["draw"] for f in harness.outcomes()) == list(range(10))
    await harness.controller.close()


async def test_fewer_tasks_than_a_batch_are_drawn_again(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model, "rollout.batch_size=4", tasks=TASKS[:3])
    harness.controller.start()
    batch = episodes_of(await asyncio.wait_for(harness.controller.next_batch(0), 30))
    assert len({e.group_id for e in batch}) == 4 and len({e.task_id for e in batch}) == 3
    await harness.controller.close()


async def test_epochs_without_a_kept_group_end_without_a_wait(tiny_model: Path, tmp_path: Path) -> None:
    """The rest of the tasks is filtered: an empty batch, and the latest step becomes the final one."""
    harness = Harness(
        tmp_path, tiny_model, "trainer.epochs=1", "rollout.skip_uniform_groups=true", "rollout.max_staleness=0"
    )
    harness.controller.start()
    await harness.controller.next_batch(0)
    harness.workflow.uniform = True
    await harness.publish(1)
    batch = await asyncio.wait_for(harness.controller.next_batch(1), 30)
    columns, facts = Columns.from_bytes(batch)
    assert not columns.episodes and facts["last"]
    assert not harness.controller.finished.is_set()
    harness.controller.record(1, {}, final=True)
    assert await harness.controller.ready(30)
    assert harness.controller.finished.is_set() and harness.evaluated == [0, 1]
    await harness.controller.close()


async def test_groups_after_the_last_kept_one_are_cancelled_and_drawn_again_by_a_resume(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = ("trainer.epochs=1", "rollout.skip_uniform_groups=true", "rollout.max_staleness=0", "eval.every=1")
    first = Harness(tmp_path, tiny_model, *settings)
    first.controller.start()
    await first.controller.next_batch(0)
    first.workflow.uniform = True
    await first.publish(1)
    await asyncio.wait_for(first.controller.next_batch(1), 30)
    first.controller.record(1, {}, final=True)
    assert first.controller.finished.is_set() and first.evaluated == [0, 1]
    merged = {name: value for step, metrics in first.written if step == 1 for name, value in metrics.items()}
    assert merged["rollout/groups_cancelled"] == 4.0 and merged["rollout/groups_kept"] == 2.0
    state = await first.controller.checkpoint()
    await first.controller.close()

    second = Harness(tmp_path, tiny_model, *settings)
    second.controller.restore(1, state, recorded=True)
    second.controller.start()
    await second.controller.publish(second.manifest(1))
    batches = [episodes_of(await asyncio.wait_for(second.controller.next_batch(step), 30)) for step in (1,)]
    assert len(batches[0]) == 6 and {f["draw"] for f in valid_outcomes(tmp_path)} >= {0, 1, 2, 3}
    valid = [f["draw"] for f in valid_outcomes(tmp_path)]
    assert len(set(valid)) == len(valid)
    await second.controller.close()


async def test_a_draw_that_raises_ends_the_run_and_does_not_hang_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: TaskStream) -> None:
        raise KeyError("train/7")

    monkeypatch.setattr(TaskStream, "draw", broken)
    harness = Harness(tmp_path, tiny_model)
    harness.controller.start()
    with pytest.raises(RolloutError, match=r"(?s)the next task could not be drawn.*train/7"):
        await asyncio.wait_for(harness.controller.next_batch(0), 30)
    await harness.controller.close()


async def test_epochs_that_never_keep_a_group_are_an_error(tiny_model: Path, tmp_path: Path) -> None:
    harness = Harness(tmp_path, tiny_model, "trainer.epochs=1", "rollout.skip_uniform_groups=true")
    harness.workflow.uniform = True
    harness.controller.start()
    with pytest.raises(RolloutError, match=r"all 6 groups were filtered or failed; 6 filtered: uniform rewards"):
        await asyncio.wait_for(harness.controller.next_batch(0), 30)
    await harness.controller.close()


async def test_a_resumed_run_repeats_the_groups_that_no_step_had_counted(tiny_model: Path, tmp_path: Path) -> None:
    """Filtered and failed groups after the last batch are void in the journal, and drawn again."""
    first = Harness(tmp_path, tiny_model, "rollout.skip_uniform_groups=true")
    first.controller.start()
    await first.controller.next_batch(0)
    first.workflow.uniform = True
    await first.publish(1)
    await settle()  # groups that are counted by no step yet
    state = await first.controller.checkpoint()
    void = [f["draw"] for f in first.outcomes() if f["outcome"] == "filtered"]
    assert void
    await first.controller.close()

    second = Harness(tmp_path, tiny_model, "rollout.skip_uniform_groups=true")
    second.controller.restore(1, state)
    second.controller.start()
    await second.controller.publish(second.manifest(1))
    for step in (1, 2, 3):
        await asyncio.wait_for(second.controller.next_batch(step), 30)
        await second.publish(step + 1)
    valid = valid_outcomes(tmp_path)
    assert len({f["draw"] for f in valid}) == len(valid), "a draw with two outcomes"
    trained = [f["draw"] for f in valid if f["outcome"] == "trained" and f["step"] > 0]
    groups, saved = unpack(state)
    held = [group.draw for group in groups]
    assert held == [2, 3] and trained == [*held, *saved["tasks"]["owed"]][:6] and set(void[:2]) <= set(trained)
    await second.controller.close()


async def test_a_curriculum_shows_its_pool_and_ends_when_all_tasks_have_retired(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = ("rollout.curriculum.column=n", "rollout.curriculum.retire_at=1", "rollout.curriculum.retire_after=1")
    harness = Harness(tmp_path, tiny_model, *settings, "rollout.curriculum.open_groups=2", "rollout.batch_size=4")
    harness.workflow.uniform = True  # and all solved
    harness.controller.start()
    seen: list[str] = []
    last, step = False, 0
    while not last:
        batch = await asyncio.wait_for(harness.controller.next_batch(step), 30)
        seen += [e.task_id for e in episodes_of(batch)[::3]]
        last, step = Columns.from_bytes(batch)[1]["last"], step + 1
        await harness.publish(step, final=last)
        await settle()
    assert set(seen) == {t.id for t in TASKS} and seen[0] == "train/0"
    metrics = [m for s, m in harness.written if s > 0]
    assert metrics[-1]["curriculum/retired"] == 6.0 and metrics[-1]["curriculum/pool"] == 6.0
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
    cancelled = sum(f["outcome"] == "cancelled" for f in outcomes)
    assert harness.written[-1][1]["rollout/groups_cancelled"] == cancelled > 0
    await harness.controller.close()


async def test_a_restart_runs_what_was_owed_and_waits_for_its_weights(tiny_model: Path, tmp_path: Path) -> None:
    first = Harness(tmp_path, tiny_model)
    first.controller.start()
    await first.controller.next_batch(0)
    await first.publish(1)
    state = await first.controller.checkpoint()
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
        for given in ("", "Bearer wrong", "Bearer s3cre", "Bearer s3crét"):
            headers = {"Authorization": given.encode()}
            assert (await http.post("/heartbeat", json={"done": False}, headers=headers)).status_code == 401, given
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
    seeds = {stream_seed(0, draw, index) for draw in range(100) for index in range(16)}
    assert len(seeds) == 1600
    assert stream_seed(1, 2, 3) == stream_seed(1, 2, 3) != stream_seed(1, 3, 2)


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
