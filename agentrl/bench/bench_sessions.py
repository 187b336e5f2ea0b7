"""Measures the CPU of a crowd of episodes with real chat sessions, over that of some one after the other.

Guarantees: one process, one thread; episodes one after the other run before and after each crowd, whose minutes the
machine's speed may not outlast.
"""

import asyncio
from statistics import fmean

from agentrl.bench.report import default_model
from agentrl.bench.session_crowd import SessionCrowd
from agentrl.host.garbage import collect_rarely


def run(episodes: int = 4096, turns: int = 50, alone: int = 64, repeats: int = 1) -> dict[str, list[float]]:
    """Measure the crowd.

    Args:
        episodes: Episodes at once.
        turns: Answers of an episode.
        alone: Episodes one after the other, each time.
        repeats: Number of crowds.

    Returns:
        ``crowd_cost_sessions``: CPU of an episode of the crowd over that of one alone; ``session_turn_microseconds``:
        CPU of a turn, one episode after the other; ``crowd_seconds``: CPU seconds of the crowd.
    """
    collect_rarely(episodes)  # as the controller's process does
    return asyncio.run(measured(default_model(), episodes, turns, alone, repeats))


async def measured(model: str, episodes: int, turns: int, alone: int, repeats: int) -> dict[str, list[float]]:
    """Measures crowds of a model's sessions; ``model`` is its folder, for its tokenizer and its chat template."""
    sessions = SessionCrowd(model, turns)
    found: dict[str, list[float]] = {"crowd_cost_sessions": [], "session_turn_microseconds": [], "crowd_seconds": []}
    await sessions.in_turn(alone // 8 + 1)  # warms up
    for _ in range(repeats):
        before = await sessions.in_turn(alone)
        crowd = await sessions.at_once(episodes)
        one = fmean([before, await sessions.in_turn(alone)])
        found["crowd_cost_sessions"].append(crowd / one)
        found["session_turn_microseconds"].append(1e6 * one / turns)
        found["crowd_seconds"].append(crowd * episodes)
    return found
