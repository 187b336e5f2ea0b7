"""Measures what an episode costs the controller's core: run there, and run in a worker process.

Guarantees: the sides take turns; the first turn of each warms up and does not count. CPU seconds do not depend on what
else the machine does, but for its caches.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from agentrl.bench.report import default_model
from agentrl.host.garbage import collect_rarely

TURNS = (4, 50)
EPISODES = {4: 512, 50: 64}
AT_ONCE = 64


def run(model: str | None = None, repeats: int = 5) -> dict[str, list[float]]:
    """Measure episodes of 4 and of 50 turns.

    Args:
        model: Model folder, for its tokenizer; by default the 135M model of the recipes.
        repeats: Interleaved measurements.

    Returns:
        ``controller_ms_T``: CPU milliseconds of the controller's process for an episode of ``T`` turns that runs there;
        ``controller_ms_T_worker``: the same for one that a worker runs; ``worker_ms_T``: CPU milliseconds of that
        worker; ``worker_share_T``: what a worker leaves to the controller, as a share of the first figure.
    """
    found: dict[str, list[float]] = {}
    for turns in TURNS:
        found |= asyncio.run(_measure(model or default_model(), turns, repeats))
    return found


async def _measure(model: str, turns: int, repeats: int) -> dict[str, list[float]]:
    from agentrl.bench.worker_sides import in_process, instant_server, one_worker, play, recipe_of
    from agentrl.launch.supervisor import Supervisor
    from agentrl.rollout.journal import Journal

    names = [f"controller_ms_{turns}", f"controller_ms_{turns}_worker", f"worker_ms_{turns}", f"worker_share_{turns}"]
    figures: list[list[float]] = [[], [], [], []]
    with TemporaryDirectory() as temporary:
        folder, recipe = Path(temporary), recipe_of(model, turns)
        supervisor, journal = Supervisor(folder / "logs"), Journal(folder, episodes=True)
        try:
            here, client = in_process(recipe, Path(model), instant_server(supervisor))
            async with one_worker(recipe, client, Path(model), folder, supervisor) as (there, process):
                collect_rarely()
                for repeat in range(repeats + 1):
                    own = await play(here, journal, EPISODES[turns], AT_ONCE)
                    before = process.cpu_times()
                    others = await play(there, journal, EPISODES[turns], AT_ONCE)
                    after = process.cpu_times()
                    spent = (after.user + after.system - before.user - before.system) / EPISODES[turns]
                    if repeat:
                        values = (1e3 * own, 1e3 * others, 1e3 * spent, others / own)
                        for series, value in zip(figures, values, strict=True):
                            series.append(value)
            await client.close()
        finally:
            supervisor.stop()
            journal.close()
    return dict(zip(names, figures, strict=True))
