"""Counts a simulated run anew from its files and batches, and compares the metrics of each step.

The count shares no code with the controller's: it reads the journal, the episodes and the batches, and applies what
docs/metrics.md says of each number.
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest

from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.core.columns import Columns
from agentrl.core.episode import Episode, StopReason
from agentrl.inference.backend import InferenceError
from agentrl.rollout.errors import RolloutError
from agentrl.rollout.journal import read_episodes
from agentrl.rollout.journal_proof import valid_outcomes
from agentrl.sim.device import Speed
from agentrl.sim.episodes import Shape, Turn
from agentrl.sim.faults import KINDS, Durations, Kind, Schedule
from agentrl.sim.simulation import Devices, Simulation
from agentrl.sim.virtual_loop import run_virtual
from agentrl.weights.transaction import WeightPushError

Key = tuple[str, int]  # group and index of an episode
SETTINGS: dict[str, tuple[object, ...]] = {
    "rollout.batch_size": (1, 2, 3), "rollout.group_size": (2, 2, 3, 4), "rollout.max_concurrent": (2, 4, 8, 16),
    "rollout.max_staleness": (0, 1, 2, "auto"), "rollout.stale": ("drop", "mask", "keep"),
    "rollout.group_extra": (0, 0, 1, 2), "rollout.on_failure": ("retry", "keep", "drop"),
    "rollout.skip_uniform_groups": ("true", "false"), "weights.pause_mode": ("abort", "in_place", "retract"),
    "eval.on_push": ("wait", "mix"), "eval.every": (0, 1, 2),
}  # fmt: skip
FIXED = [
    "rollout.episode_timeout=300", "rollout.close_timeout=5", "rollout.max_failure_rate=1", "weights.lease_seconds=60",
    "inference.patience=120", "inference.probe_seconds=30",
]  # fmt: skip


class Mixed:
    """Episodes of one to four answers; a task decides how often it is solved, and some never are."""

    def of(self, task: str, seed: int) -> Shape:
        chance, solved = random.Random(seed), random.Random(task).random()
        turns = [Turn(1 + int(chance.lognormvariate(4.5, 1.2)), 3 * chance.random()) for _ in range(1 + seed % 4)]
        return Shape(tuple(turns), float(solved > 0.3 and chance.random() < solved), chance.random())

    def mean(self) -> float:
        return 200.0

    def turns(self) -> float:
        return 2.5


@dataclass
class Ran:
    recipe: Recipe
    tasks: int
    written: dict[int, dict[str, float]]
    batches: dict[int, Columns]
    outcomes: list[dict[str, object]]
    episodes: list[Episode]
    stopped: str


def play(number: int, folder: Path) -> Ran:
    chance = random.Random(number)
    chosen = [f"{key}={chance.choice(values)}" for key, values in SETTINGS.items()]
    recipe = load_recipe("arithmetic_grpo", [*FIXED, *chosen], device="cpu")
    tasks, faults = chance.choice([5, 9, 14]), chance.choice([0, 30, 120])
    schedule: list[Kind] = [chance.choice(KINDS) if chance.random() < 0.25 else "fine" for _ in range(faults)]
    devices = Devices(
        2, 1, Speed(0.05, 0.001), train_seconds=chance.choice([1.0, 10.0, 40.0]), push_seconds=0.5,
        slots=chance.choice([None, 2]),
    )  # fmt: skip
    ran = Ran(recipe, tasks, {}, {}, [], [], "")

    async def main() -> None:
        simulation = Simulation(
            recipe, devices, Mixed(), steps=100, faults=Schedule(schedule, Durations(call=100.0)), folder=folder,
            episodes=True, epochs=1, tasks=tasks, evaluated=2,
            write=lambda step, found: ran.written.setdefault(step, {}).update(found),
        )  # fmt: skip
        next_batch = simulation.controller.next_batch

        async def noted(step: int) -> bytes:
            batch = await next_batch(step)
            ran.batches[step] = Columns.from_bytes(batch)[0]
            return batch

        simulation.controller.next_batch = noted  # type: ignore[method-assign]
        try:
            await simulation.run()
        except (RolloutError, WeightPushError, InferenceError) as error:  # what it counted before is right all the same
            ran.stopped = str(error)
        await asyncio.sleep(10.0)  # teardowns

    run_virtual(main(), limit=2e3 * faults + 1e5)
    ran.outcomes = valid_outcomes(folder)
    ran.episodes = list(read_episodes(folder / "episodes.jsonl"))
    return ran


def tokens(episode: Episode) -> int:
    return sum(sum(node.loss_mask) for one in episode.trajectories.values() for node in one.nodes)


def age(episode: Episode, step: int) -> int:
    versions = [v for one in episode.trajectories.values() for node in one.nodes for v in node.versions]
    return step - min(version for version in versions if version is not None)


def mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def counted(ran: Ran, step: int) -> dict[str, float | None]:
    """Counts a step of which the batch is known; ``None`` for a number that is absent."""
    here = [one for one in ran.outcomes if one["step"] == step and one["outcome"] != "cancelled"]
    attempts, outcome = defaultdict[str, list[Episode]](list), {f"g{one['draw']}": one["outcome"] for one in here}
    for episode in ran.episodes:
        if episode.group_id in outcome:
            attempts[episode.group_id].append(episode)
    every = [one for group in attempts.values() for one in group if one.stop_reason is not StopReason.CANCELLED]
    members = {(one.group_id, one.index): one for one in every if not one.retried}
    trained = [members[one.group_id, one.index] for one in ran.batches[step].episodes]
    ends, good = Counter(outcome.values()), [one for one in members.values() if not one.failed]
    stale = [one for one in members.values() if one.stop_reason is StopReason.STALE]
    found: dict[str, float | None] = {
        "rollout/groups_drawn": len(here), "rollout/groups_kept": ends["trained"],
        "rollout/groups_filtered": ends["filtered"], "rollout/groups_failed": ends["failed"],
        "rollout/groups_stale": ends["stale"],
        "rollout/episodes": len(trained), "rollout/episodes_drawn": len(members),
        "rollout/retried": sum(one.retried for one in every),
        "rollout/failed": len(members) - len(good) - len(stale),
        "reward/mean_drawn": mean(one.reward or 0.0 for one in good),
        "reward/mean_kept": mean(one.reward or 0.0 for one in trained),
        "staleness/mean": mean(age(one, step) for one in trained),
        "staleness/max": max(age(one, step) for one in trained),
    }  # fmt: skip
    if ran.recipe.rollout.stale == "keep" or any(outcome[one.group_id] == "failed" for one in [*good, *stale]):
        return found  # the files do not say which of a failed group's episodes were too old
    kept = {(one.group_id, one.index) for one in trained}
    left = [one for key, one in members.items() if key not in kept and one in [*good, *stale]]
    dropped = [one for one in left if outcome[one.group_id] in ("trained", "stale")]
    found |= {
        "dropped/episodes": len(dropped), "dropped/tokens": sum(map(tokens, dropped)),
        "dropped/tokens_share": sum(map(tokens, dropped)) / sum(map(tokens, [*dropped, *trained])),
        "dropped/tokens_mean": mean(map(tokens, dropped)),
        "dropped/reward_mean": mean(one.reward for one in dropped if one.reward is not None),
        "trained/tokens_mean": mean(map(tokens, trained)) if dropped else None,
        "trained/reward_mean": mean(one.reward or 0.0 for one in trained) if dropped else None,
    }  # fmt: skip
    return found


def check_batch(ran: Ran, step: int) -> None:
    """A batch holds the trained groups of its step, each whole enough, young enough and once."""
    config, batch = ran.recipe.rollout, ran.batches[step]
    keys = [(one.group_id, one.index) for one in batch.episodes]
    trained = {f"g{one['draw']}" for one in ran.outcomes if one["step"] == step and one["outcome"] == "trained"}
    assert len(set(keys)) == len(keys) and {group for group, _ in keys} == trained
    sizes, rewards = Counter(group for group, _ in keys), defaultdict[str, set[float | None]](set)
    least = config.group_size if config.on_failure == "drop" else min(config.min_group, config.group_size)
    assert least <= min(sizes.values()) and max(sizes.values()) <= config.group_size
    for one in batch.episodes:
        rewards[one.group_id].add(one.reward)
    if config.skip_uniform_groups:
        assert all(len(found) > 1 for found in rewards.values())
    oldest = step - int(batch.versions.min())
    if config.stale == "drop":
        assert oldest <= ran.written[step + 1]["staleness/bound"]
    if config.max_staleness == 0:
        assert oldest == 0


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_the_metrics_of_each_step_are_what_files_and_batches_say(first: int, tmp_path: Path) -> None:
    steps = 0
    for number in range(first, first + 10):
        (folder := tmp_path / str(number)).mkdir()
        ran = play(number, folder)
        assert all(count == 1 for count in Counter(one["draw"] for one in ran.outcomes).values())
        if not ran.stopped:
            assert sorted(int(str(one["draw"])) for one in ran.outcomes) == list(range(ran.tasks))
        for step in (step for step, batch in ran.batches.items() if step + 1 in ran.written and batch.episodes):
            steps += 1
            check_batch(ran, step)
            for name, value in counted(ran, step).items():
                said = ran.written[step + 1].get(name)
                assert said == (None if value is None else pytest.approx(value)), (number, step, name)
    assert steps > 10
