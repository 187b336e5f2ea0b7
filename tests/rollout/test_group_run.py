"""Groups: retries of what the infrastructure failed, stragglers, cancellation, and what is recorded of it all."""

import asyncio
import contextlib
import json
import random
import traceback
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.episode import INFRASTRUCTURE, Episode, StopReason, Task
from agentrl.core.infrastructure import InfrastructureError
from agentrl.core.workflow import LLM, Outcome, RolloutWorkflow
from agentrl.inference.backend import InferenceError
from agentrl.inference.random_streams import stream_seed
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.failed_episodes import FILE, FailedEpisodes, failure_counts
from agentrl.rollout.failure_kinds import kind_of
from agentrl.rollout.group_run import Oversampled
from agentrl.rollout.journal import read_episodes
from agentrl.rollout.journal_proof import valid_outcomes
from tests.rollout.instant import Instant, run_virtually

Act = Callable[[LLM, int], Awaitable[Outcome]]


class Plays(RolloutWorkflow):
    """Does what a function of the session and the number of the call says, and counts open environments."""

    def __init__(self, act: Act) -> None:
        self.act = act
        self.calls = self.open = 0
        self.seeds: list[int] = []

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        number, self.calls = self.calls, self.calls + 1
        self.seeds.append(seed)
        self.open += 1
        try:
            return await self.act(llm, number)
        finally:
            try:
                await asyncio.sleep(0)  # a teardown that waits for something
            finally:
                self.open -= 1


async def good(llm: LLM, number: int) -> Outcome:
    llm.session().say(3)  # type: ignore[attr-defined]
    return Outcome(reward=float(number % 5))


def records(run: Instant) -> list[Episode]:
    return list(read_episodes(run.folder / "episodes.jsonl"))


def first_group(run: Instant) -> list[Episode]:
    return [episode for episode in records(run) if episode.group_id == "g0"]


async def one_step(run: Instant) -> None:
    run.controller.start()
    try:
        await run.step(0)
    finally:
        await run.close()


@pytest.mark.parametrize(
    "error", [InferenceError("http://s is gone"), InfrastructureError("no sandbox"), BrokenPipeError()]
)
def test_what_the_infrastructure_failed_is_tried_again_with_the_same_seed(tmp_path: Path, error: Exception) -> None:
    async def act(llm: LLM, number: int) -> Outcome:
        if number in (1, 6):  # a member of the first group, and its next attempt: six episodes start at once
            raise error
        return await good(llm, number)

    workflow = Plays(act)
    run = Instant(tmp_path, workflow, "rollout.max_staleness=0")
    run_virtually(one_step(run))
    tried = sorted((e for e in first_group(run) if e.index == 1), key=lambda e: e.attempt)
    assert [(e.attempt, e.retried, e.failed) for e in tried] == [(0, True, True), (1, True, True), (2, False, False)]
    assert {e.seed for e in tried} == {stream_seed(run.recipe.seed, 0, 1)} and tried[0].stop_reason in INFRASTRUCTURE
    trained = [e for e in run.batches[0].episodes if e.group_id == "g0"]
    assert [e.index for e in trained] == [0, 1, 2], "the group is complete, in the order of its members"
    metrics = run.written[-1]
    assert (metrics["rollout/retried"], metrics["rollout/failed"], metrics["rollout/groups_short"]) == (2, 0, 0)
    assert metrics["rollout/episodes_drawn"] == 6


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("a fault of the code"), StopReason.ENVIRONMENT_ERROR),
        (TimeoutError(), StopReason.ENVIRONMENT_ERROR),
    ],
)
def test_what_code_or_policy_did_is_never_tried_again(tmp_path: Path, error: Exception, reason: StopReason) -> None:
    async def act(llm: LLM, number: int) -> Outcome:
        if number == 1:
            raise error
        return await good(llm, number)

    run = Instant(tmp_path, Plays(act))
    run_virtually(one_step(run))
    (failed,) = [e for e in first_group(run) if e.failed]
    assert (failed.stop_reason, failed.attempt, failed.retried) == (reason, 0, False)
    metrics = run.written[-1]
    assert (metrics["rollout/retried"], metrics["rollout/failed"], metrics["rollout/groups_short"]) == (0, 1, 1)


