"""Episodes in worker processes: who gets which, what a lost worker costs, and how a cancellation arrives."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from agentrl.config.errors import UserError
from agentrl.core.episode import INFRASTRUCTURE, Episode, StopReason
from agentrl.rollout import worker_processes
from agentrl.rollout.episode_runs import Ages, EpisodeOrder
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.worker_processes import (
    AWAY_SECONDS,
    LOOK_SECONDS,
    SILENT_SECONDS,
    WorkerLost,
    WorkerProcesses,
    places_of,
)
from agentrl.rollout.worker_wire import check_rows
from tests.rollout.worker_fakes import Clock, Worker, episode, order


class Run:
    """A controller's side with workers in this process."""

    def __init__(self, places: int = 8) -> None:
        self.clock = Clock()
        self.servers = [{"url": "http://a", "number": 1, "state": "serving", "error": ""}]
        self.lost: list[tuple[str, int, str]] = []
        self.workers = WorkerProcesses(
            places, 1.0, 60.0, lambda: self.servers, lambda *said: self.lost.append(said), self.clock
        )
        self.all: list[Worker] = []

    def start(self, name: str) -> Worker:
        self.all.append(Worker(self.workers, name))
        return self.all[-1]

    def after(self, seconds: float) -> None:
        """Let seconds pass in which this process ran."""
        for _ in range(int(seconds / LOOK_SECONDS)):
            self.clock.now += LOOK_SECONDS
            self.workers.look()


@asynccontextmanager
async def a_run(*names: str, places: int = 8) -> AsyncIterator[tuple[Run, list[Worker]]]:
    run = Run(places)
    workers = [run.start(name) for name in names]
    try:
        async with asyncio.timeout(20):
            yield run, workers
    finally:
        for worker in run.all:
            await worker.end()


async def test_each_order_ends_in_its_record() -> None:
    async with a_run("a", "b") as (run, workers):
        found = await asyncio.gather(*(run.workers.run(order(number)) for number in range(20)))
        assert [one.task_id for one in found] == [f"train/{number}" for number in range(20)]
        assert [one.version for one in found] == [2] * 20 and [one.task["n"] for one in found] == list(range(20))
        assert sum(len(worker.runs.begun) for worker in workers) == 20
        assert run.workers.in_flight == {"a": 0, "b": 0}


async def test_an_order_goes_to_the_worker_with_the_fewest_in_flight() -> None:
    async with a_run("a", "b") as (run, (a, b)):
        for worker in (a, b):
            worker.runs.held |= {f"train/{number}": asyncio.Event() for number in range(6)}
        jobs = [asyncio.create_task(run.workers.run(order(number))) for number in range(6)]
        await a.runs.until_begun(3)
        await b.runs.until_begun(3)
        for one in a.runs.begun:
            a.runs.held[one.task.id].set()
        await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
        later = run.workers.run(order(7))
        assert (await later).task_id == "train/7"
        assert [one.task.id for one in a.runs.begun][3:] == ["train/7"]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


async def test_no_worker_has_more_than_its_places_and_the_others_wait_in_order() -> None:
    async with a_run("a", places=2) as (run, (a,)):
        a.runs.held |= {f"train/{number}": asyncio.Event() for number in range(4)}
        jobs = [asyncio.create_task(run.workers.run(order(number))) for number in range(4)]
        await a.runs.until_begun(2)
        assert run.workers.in_flight == {"a": 2}
        for number in range(4):
            a.runs.held[f"train/{number}"].set()
            await a.runs.until_begun(min(number + 3, 4))
        await asyncio.gather(*jobs)
        assert [one.seed for one in a.runs.begun] == [0, 1, 2, 3]
    assert places_of(128, 3) == 86  # training and an evaluation at once, in equal shares


async def test_the_episodes_of_a_killed_worker_end_as_lost_and_those_of_others_go_on() -> None:
    async with a_run("a", "b") as (run, (a, b)):
        for worker in (a, b):
            worker.runs.held |= {"train/0": asyncio.Event(), "train/1": asyncio.Event()}
        jobs = [asyncio.create_task(run.workers.run(order(number, tag="easy"))) for number in range(2)]
        await a.runs.until_begun(1)
        await b.runs.until_begun(1)
        a.kill()
        run.after(AWAY_SECONDS + 2)
        assert run.lost == [("a", 100, "its process ended or its connection broke")]
        lost = await jobs[a.runs.begun[0].seed]
        assert lost.stop_reason in INFRASTRUCTURE and lost.failed and lost.reward is None
        assert (lost.seed, lost.tag, lost.task["n"]) == (a.runs.begun[0].seed, "easy", lost.seed)
        assert "a is lost (rollout.workers): its process ended" in (lost.error or "")
        b.runs.held[b.runs.begun[0].task.id].set()
        assert not (await jobs[b.runs.begun[0].seed]).failed


