"""What becomes of groups and episodes that are too old: cancelled, left out, masked, counted and replaced."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.config.recipe import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, StopReason, Task, Trajectory
from agentrl.core.workflow import LLM, Outcome
from agentrl.inference.random_streams import stream_seed
from agentrl.rollout import rollouts
from agentrl.rollout.age_bound import AgeBound
from agentrl.rollout.auto_bound import AutoBound
from agentrl.rollout.buffer import Group, GroupBuffer
from agentrl.rollout.episode_runs import Cancelled, EpisodeOrder
from agentrl.rollout.group_account import GroupAccount, Tally, judge
from agentrl.rollout.in_flight import InFlight
from agentrl.rollout.journal_proof import valid_outcomes
from agentrl.rollout.stale_groups import age_metrics, without_stale
from agentrl.rollout.stop_rules import StopRules
from tests.rollout.age_world import World, node

SMALL = ("rollout.batch_size=1", "rollout.group_size=2", "rollout.max_staleness=1")


def episode(index: int, *versions: list[int], reward: float | None = 1.0) -> Episode:
    nodes = [one for turn in versions for one in (node(None, []), node(0, turn))]
    reason = StopReason.STALE if reward is None else StopReason.TERMINATED
    return Episode(
        group_id="g0", task_id="t0", index=index, seed=index, reward=reward, stop_reason=reason,
        trajectories={"assistant": Trajectory(nodes=nodes)},
    )  # fmt: skip


async def test_a_slow_group_is_cancelled_as_soon_as_no_step_can_train_it_and_replaced(tmp_path: Path) -> None:
    world = World(tmp_path, *SMALL, eventful=False)
    world.controller.start()
    await world.settle()
    await world.step_on()  # step 0; an episode of draw 0 is slow
    for _ in range(10):
        await world.act("newest", 1)
    assert not world.aborted, "it can still make step 1"
    await world.act("batch", 0)  # that is step 1: the earliest it can make now is step 2
    assert world.aborted == 1
    assert [one["draw"] for one in world.outcomes() if one["outcome"] == "stale"] == [0]
    (record,) = world.stale_episodes()
    assert (record["group_id"], record["index"], record["reward"], record["version"]) == ("g0", 0, None, 0)
    assert record["seed"] == stream_seed(world.recipe.seed, 0, 0) and "rollout.max_staleness" in record["error"]
    await world.drain()
    assert sorted(one["draw"] for one in world.outcomes()) == list(range(8))
    steps = [world.written[step] for step in sorted(world.written) if step]
    assert [m["rollout/groups_stale"] for m in steps] == [0, 0, 1, 0, 0, 0, 0]
    assert [m["rollout/groups_drawn"] for m in steps] == [1, 1, 2, 1, 1, 1, 1]
    assert all(m["rollout/failed"] == 0 and m["rollout/groups_failed"] == 0 for m in steps)
    assert steps[2]["dropped/episodes"] == 2, "the finished member of its group, too"
    assert steps[2]["dropped/tokens"] == 1 and steps[2]["dropped/tokens_share"] == pytest.approx(1 / 3)
    await world.close()


async def test_a_member_that_is_too_old_is_cancelled_alone_where_enough_others_are_left(tmp_path: Path) -> None:
    world = World(tmp_path, "rollout.batch_size=1", "rollout.group_size=3", "rollout.max_staleness=1", eventful=False)
    late = [stream_seed(world.recipe.seed, 0, index) for index in (1, 2)]
    world.gates = {seed: asyncio.Event() for seed in late}  # the environments of two members take long to reset
    world.controller.start()
    await world.settle()
    await world.step_on()
    await world.step_on()
    assert world.aborted == 1 and not [one for one in world.outcomes() if one["outcome"] == "stale"]
    for gate in world.gates.values():
        gate.set()
    await world.drain()
    assert sorted(one["draw"] for one in world.outcomes() if one["outcome"] == "trained") == list(range(8))
    ((step, columns),) = [
        (step, columns) for step, columns in world.trained.items() if columns.episodes[0].group_id == "g0"
    ]
    assert [one.index for one in columns.episodes] == [1, 2]
    found = world.written[step + 1]
    assert found["dropped/episodes"] == 1 and found["rollout/episodes"] == 2 and found["rollout/episodes_drawn"] == 3
    assert "dropped/reward_mean" not in found, "a cancelled episode has no reward"
    assert found["dropped/tokens_mean"] == 0 and found["trained/tokens_mean"] >= 1
    await world.close()


async def test_the_young_members_of_a_group_that_is_too_small_are_cancelled_with_the_old_ones(tmp_path: Path) -> None:
    world = World(tmp_path, *SMALL, eventful=False)
    old, young = (stream_seed(world.recipe.seed, 0, index) for index in (0, 1))
    world.slow, world.gates = {old, young}, {young: asyncio.Event()}
    world.controller.start()
    await world.settle()
    for _ in range(2):
        await world.act("newest", 0)
        await world.act("batch", 0)
        if world.step == 0:
            await world.act("publish", 0)
            world.gates[young].set()  # it asks for its first answer at version 1
            await world.settle()
            assert world.asked[-1] == 1
    assert {one["index"] for one in world.stale_episodes()} == {0, 1} and world.aborted == 2
    await world.drain()
    assert sorted(one["draw"] for one in world.outcomes()) == list(range(8))
    await world.close()


async def test_an_answer_that_was_asked_for_just_before_a_push_is_of_the_old_version(tmp_path: Path) -> None:
    """It is cancelled with the first step that cannot train it, not one step later."""
    world = World(tmp_path, *SMALL, eventful=False)
    late, later = (stream_seed(world.recipe.seed, 1, index) for index in range(2))
    world.slow = {late, later}
    world.gates = {seed: asyncio.Event() for seed in world.slow}
    world.controller.start()
    await world.settle()
    await world.act("newest", 0)
    await world.act("batch", 0)
    world.gates[late].set()  # after the step's own look at the ages, and before its push
    await world.settle()
    assert world.asked[-1] == 0
    await world.act("publish", 0)
    world.gates[later].set()
    await world.settle()
    await world.act("newest", 0)
    await world.act("batch", 0)
    assert [(one["group_id"], one["index"]) for one in world.stale_episodes()] == [("g1", 0), ("g1", 1)]
    await world.close()


async def test_an_episode_that_waited_for_a_place_has_the_version_of_its_begin(tmp_path: Path) -> None:
    world = World(tmp_path, *SMALL, "rollout.max_concurrent=1", eventful=False)
    world.controller.start()
    await world.settle()
    for _ in range(2):
        await world.act("newest", 0)
    await world.act("batch", 0)
    await world.act("publish", 0)
    for _ in range(2):
        await world.act("newest", 0)
    assert world.asked[:4] == [0, 0, 0, 1]
    assert [one["version"] for one in world.episodes() if one["group_id"] == "g1"] == [0, 1]
    await world.close()


async def test_a_finished_member_that_grew_too_old_before_its_group_ended_is_left_out_once(tmp_path: Path) -> None:
    world = World(tmp_path, "rollout.batch_size=1", "rollout.group_size=3", "rollout.max_staleness=1", eventful=False)
    late = [stream_seed(world.recipe.seed, 0, index) for index in (1, 2)]
    world.gates = {seed: asyncio.Event() for seed in late}
    world.controller.start()
    await world.settle()
    await world.act("newest", 0)  # the first member ends, too, at version 0
    await world.step_on()
    await world.step_on()
    for gate in world.gates.values():
        gate.set()
    await world.drain()
    ((step, columns),) = [(at, one) for at, one in world.trained.items() if one.episodes[0].group_id == "g0"]
    assert [one.index for one in columns.episodes] == [1, 2] and not world.aborted
    found = world.written[step + 1]
    assert found["dropped/episodes"] == 1 and found["dropped/reward_mean"] == stream_seed(world.recipe.seed, 0, 0) % 2
    await world.close()


THREE = ("rollout.batch_size=1", "rollout.group_size=3", "rollout.max_staleness=1")


class SlowFirst(World):
    """The first member of the first group never ends by itself; its teardown waits for ``torn_down``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, *THREE, eventful=False)
        self.first = stream_seed(self.recipe.seed, 0, 0)
        self.slow = {self.first}
        self.torn_down = asyncio.Event()

    async def arun_episode(self, task: Task, llm: LLM, *, seed: int) -> Outcome:
        try:
            return await super().arun_episode(task, llm, seed=seed)
        finally:
            if seed == self.first:
                await self.torn_down.wait()

    async def until_the_last_chance(self) -> None:
        """Train one step; then the next batch is the last one that can train what was sampled at version 0."""
        self.controller.start()
        await self.settle()
        await self.act("newest", 0)
        await self.act("batch", 0)
        await self.act("publish", 0)
        await self.act("newest", 0)
        assert not self.aborted and self.controller.rollouts.runs.keys() >= {0}