@pytest.mark.parametrize(
    ("settings", "failing", "outcome", "attempts"),
    [
        (["rollout.retries=2"], {0}, "trained", 5),  # the budget is spent, and two of three are left
        (["rollout.retries=2"], {0, 1}, "failed", 5),
        (["rollout.on_failure=keep"], {0}, "trained", 3),
        (["rollout.on_failure=keep", "rollout.min_group=3"], {0}, "failed", 3),
        (["rollout.on_failure=keep", "rollout.min_group=1"], {0, 1}, "trained", 3),
        (["rollout.on_failure=drop"], {0}, "failed", 3),
        (["rollout.on_failure=drop"], set(), "trained", 3),
    ],
)
def test_a_group_with_failed_members_is_kept_or_left_out(
    tmp_path: Path, settings: list[str], failing: set[int], outcome: str, attempts: int
) -> None:
    seeds: set[int] = set()

    async def act(llm: LLM, number: int) -> Outcome:
        raise AssertionError

    workflow = Plays(act)
    run = Instant(tmp_path, workflow, "rollout.max_staleness=0", "rollout.max_failure_rate=1", *settings)
    seeds.update(stream_seed(run.recipe.seed, 0, index) for index in failing)

    async def scripted(llm: LLM, number: int) -> Outcome:
        if workflow.seeds[number] in seeds:
            raise InferenceError("gone")
        return await good(llm, number)

    workflow.act = scripted
    run_virtually(one_step(run))
    assert {f["draw"]: f["outcome"] for f in valid_outcomes(tmp_path)}[0] == outcome
    assert len(first_group(run)) == attempts
    trained = [e for e in run.batches[0].episodes if e.group_id == "g0"]
    assert len(trained) == (3 - len(failing) if outcome == "trained" else 0)


def test_the_first_that_end_make_the_group_and_stragglers_are_cancelled_and_closed(tmp_path: Path) -> None:
    async def act(llm: LLM, number: int) -> Outcome:
        llm.session().say(2)  # type: ignore[attr-defined]
        await asyncio.sleep(1.0 + number % 5)  # groups of 3 + 2: the members end after 1, 2, 3, 4 and 5 seconds
        llm.session().say(4)  # type: ignore[attr-defined]
        return Outcome(reward=float(number % 3))

    workflow = Plays(act)
    run = Instant(tmp_path, workflow, "rollout.group_extra=2", "rollout.max_staleness=0")

    async def work() -> None:
        run.controller.start()
        await run.step(0)
        assert asyncio.get_running_loop().time() == pytest.approx(3.0)
        await run.step(1)
        await run.close()

    run_virtually(work())
    assert [e.index for e in run.batches[0].episodes] == [0, 1, 2, 0, 1, 2]
    cancelled = [e for e in first_group(run) if e.stop_reason is StopReason.CANCELLED]
    assert [e.index for e in cancelled] == [3, 4] and all(e.failed and e.seconds == pytest.approx(3) for e in cancelled)
    assert [len(e.trajectories["assistant"].nodes) for e in cancelled] == [1, 1], "what there was is in the record"
    assert workflow.open == 0 and run.client.open == 0 and run.controller.gate.running == 0
    metrics = run.written[-1] | {}
    assert metrics["rollout/stragglers"] == 4 and metrics["rollout/straggler_tokens"] == 8
    assert metrics["rollout/extra_seconds_ratio"] == pytest.approx(2 / (12 / 5))
    assert metrics["rollout/extra_tokens_ratio"] == pytest.approx(6 / (22 / 5))
    assert metrics["rollout/failed"] == 0


