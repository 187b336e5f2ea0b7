"""Measures the asynchronous core: simulated step times, real-time efficiency, CPU of episodes, and of a crowd.

Guarantees: one process, one thread. The cluster's figures are in virtual time, so the machine's speed does not matter.
Repeats are interleaved where two sides are compared.
"""

import asyncio
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from agentrl.bench.async_sides import Used, crowd, instant, realtime, recipe_of
from agentrl.host.garbage import collect_rarely
from agentrl.sim.choice import Case
from agentrl.sim.figures import Figures
from agentrl.sim.shapes import Lognormal
from agentrl.sim.simulation import Devices

SIGMAS, BOUNDS, SPLITS = (0.3, 0.8, 1.2), (0, 1, 2, 4, 8), ((3, 1), (2, 2))
SEQUENCES, MEAN, CAP = 256, 6000, 27_000
TRAIN_SECONDS = 80.0  # on one device: 20 s on four
IN_FLIGHT = 2 * SEQUENCES
LIKELY = 2  # largest bound of the aim
STEPS = 8


def run(repeats: int = 3, steps: int = STEPS, long: int = 100_000) -> dict[str, list[float]]:
    """Measure all parts.

    Args:
        repeats: Repeats of the parts in real time.
        steps: Simulated steps that count.
        long: Episodes of the growth measurement.

    Returns:
        ``over_synchronous``: step time with all devices generating and then training, over the best asynchronous one
        with a bound up to 2; ``bound_fraction``: shortest possible step time of the split over the achieved one;
        ``wasted``: share of the generated tokens that were thrown away there, all at sigma 0.8; with a suffix
        ``_s0.3`` and so on for each sigma, split and bound. ``realtime_efficiency``: ideal over achieved seconds of a
        step with a server and a trainer that sleep. ``cpu_per_1k``: CPU seconds of 1,000 instant episodes;
        ``cpu_per_1k_episodes``: the same with ``episodes.jsonl``; ``cpu_growth``, ``rss_growth``: CPU of an episode
        and memory after 100,000 episodes, over those after 1,000. ``crowd_cost``: CPU of 4,096 episodes of 50 turns
        at once, over one after the other, with simulated sessions: ``agentrl bench sessions`` takes real ones.
    """
    collect_rarely()  # as the controller's process does
    found = simulated(steps)
    found |= asyncio.run(_real(repeats))
    found |= growth(long)
    found |= crowds(repeats)
    return found


def simulated(steps: int = STEPS) -> dict[str, list[float]]:
    """Measures all splits and bounds in virtual time."""
    found: dict[str, list[float]] = {"over_synchronous": [], "bound_fraction": [], "wasted": []}
    for sigma in SIGMAS:
        case = case_of(sigma, steps)
        together = case.run(4, 4, 0)  # they take turns, so the same four devices can do both
        best: tuple[float, Figures] | None = None
        for split in SPLITS:
            for bound in BOUNDS:
                one = case.run(*split, bound)
                fraction = case.bound(*split) / one.step_seconds
                name = f"s{sigma:g}_{split[0]}+{split[1]}_b{bound}"
                found |= {f"bound_fraction_{name}": [fraction], f"wasted_{name}": [one.thrown]}
                found |= {f"age_max_{name}": [float(one.age_max)]}
                if bound <= LIKELY and (best is None or one.step_seconds < best[1].step_seconds):
                    best = fraction, one
        assert best is not None
        found[f"over_synchronous_s{sigma:g}"] = [together.step_seconds / best[1].step_seconds]
        if sigma == 0.8:
            found["over_synchronous"] = [together.step_seconds / best[1].step_seconds]
            found["bound_fraction"], found["wasted"] = [best[0]], [best[1].thrown]
    return found


def case_of(sigma: float, steps: int) -> Case:
    """Returns the benchmark's workload for a spread of lengths."""
    settings = (f"rollout.batch_size={SEQUENCES // 8}", "rollout.group_size=8", f"rollout.max_concurrent={IN_FLIGHT}")
    return Case(recipe_of(*settings), Devices(1, 1, train_seconds=TRAIN_SECONDS), Lognormal(MEAN, sigma, CAP), steps)


async def _real(repeats: int, slots: int = 256, steps: int = 8) -> dict[str, list[float]]:
    """Measures steps in real time: 256 requests at a time of half a second on average, and an update as long.

    The bound is 4, with which neither side waits for the other in virtual time (0.503 s a step).
    """
    shapes = Lognormal(500, 0.5, 2000)
    recipe = recipe_of("rollout.batch_size=32", "rollout.group_size=8", "rollout.max_concurrent=512", bound=4)
    ideal = max(shapes.mean() / 1000 * SEQUENCES / slots, 0.5)
    achieved = [await realtime(shapes, recipe, slots, 0.5, steps) for _ in range(repeats)]
    return {"realtime_efficiency": [ideal / one for one in achieved]}


def growth(long: int, short: int = 1000) -> dict[str, list[float]]:
    """Measures CPU and memory of instant episodes, of the first ``short`` and at the end of ``long``."""
    asyncio.run(_instant(short))  # warms up
    used, with_episodes = asyncio.run(_instant(long)), asyncio.run(_instant(4 * short, with_episodes=True))
    first, last = _rate(used, 0, long // 10), _rate(used, long - long // 10, long)
    early = max(one.rss for one in used if one.episodes <= max(2 * short, long // 10))
    return {
        "cpu_per_1k": [_rate(used, 0, long)],
        "cpu_per_1k_episodes": [_rate(with_episodes, 0, 4 * short)],
        "cpu_growth": [last / first],
        "rss_growth": [max(one.rss for one in used[-len(used) // 10 :]) / early],
    }


async def _instant(episodes: int, *, with_episodes: bool = False) -> list[Used]:
    with TemporaryDirectory() as folder:
        return await instant(Path(folder), episodes, with_episodes=with_episodes)


def _rate(used: list[Used], first: int, last: int) -> float:
    """Returns the CPU seconds of 1,000 episodes between two numbers of episodes."""
    here = [one for one in used if first <= one.episodes <= last]
    return 1000 * (here[-1].cpu - here[0].cpu) / (here[-1].episodes - here[0].episodes)


def crowds(repeats: int, episodes: int = 4096, turns: int = 50) -> dict[str, list[float]]:
    """Measures the CPU of a crowd of episodes over that of the same one after the other."""
    collect_rarely(episodes)  # as the controller's process does
    costs, each = [], []
    for _ in range(repeats):
        alone = asyncio.run(crowd(episodes, turns, at_once=False))
        costs.append(asyncio.run(crowd(episodes, turns, at_once=True)) / alone)
        each.append(1e6 * alone / (episodes * turns))
    return {"crowd_cost": costs, "turn_microseconds": [fmean(each)]}