async def test_the_last_batch_that_can_train_a_group_takes_it_without_its_slow_episode(tmp_path: Path) -> None:
    world = SlowFirst(tmp_path)
    world.torn_down.set()
    await world.until_the_last_chance()
    await world.act("batch", 0)
    assert [one.group_id for one in world.trained[1].episodes] == ["g0", "g0"], "before younger ones that are finished"
    assert [one.index for one in world.trained[1].episodes] == [1, 2] and world.aborted == 1
    (record,) = world.stale_episodes()
    assert record["index"] == 0 and "the batch of step 1 is the last one" in record["error"]
    await world.act("publish", 0)
    assert world.written[2]["dropped/episodes"] == 1 and world.written[2]["rollout/episodes"] == 2
    await world.drain()
    assert all(one["outcome"] == "trained" for one in world.outcomes()) and max(world.ages()) == 1
    await world.close()


async def test_a_batch_does_not_wait_for_a_teardown_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "CUT_SECONDS", 0.01)
    world = SlowFirst(tmp_path)
    await world.until_the_last_chance()
    batch = Columns.from_bytes(await world.controller.next_batch(1))[0]
    assert {one.group_id for one in batch.episodes} == {"g2"}
    world.torn_down.set()
    await world.settle()
    assert [one["draw"] for one in world.outcomes() if one["outcome"] == "stale"] == [0]
    await world.close()