def test_a_straggler_that_is_cancelled_while_a_teacher_scores_it_leaves_its_record(tmp_path: Path) -> None:
    run = Instant(tmp_path, Plays(good), "rollout.group_extra=1")

    async def score(episode: Episode) -> Episode:
        if episode.index == 1:
            await asyncio.Event().wait()
        return episode

    run.controller.rollouts.score = score
    run_virtually(one_step(run))
    assert [e.index for e in run.batches[0].episodes if e.group_id == "g0"] == [0, 2, 3]
    (straggler,) = [e for e in first_group(run) if e.index == 1]
    assert straggler.stop_reason is StopReason.CANCELLED and straggler.reward is None and straggler.sampled_tokens == 3


def test_an_extra_member_takes_the_place_of_one_that_failed(tmp_path: Path) -> None:
    async def act(llm: LLM, number: int) -> Outcome:
        if number == 0:
            raise RuntimeError("a fault")
        return await good(llm, number)

    run = Instant(tmp_path, Plays(act), "rollout.group_extra=1")
    run_virtually(one_step(run))
    assert [e.index for e in run.batches[0].episodes if e.group_id == "g0"] == [1, 2, 3]


def test_a_group_that_is_cancelled_from_outside_has_one_end_and_leaves_room(tmp_path: Path) -> None:
    async def act(llm: LLM, number: int) -> Outcome:
        if number % 3 == 2 and number < 6:
            await asyncio.Event().wait()
        return await good(llm, number)

    workflow = Plays(act)
    run = Instant(tmp_path, workflow, "rollout.episode_timeout=1e6", "rollout.max_staleness=0")

    async def work() -> None:
        run.controller.start()
        await asyncio.sleep(5)
        assert sorted(run.controller.rollouts.runs) == [0, 1]
        run.controller.rollouts.runs[0].cancel("stale")
        run.controller.rollouts.runs[1].cancel("stale")
        await run.step(0)
        await run.close()

    run_virtually(work())
    assert {f["draw"]: (f["outcome"], f.get("reason")) for f in valid_outcomes(tmp_path) if f["draw"] < 2} == {
        0: ("filtered", "stale"),
        1: ("filtered", "stale"),
    }
    assert workflow.open == 0 and run.client.open == 0


def test_failures_of_the_infrastructure_in_a_row_end_the_run_with_the_first_of_each_kind(tmp_path: Path) -> None:
    async def act(llm: LLM, number: int) -> Outcome:
        if number % 2:
            raise InferenceError(f"http://127.0.0.1:{number}: no answer")
        raise InfrastructureError("the sandbox's host is gone")

    run = Instant(tmp_path, Plays(act), "rollout.max_failures_in_a_row=10")
    with pytest.raises(
        RolloutError, match=r"(?s)failed 10 attempts in a row.*5 times .*Traceback.*is gone.*5 times .*no answer"
    ):
        run_virtually(one_step(run))


def test_a_row_of_failures_ends_with_an_episode_that_did_not_fail(tmp_path: Path) -> None:
    async def act(llm: LLM, number: int) -> Outcome:
        if number % 3:
            raise InferenceError("gone")
        return await good(llm, number)

    settings = ["rollout.max_failures_in_a_row=3", "rollout.on_failure=keep", "rollout.min_group=1"]
    run = Instant(tmp_path, Plays(act), *settings, "rollout.max_failure_rate=1")
    run_virtually(one_step(run))
    assert len(run.batches[0].episodes) == 2


def test_a_resumed_run_counts_its_failed_episodes_on(tmp_path: Path) -> None:
    """The first of a kind is the first of the run: its traceback stands in the file once."""
    one = Episode(group_id="g0", task_id="t0", index=0, seed=0, stop_reason=StopReason.AGENT_ERROR, error="gone")
    for _ in range(2):
        failed = FailedEpisodes(tmp_path)
        failed.add(one)
        failed.close()
        with (tmp_path / FILE).open("ab") as file:
            file.write(b'{"kind": "cut')  # killed in the middle of a line
    lines = (tmp_path / FILE).read_text().splitlines()
    first, second = map(json.loads, lines[:2])
    assert (first["count"], second["count"]) == (1, 2)
    assert first["error"] == "gone" and "error" not in second
    assert failure_counts(tmp_path / FILE) == [("agent_error: gone", 2)]


