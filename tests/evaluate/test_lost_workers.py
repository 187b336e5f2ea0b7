"""An evaluation whose worker processes are lost."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.load import load_recipe
from agentrl.core.episode import Episode, StopReason, Task
from agentrl.data.datasets import LoadedTasks
from agentrl.evaluate.evaluator import MOST_TRIES, Evaluator
from agentrl.rollout.episode_runs import EpisodeOrder, without_sampling
from agentrl.rollout.journal import Journal, read_episodes


class Runs:
    """Loses the first attempts at each episode."""

    abandoned = 0

    def __init__(self, lost: int) -> None:
        self.lost = lost
        self.seeds: list[int] = []

    async def run(self, order: EpisodeOrder, cancelled: Any = None) -> Episode:
        self.seeds.append(order.seed)
        if order.attempt < self.lost:
            return without_sampling(order, StopReason.WORKER_LOST, "killed")
        ended = without_sampling(order, StopReason.TERMINATED, "").model_copy(update={"error": None})
        return ended.model_copy(update={"reward": 1.0, "metrics": {"accuracy": 1.0}})


@pytest.mark.parametrize("lost", [0, 1, MOST_TRIES - 1, MOST_TRIES])
async def test_a_lost_worker_costs_an_evaluation_another_try_of_its_episodes(tmp_path: Path, lost: int) -> None:
    tasks = [Task(id=f"t/{number}", data={}) for number in range(3)]
    runs, journal = Runs(lost), Journal(tmp_path, episodes=True)
    client: Any = SimpleNamespace(problem="", notes=[])
    recipe = load_recipe("arithmetic_grpo", ["eval.tasks=3"], device="cpu")
    evaluator = Evaluator(recipe, None, client, journal, LoadedTasks(tasks, ""), runs)  # type: ignore[arg-type]
    found = (await evaluator.run(4)).as_metrics()
    journal.close()
    tries = min(lost + 1, MOST_TRIES)
    assert sorted(runs.seeds) == sorted([0, 1, 2] * tries), "the same seeds each time"
    written = list(read_episodes(tmp_path / "eval-episodes.jsonl"))
    assert [one.attempt for one in written] == [tries - 1] * 3, "one record an episode"
    assert found["eval/invalid"] == (3 if lost == MOST_TRIES else 0)
    assert found.get("eval/accuracy") == (None if lost == MOST_TRIES else 1.0)