async def test_an_episode_that_is_cancelled_from_outside_meanwhile_stays_cancelled(tmp_path: Path) -> None:
    one = AgeBound("drop", 0, 64, 1)
    orders = [EpisodeOrder(Task(id="t", data={}), "g0", index, seed=index) for index in range(2)]
    flight = InFlight(one, 2, lambda: 0, lambda served, tell: tell([(order, 0) for order in orders]))

    async def forever(cancelled: Cancelled) -> Episode:
        await asyncio.Event().wait()
        raise AssertionError

    late: list[Episode] = []
    jobs = [asyncio.create_task(flight.run(0, order, forever, late.append)) for order in orders]
    await asyncio.sleep(0)
    flight.sweep()
    jobs[0].cancel()
    await asyncio.wait(jobs)
    assert jobs[0].cancelled() and jobs[1].result().stop_reason is StopReason.STALE


async def test_a_group_that_waits_too_long_leaves_its_place_to_another(tmp_path: Path) -> None:
    world = World(tmp_path, "rollout.batch_size=2", "rollout.group_size=2", "rollout.max_staleness=1", eventful=False)
    world.controller.start()
    await world.settle()
    await world.act("newest", 0)
    await world.act("batch", 0)
    await world.act("publish", 0)
    world.controller._bound.bound = 0  # the two that wait have tokens of version 0
    await world.act("batch", 0)
    assert [one["draw"] for one in world.outcomes() if one["outcome"] == "stale"] == [2, 3]
    await world.act("newest", 0)
    assert set(world.trained[1].versions.tolist()) == {1}
    await world.drain()
    assert sorted(one["draw"] for one in world.outcomes()) == list(range(8))
    assert world.written[2]["dropped/reward_mean"] >= 0, "they were finished"
    await world.close()


async def test_servers_that_say_an_old_version_end_the_run_with_both_keys(tmp_path: Path) -> None:
    world = World(tmp_path, *SMALL, "rollout.max_stale_groups=5", tasks=40, eventful=False)
    world.stamp = lambda: 0  # whatever is pushed
    world.controller.start()
    await world.settle()
    await world.drain()
    assert "5 groups in a row were too old" in world.error
    assert "rollout.max_staleness=1" in world.error and "rollout.stale=drop" in world.error
    assert len(world.trained) == 2, "versions 0 are within the bound at steps 0 and 1"
    await world.close()


async def test_a_masked_batch_says_which_version_is_the_oldest_with_a_loss(tmp_path: Path) -> None:
    world = World(tmp_path, *SMALL, "rollout.stale=mask", eventful=False)
    world.controller.start()
    await world.settle()
    for _ in range(4):
        await world.step_on()
    assert not world.aborted
    await world.drain()
    slow = next(step for step, columns in world.trained.items() if columns.episodes[0].group_id == "g0")
    versions = world.trained[slow].versions
    assert slow > 2 and versions.min() == 0, "the answer went on through all pushes"
    assert world.written[slow + 1]["staleness/masked"] == pytest.approx((versions < slow - 1).mean())
    assert world.facts["oldest_version"] == world.step - 2
    await world.close()


async def test_what_is_kept_beyond_the_bound_is_said(tmp_path: Path) -> None:
    world = World(tmp_path, *SMALL, "rollout.stale=keep", eventful=False)
    world.controller.start()
    await world.settle()
    for _ in range(4):
        await world.step_on()
    await world.drain()
    slow = next(step for step, columns in world.trained.items() if columns.episodes[0].group_id == "g0")
    assert world.written[slow + 1]["staleness/over_bound"] == 1.0
    assert world.written[1]["staleness/over_bound"] == 0.0 and world.written[1]["staleness/bound"] == 1.0
    assert world.facts["oldest_version"] is None
    await world.close()