def test_failed_episodes_are_in_a_file_with_the_first_traceback_of_each_kind(tmp_path: Path) -> None:
    async def act(llm: LLM, number: int) -> Outcome:
        if number % 3 == 1:
            raise KeyError(f"price {number}")
        if number % 6 == 2:
            raise InferenceError(f"http://127.0.0.1:{number}: no answer within {number} s")
        return await good(llm, number)

    run = Instant(tmp_path, Plays(act), "rollout.on_failure=keep", "rollout.min_group=1", "rollout.max_failure_rate=1")
    run_virtually(one_step(run))
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert len(lines) == sum(e.failed for e in records(run))
    (key, first), (refused, second) = failure_counts(tmp_path / FILE)
    assert key.startswith("environment_error: KeyError in ") and "act (test_group_run.py:" in key
    assert refused == "inference_error: http://N.N:N: no answer within N s" and first > second > 1
    assert sum("error" in line for line in lines) == 2 and "Traceback" in lines[0]["error"]
    assert [line["count"] for line in lines if line["kind"] == key] == list(range(1, first + 1))
    (tmp_path / FILE).open("a").write('{"kind": "torn')
    again = FailedEpisodes(tmp_path)
    again.add(next(e for e in records(run) if e.stop_reason is StopReason.ENVIRONMENT_ERROR))
    again.close()
    assert dict(failure_counts(tmp_path / FILE))[key] == first + 1, "a resumed run counts on"


def test_what_the_controller_cancelled_is_no_failure_to_look_into(tmp_path: Path) -> None:
    failed = FailedEpisodes(tmp_path)
    for reason in (StopReason.STALE, StopReason.CANCELLED):
        failed.add(Episode(group_id="g", task_id="t", index=0, seed=0, stop_reason=reason, error="cancelled"))
    failed.close()
    assert not (tmp_path / FILE).exists()


def test_the_kind_of_a_group_of_exceptions_is_that_of_the_last_one_in_it() -> None:
    async def fails() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.wait_for(broken(), 1))

    async def broken() -> None:
        raise InfrastructureError("no host")

    with pytest.raises(ExceptionGroup) as caught:
        run_virtually(fails())
    text = "".join(traceback.format_exception(caught.value))
    one = Episode(
        group_id="g", task_id="t", index=0, seed=0, stop_reason=StopReason.INFRASTRUCTURE_ERROR, error=text
    )  # fmt: skip
    found = kind_of(one)
    assert (
        "infrastructure_error: agentrl.core.infrastructure.InfrastructureError in broken (test_group_run.py:" in found
    )


def test_lengths_of_no_straggler_are_no_metric() -> None:
    from agentrl.rollout.group_account import oversampling_metrics

    assert oversampling_metrics([]) == {}
    found = oversampling_metrics([Oversampled((1.0,), (0,), (3.0,), (0,))])
    assert found["rollout/extra_seconds_ratio"] == 0.5 and "rollout/extra_tokens_ratio" not in found