async def test_a_silent_worker_is_given_up_and_told_so() -> None:
    async with a_run("a", "b") as (run, (a, b)):
        a.runs.held["train/0"] = asyncio.Event()
        job = asyncio.create_task(run.workers.run(order(0)))
        await a.runs.until_begun(1)
        for _ in range(int(SILENT_SECONDS) + 1):  # b gives signs of life, a none, and its connection is not broken
            run.after(1)
            run.workers.heard(b.link.number)
        assert (await job).stop_reason is StopReason.WORKER_LOST
        assert (await run.workers.run(order(1))).seed == 1 and len(b.runs.begun) == 1
        with pytest.raises(Exception, match="not known here"):
            await a.serving
        assert a.runs.closed == ["train/0"], "it has cancelled its episode"
        assert run.lost[0][0] == "a" and "no sign of life for 20 s" in run.lost[0][2]


async def test_time_in_which_the_controller_stood_still_counts_for_no_worker() -> None:
    async with a_run("a") as (run, _):
        run.workers.cut_off(1)
        run.clock.now += 10 * SILENT_SECONDS  # a suspended machine, say
        run.workers.look()
        assert run.lost == []
        run.after(AWAY_SECONDS + 2)
        assert len(run.lost) == 1


async def test_a_worker_that_is_started_anew_replaces_the_one_of_its_name() -> None:
    async with a_run("a") as (run, (old,)):
        old.runs.held["train/0"] = asyncio.Event()
        job = asyncio.create_task(run.workers.run(order(0)))
        await old.runs.until_begun(1)
        new = run.start("a")
        assert (await job).stop_reason is StopReason.WORKER_LOST
        assert (await run.workers.run(order(1))).seed == 1 and len(new.runs.begun) == 1
        with pytest.raises(WorkerLost):
            run.workers.heard(old.link.number)


async def test_a_worker_that_is_told_to_end_closes_its_environments_and_its_orders_end_as_lost() -> None:
    async with a_run("a") as (run, (a,)):
        a.runs.held["train/0"] = asyncio.Event()
        job = asyncio.create_task(run.workers.run(order(0)))
        await a.runs.until_begun(1)
        await a.end()  # SIGTERM
        assert a.runs.closed == ["train/0"] and run.workers.in_flight == {}
        assert "it was told to end" in ((await job).error or "")


async def test_lost_answers_change_nothing() -> None:
    async with a_run("a") as (run, (a,)):
        a.link.lose = ["poll", "ended", "poll", "ended"]
        found = await asyncio.gather(*(run.workers.run(order(number)) for number in range(5)))
        assert [one.seed for one in found] == list(range(5))
        assert sorted(one.seed for one in a.runs.begun) == list(range(5)), "none ran twice"


async def test_a_cancelled_call_returns_when_the_environment_is_closed() -> None:
    async with a_run("a") as (run, (a,)):
        a.runs.held["train/0"], a.runs.closing = asyncio.Event(), asyncio.Event()
        job = asyncio.create_task(run.workers.run(order(0)))
        await a.runs.until_begun(1)
        job.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not job.done()
        a.runs.closing.set()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert a.runs.closed == ["train/0"] and run.workers.in_flight == {"a": 0}


async def test_a_cancelled_call_whose_worker_dies_ends_and_is_not_tried_again() -> None:
    async with a_run("a", "b") as (run, (a, b)):
        a.runs.held["train/0"], a.runs.closing = asyncio.Event(), asyncio.Event()
        job = asyncio.create_task(run.workers.run(order(0)))
        await a.runs.until_begun(1)
        job.cancel()
        await asyncio.sleep(0)
        a.kill()
        run.after(AWAY_SECONDS + 2)
        with pytest.raises(asyncio.CancelledError):
            await job
        assert b.runs.begun == [] and run.workers.in_flight == {"b": 0}


async def test_a_worker_that_does_not_cancel_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "ANSWER_SECONDS", -0.99)  # beside 1 s of teardown
    async with a_run("a", places=1) as (run, (a,)):
        a.runs.held["train/0"], a.runs.closing = asyncio.Event(), asyncio.Event()
        job = asyncio.create_task(run.workers.run(order(0)))
        await a.runs.until_begun(1)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert run.workers.in_flight == {"a": 0}
        a.runs.closing.set()
        assert (await run.workers.run(order(1))).seed == 1, "its late answer is nobody's"


