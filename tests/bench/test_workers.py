"""The benchmark of rollout workers, in small."""

import asyncio
from pathlib import Path

import pytest

from agentrl.bench import bench_workers


@pytest.mark.long
def test_a_worker_costs_the_controller_less_than_the_episode(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_workers.EPISODES, 4, 32)
    found = asyncio.run(bench_workers._measure(str(tiny_model), 4, 1))
    assert found.keys() == {"controller_ms_4", "controller_ms_4_worker", "worker_ms_4", "worker_share_4"}
    assert all(value > 0 for values in found.values() for value in values)
    assert found["worker_share_4"][0] < 0.5, "a tenth, and no timing: CPU of the same process"