class Chaos(RolloutWorkflow):
    """Fails, hangs, swallows its cancellation, is slow, or says something, as a seed decides."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rates = [self.rng.random() * 0.2 for _ in range(4)]
        self.open = 0
        self.seeds: Counter[int] = Counter()

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        self.seeds[seed] += 1
        self.open += 1
        rng = self.rng
        try:
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(rng.choice([0.0, 0.0, rng.expovariate(0.2)]))
                llm.session().say(rng.randrange(1, 5))  # type: ignore[attr-defined]
            infrastructure, fault, hang, missing = (rng.random() < rate for rate in self.rates)
            if infrastructure:
                raise rng.choice([InferenceError("gone"), InfrastructureError("gone"), ConnectionResetError()])
            if fault:
                raise rng.choice([KeyError("x"), ValueError("y")])
            if hang:
                await asyncio.Event().wait()
            return Outcome(reward=None if missing else float(rng.randrange(3)))
        finally:
            try:
                await asyncio.sleep(rng.choice([0.0, 0.5]))
            finally:
                self.open -= 1


def chosen(seed: int) -> dict[str, Any]:
    rng = random.Random(f"settings/{seed}")
    policy = rng.choice(["retry", "retry", "keep", "drop"])
    size = rng.choice([1, 2, 3, 5]) + (rng.random() < 0.7)
    found: dict[str, Any] = {
        "group_size": max(2, size),
        "group_extra": rng.choice([0, 0, 1, 3]),
        "on_failure": policy,
        "batch_size": rng.choice([1, 2, 4]),
        "max_staleness": rng.choice([0, 1, 2]),
        "max_concurrent": rng.choice([2, 8, 24, 128]),
        "skip_uniform_groups": rng.random() < 0.4,
        "episode_timeout": 20,
        "close_timeout": 2,
        "max_failure_rate": 1,
        "max_failures_in_a_row": 10_000,
    }
    if policy == "retry":
        found["retries"] = rng.choice([0, 1, 4])
    if policy != "drop":
        found["min_group"] = rng.randint(1, found["group_size"])
    return found


@pytest.mark.parametrize("seed", range(24))
def test_every_promise_of_groups_holds_under_any_schedule(tmp_path: Path, seed: int) -> None:
    settings = chosen(seed)
    workflow = Chaos(seed)
    run = Instant(tmp_path, workflow, *(f"rollout.{key}={value}" for key, value in settings.items()))
    steps = 4

    async def work() -> None:
        run.controller.start()
        with contextlib.suppress(RolloutError):  # all episodes of a small batch may fail
            for step in range(steps):
                await run.step(step)
        await run.close()
        assert run.client.open == 0 and workflow.open == 0 and not run.controller.rollouts.runs
        assert run.controller.gate.running == 0

    run_virtually(work())
    size, extra = settings["group_size"], settings["group_extra"]
    least = size if settings["on_failure"] == "drop" else settings["min_group"]
    assert run.client.most <= settings["max_concurrent"]
    ends = valid_outcomes(tmp_path)
    assert max(Counter(f["draw"] for f in ends).values()) == 1, "a group with two ends"
    groups: dict[str, list[Any]] = defaultdict(list)
    for batch in run.batches:
        for episode in batch.episodes:
            groups[episode.group_id].append(episode)
    assert len(groups) == len(run.batches) * settings["batch_size"]
    assert {f"g{f['draw']}" for f in ends if f["outcome"] == "trained"} == set(groups)
    for episodes in groups.values():
        assert least <= len(episodes) <= size and not any(e.failed for e in episodes)
        assert [e.index for e in episodes] == sorted({e.index for e in episodes})
        if settings["skip_uniform_groups"]:
            assert len({e.reward for e in episodes if e.roles}) > 1
    written = [Episode.model_validate(json.loads(line)) for line in (tmp_path / "episodes.jsonl").open()]
    assert max(Counter((e.group_id, e.index, e.attempt) for e in written).values()) == 1, "an attempt with two records"
    retried = Counter(e.group_id for e in written if e.retried)
    assert all(count <= settings.get("retries", 0) for count in retried.values())
    assert all(e.stop_reason in INFRASTRUCTURE for e in written if e.retried)
    for episode in written:
        assert episode.seed == stream_seed(run.recipe.seed, int(episode.group_id[1:]), episode.index)
        assert episode.index < size + extra
    assert len({e.seed for e in written}) == len({(e.group_id, e.index) for e in written}), "two members, one seed"
    for end in ends:
        final = [e for e in written if e.group_id == f"g{end['draw']}" and not e.retried]
        usable = sum(not e.failed for e in final)
        if end["outcome"] not in ("cancelled", "stale"):
            assert usable == size or (usable < size and len(final) == size + extra), "it ended too early or too late"
            assert (end["outcome"] == "failed") == (usable < least), end
    metrics = run.written[1:]
    drawn = sum(m["rollout/groups_drawn"] for m in metrics)
    assert drawn == sum(
        m[f"rollout/groups_{name}"] for m in metrics for name in ("kept", "failed", "filtered", "stale")
    )
    assert sum(m["rollout/episodes"] for m in metrics) == sum(len(one) for one in groups.values())
    assert sum(m["rollout/groups_short"] for m in metrics) == sum(len(one) < size for one in groups.values())
