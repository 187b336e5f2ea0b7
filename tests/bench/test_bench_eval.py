"""The benchmark of evaluations, in small; times are not asserted, and memory by what Python allocates."""

import gc
import tracemalloc
from pathlib import Path

import pytest

from agentrl.bench import bench_eval
from agentrl.bench.eval_sides import InstantClient, Sums, evaluate, recipe_at


def test_a_small_evaluation_gives_all_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_eval, "TASKS", 12)
    monkeypatch.setattr(bench_eval, "SECONDS", 0.01)
    monkeypatch.setattr(bench_eval, "resident", lambda tasks: 100.0 + tasks / 1e6)
    said: list[str] = []
    figures = bench_eval.run(repeats=1, say=said.append)
    assert [one.partition(":")[0] for one in said] == [
        "answers of 0 s, 1 of 1",
        "answers of 0.01 s, 1 of 1",
        "memory of 1000 and of 100000 tasks",
    ]
    assert figures.keys() == {"tasks_vs_gather", "instant_vs_gather", "tasks_per_s", "rss_growth", "rss_mb"}
    assert all(len(values) == 1 and values[0] > 0 for values in figures.values())


class Weighing(InstantClient):
    """Client that notes what Python's objects take when all episodes have ended."""

    held = 0

    async def close(self) -> None:
        gc.collect()
        self.held = tracemalloc.get_traced_memory()[0]


async def test_memory_does_not_grow_with_the_number_of_tasks(tmp_path: Path) -> None:
    """Between 100 and 900 tasks: an episode, or its scores by task, would take hundreds of bytes each."""
    recipe = recipe_at("http://127.0.0.1:9")
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"max_concurrent": 8})})
    held = []
    for tasks in (10, 100, 900):  # the first imports
        client, folder = Weighing(), tmp_path / str(tasks)
        folder.mkdir()
        tracemalloc.start()
        summary = await evaluate(recipe, tasks, folder, client)
        tracemalloc.stop()
        held.append(client.held)
        assert summary.n == tasks and len(summary.tags) == 4
    assert held[2] - held[1] < 800 * 60, held


def test_rows_end() -> None:
    assert len(list(Sums(3))) == 3 and Sums(9)[1:3][1]["answer"] == "27"
