"""The benchmark of a crowd of chat sessions, in small."""

import asyncio
from pathlib import Path

from agentrl.bench import bench_sessions


def test_a_crowd_of_real_sessions_gives_its_figures(tiny_model: Path) -> None:
    found = asyncio.run(bench_sessions.measured(str(tiny_model), episodes=4, turns=3, alone=2, repeats=2))
    assert found.keys() == {"crowd_cost_sessions", "session_turn_microseconds", "crowd_seconds"}
    assert all(len(values) == 2 and min(values) > 0 for values in found.values())