async def test_the_run_can_be_closed_while_an_episode_is_being_cancelled(tmp_path: Path) -> None:
    world = World(tmp_path, *SMALL, eventful=False)
    world.controller.start()
    await world.settle()
    await world.step_on()
    for _ in range(10):
        await world.act("newest", 1)
    world.controller._bound.advance(2)
    world.controller._flight.sweep()  # cancelled, and its task has not run since
    await asyncio.wait_for(world.close(), 30)
    assert not world.pending


async def test_a_resumed_run_has_the_bound_from_its_first_step(tmp_path: Path) -> None:
    first = World(tmp_path, *SMALL, eventful=False)
    first.controller.start()
    await first.settle()
    for _ in range(3):
        await first.step_on()
    state = await first.controller.checkpoint()
    await first.close()
    second = World(tmp_path, *SMALL, eventful=False)
    await second.resume(3, state)
    assert second.asked and min(second.asked) == 3
    await second.step_on()
    await second.step_on()
    assert second.aborted == 1
    await second.drain()
    assert max(second.ages()) == 1
    ends = valid_outcomes(tmp_path)
    assert sorted(one["draw"] for one in ends) == list(range(8)), "each draw once"
    assert sum(one["outcome"] == "stale" for one in ends) == 2, "one in each part"
    await second.close()


async def test_a_finished_group_of_a_checkpoint_takes_a_place_within_the_bound(tmp_path: Path) -> None:
    """Else a resumed run would start one group more than the staleness gate allows for each that waits."""
    first = World(tmp_path, *SMALL, eventful=False)
    first.controller.start()
    await first.settle()
    await first.act("newest", 0)
    await first.act("batch", 0)
    await first.act("publish", 0)
    state = await first.controller.checkpoint()
    await first.close()
    second = World(tmp_path, *SMALL, eventful=False)
    await second.resume(1, state)
    gate = second.controller.gate
    assert len(second.controller._buffer) == 1 and (gate.accepted, gate.running) == (2, 1)
    await second.drain()
    assert sorted(one["draw"] for one in valid_outcomes(tmp_path) if one["outcome"] == "trained") == list(range(8))
    await second.close()


async def test_auto_changes_the_bound_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter([None, "the trainer waits"])

    def observe(self: AutoBound, waited: float, seconds: float) -> str | None:
        assert 0 <= waited <= seconds
        why = next(said, None)
        self.bound += why is not None
        return why

    monkeypatch.setattr(AutoBound, "observe", observe)
    world = World(tmp_path, "rollout.batch_size=1", "rollout.group_size=2", "rollout.max_staleness=auto", tasks=12)
    world.controller.start()
    with caplog.at_level(logging.INFO):
        await world.drain()
    assert [r.getMessage() for r in caplog.records if "auto" in r.getMessage()] == [
        "rollout.max_staleness=auto: 2 instead of 1: the trainer waits"
    ]
    bounds = [world.written[step]["staleness/bound"] for step in sorted(world.written) if step]
    assert bounds[:3] == [1, 1, 1] and bounds[3:] == [2] * len(bounds[3:]) and world.controller.gate.max_staleness == 2
    await world.close()


def bound(policy: str = "drop", step: int = 5, most: int = 1) -> AgeBound:
    return AgeBound(policy, most, 64, step)  # type: ignore[arg-type]


CONFIG = RolloutConfig(group_size=3)


def test_what_is_left_of_a_group_is_judged_anew() -> None:
    episodes = [episode(0, [4]), episode(1, [3, 4], reward=0.0), episode(2, [5, 5])]
    columns = Columns.of(episodes)
    assert bound().stale(columns) == [False, True, False]
    tally = judge(episodes, CONFIG, RewardConfig())
    left = without_stale(Group(0, columns, tally), bound(), CONFIG, RewardConfig(), "role")
    assert left.tally.outcome == "kept" and [one.index for one in left.columns.episodes] == [0, 2]
    assert left.columns.to_episodes() == Columns.of([episodes[0], episodes[2]]).to_episodes()
    assert left.tally.of_trained().rewards == (1.0, 1.0) and left.tally.rewards == (1.0, 0.0, 1.0)
    (dropped,) = left.tally.dropped
    assert (dropped.tokens, dropped.turns, dropped.reward) == (2, 1, 0.0)

    skipping = CONFIG.model_copy(update={"skip_uniform_groups": True})
    uniform = without_stale(Group(0, columns, tally), bound(), skipping, RewardConfig(), "role")
    assert uniform.tally.outcome == "stale" and "uniform rewards without them" in uniform.tally.reason
    again = without_stale(left, bound(step=6), CONFIG, RewardConfig(), "role")
    assert again.tally.outcome == "stale" and again.tally.reason == "2 of 3 episodes are too old"
    assert again.tally.stale == (True, True, False)
    assert sorted(one.tokens for one in again.tally.dropped) == [1, 2, 2], "the young one goes with its group"
    assert without_stale(left, bound("mask", step=9), CONFIG, RewardConfig(), "role").tally.outcome == "stale"
    assert without_stale(left, bound("keep", step=9), CONFIG, RewardConfig(), "role") is left