async def test_an_order_that_waits_is_cancelled_without_a_worker() -> None:
    async with a_run() as (run, _):
        job = asyncio.create_task(run.workers.run(order(0)))
        await asyncio.sleep(0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        worker = run.start("a")
        assert (await run.workers.run(order(1))).seed == 1
        assert [one.seed for one in worker.runs.begun] == [1]


async def test_orders_that_wait_too_long_for_a_worker_fail_with_the_key() -> None:
    async with a_run() as (run, _):
        job = asyncio.create_task(run.workers.run(order(0)))
        await asyncio.sleep(0)
        run.after(62)
        with pytest.raises(RolloutError, match=r"no rollout worker \(rollout.workers\) for 60 s"):
            await job


async def test_an_error_outside_the_episode_reaches_the_caller_with_its_traceback() -> None:
    async with a_run("a") as (run, (a,)):
        a.runs.error = ZeroDivisionError("in the runner, odd text: \ud800")
        with pytest.raises(RolloutError, match=r"a failed outside the episode:\n(.|\n)*ZeroDivisionError"):
            await run.workers.run(order(0))


async def test_abandoned_episodes_are_counted_over_all_workers_that_live() -> None:
    async with a_run("a", "b") as (run, (a, b)):
        a.runs.abandoned, b.runs.abandoned = 2, 3
        await asyncio.gather(*(run.workers.run(order(number)) for number in range(4)))
        assert run.workers.abandoned == 5
        a.kill()
        run.after(AWAY_SECONDS + 2)
        assert run.workers.abandoned == 3, "the tasks ended with their process"


async def test_workers_follow_what_is_known_of_the_servers() -> None:
    async with a_run("a") as (run, (a,)):
        await run.workers.run(order(0))
        run.servers = [{"url": "http://b", "number": 2, "state": "serving", "error": ""}]
        run.workers.servers_changed()
        await run.workers.run(order(1))
        assert [said[0]["url"] for said in a.followed] == ["http://a", "http://b"]


async def test_the_end_of_the_run_ends_the_workers() -> None:
    async with a_run("a") as (run, (a,)):
        a.runs.held["train/0"] = asyncio.Event()
        job = asyncio.create_task(run.workers.run(order(0)))
        await a.runs.until_begun(1)
        await run.workers.close()
        await a.serving
        assert a.runs.closed == ["train/0"]
        with pytest.raises(RolloutError, match="the run is over"):
            await job


async def test_a_task_that_json_would_change_is_refused_with_its_place() -> None:
    async with a_run("a") as (run, (a,)):
        for data, place in (
            ({"pair": [{"at": (1, 2)}]}, r"a tuple at row\['pair'\]\[0\]\['at'\]"),
            ({"names": {3: "x"}}, r"the key 3 at row\['names'\]"),
            ({"image": b"x"}, r"a bytes at row\['image'\]"),
        ):
            with pytest.raises(RolloutError, match=place):
                await run.workers.run(order(0, **data))
            with pytest.raises(UserError, match=place):  # when the controller begins
                check_rows([order(1).task, order(0, **data).task])
        odd = {"nan": float("nan"), "big": 1 << 70, "inf": float("-inf"), "none": None, "text": "\ud83d\ude00"}
        await run.workers.run(order(1, **odd))
        assert json.dumps(a.runs.begun[0].task.data) == json.dumps(order(1, **odd).task.data)


async def test_the_record_is_that_of_the_episode() -> None:
    async with a_run("a") as (run, _):
        found = await run.workers.run(order(5))
        assert found.whole().model_copy(update={"version": None, "task": {}}) == episode(order(5))
        assert (await run.workers.run(replace(order(6), attempt=2))).attempt == 2


async def test_a_cancelled_call_gets_what_there_was() -> None:
    async with a_run("a") as (run, (a,)):
        for number, sent in ((0, True), (1, False)):
            a.runs.held[f"train/{number}"] = asyncio.Event()
            left: list[Episode] = []
            job = asyncio.create_task(run.workers.run(order(number), left.append))
            await a.runs.until_begun(number + 1)
            if not sent:
                a.kill()
                run.after(AWAY_SECONDS + 2)
                assert (await job).stop_reason is StopReason.WORKER_LOST and not left
                continue
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job
            assert [(one.stop_reason, one.sampled_tokens, one.seed) for one in left] == [(StopReason.CANCELLED, 1, 0)]


async def test_an_order_that_never_began_is_cancelled_with_a_record_too() -> None:
    async with a_run() as (run, _):
        left: list[Episode] = []
        job = asyncio.create_task(run.workers.run(replace(order(0), attempt=1), left.append))
        await asyncio.sleep(0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert [(one.stop_reason, one.seed, one.attempt, one.trajectories) for one in left] == [
            (StopReason.CANCELLED, 0, 1, {})
        ]


async def test_the_ages_of_running_episodes_come_from_their_workers() -> None:
    async with a_run("a", "b") as (run, workers):
        for worker in workers:
            worker.runs.held |= {f"train/{number}": asyncio.Event() for number in range(4)}
            worker.runs.oldest = {"train/0": 3, "train/1": 4, "train/3": 6}
        orders = [order(number) for number in range(4)]
        jobs = [asyncio.create_task(run.workers.run(one)) for one in orders]
        for worker in workers:
            await worker.runs.until_begun(2)
        told: dict[EpisodeOrder, int] = {}
        every = asyncio.Event()

        def tell(ages: Ages) -> None:
            told.update(ages)
            if len(told) == 3:
                every.set()

        run.workers.ages(7, tell)
        await every.wait()
        assert told == {orders[0]: 3, orders[1]: 4, orders[3]: 6}
        assert [one.runs.asked_ages for one in workers] == [[7], [7]]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