def test_a_group_is_stale_only_if_its_old_episodes_would_have_made_it_usable() -> None:
    cancelled, good = episode(0, [0], reward=None), episode(1, [4])
    failed = episode(2, [4]).model_copy(update={"stop_reason": StopReason.AGENT_ERROR, "reward": None})
    assert judge([cancelled, good, failed], CONFIG, RewardConfig()).outcome == "stale"
    assert judge([cancelled, failed, failed], CONFIG, RewardConfig()).outcome == "failed"
    tally = judge([cancelled, good, failed], CONFIG, RewardConfig(), stale=[False])
    assert tally.failures == {"agent_error": 1} and tally.solve_rate == 1.0
    assert [one.reward for one in tally.dropped] == [1.0, None], "what is finished is not trained either"
    rules = StopRules(CONFIG.model_copy(update={"batch_size": 1}))
    assert rules.check([cancelled] * 3, tally) is None, "a cancelled episode is no failure"


def test_the_metrics_of_kept_groups_leave_dropped_episodes_out() -> None:
    episodes = [episode(0, [4]), episode(1, [3], reward=0.0), episode(2, [4])]
    tally = judge(episodes, CONFIG, RewardConfig(), stale=[False, True, False])
    account = GroupAccount()
    account.leave_out(1, replace(tally, outcome="stale"))
    assert len(account.dropped([tally])) == 2
    found = account.count([tally])
    assert found["reward/mean_kept"] == 1.0 and found["reward/mean_drawn"] == pytest.approx(2 / 3)
    assert (found["rollout/groups_stale"], found["rollout/groups_kept"], found["rollout/groups_failed"]) == (1, 1, 0)


def test_a_mean_of_no_dropped_episode_is_absent() -> None:
    columns = Columns.of([episode(0, [4, 4], [5])])
    assert age_metrics(bound(), columns, []) == {
        "staleness/bound": 1.0, "dropped/episodes": 0.0, "dropped/tokens": 0.0, "dropped/tokens_share": 0.0,
    }  # fmt: skip
    tally = judge([episode(0, [1], reward=None)], CONFIG, RewardConfig())
    assert age_metrics(bound(), columns, tally.dropped) == {
        "staleness/bound": 1.0, "dropped/episodes": 1.0, "dropped/tokens": 1.0, "dropped/tokens_share": 0.25,
        "dropped/tokens_mean": 1.0, "dropped/turns_mean": 1.0,
        "trained/tokens_mean": 3.0, "trained/turns_mean": 2.0, "trained/reward_mean": 1.0,
    }  # fmt: skip


def test_a_lower_bound_comes_into_force_when_its_groups_had_their_time() -> None:
    one = bound(step=10, most=3)
    one.change(1)
    assert [(step, one.bound) for step in (11, 12, 13, 14) if one.advance(step) is None] == [
        (11, 3), (12, 3), (13, 1), (14, 1),
    ]  # fmt: skip
    one.change(4)
    assert one.bound == 4
    assert not bound(step=1, most=0).may_start(0) and bound(step=1, most=0).may_start(1)


async def test_the_oldest_groups_leave_first_and_a_refused_one_makes_no_batch() -> None:
    refused: set[int] = set()
    buffer = GroupBuffer(lambda group: None if group.draw in refused else group)
    for draw, version in ((0, 3), (1, 2), (2, 2), (3, 1)):
        await buffer.put(Group(draw, Columns.of([episode(0, [version])]), Tally("kept")))
    assert [group.draw for group in await buffer.take(2)] == [1, 3]
    refused.add(0)
    waiting = asyncio.create_task(buffer.take(2))
    await asyncio.sleep(0)
    assert not waiting.done() and len(buffer) == 1
    await buffer.put(Group(4, Columns.of([episode(0, [3])]), Tally("kept")))
    assert [group.draw for group in await waiting] == [2, 4]
