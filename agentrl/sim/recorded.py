"""Takes lengths, latencies and the training time from a run's own records.

Guarantees: nothing is measured anew; ``episodes.jsonl`` has the calls, ``metrics.jsonl`` the steps. A call's seconds
are fitted as ``calls * c + tokens * (a + b * n)`` with ``n`` calls at a time on its server, by least squares, none of
the three below 0. Failed episodes are left out, and so are the first step and its episodes where there are more:
servers and trainer load and compile then.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean

import numpy as np

from agentrl.config.errors import ConfigError
from agentrl.config.load import recipe_of_run
from agentrl.config.recipe import Recipe
from agentrl.core.episode import Episode, Trajectory
from agentrl.observe.sinks import read_metrics
from agentrl.rollout.journal import read_episodes
from agentrl.sim.device import Speed
from agentrl.sim.episodes import Shape, Turn
from agentrl.sim.shapes import Recorded
from agentrl.sim.simulation import Devices

ROUNDS = 6  # of the fit
LEAST_GAIN = 0.05  # share of the squared error that the wait for the first token has to explain
FIRST_STEPS = 1  # left out where there are more
TIMES = {"time/step", "time/wait_batch", "time/update"}  # of a step's record


@dataclass(frozen=True)
class Call:
    """A recorded answer.

    Attributes:
        start: Time of the request, in seconds since 1970.
        end: Time of the answer.
        tokens: Sampled tokens.
    """

    start: float
    end: float
    tokens: int


@dataclass(frozen=True)
class RunRecords:
    """What a finished run says about itself.

    Attributes:
        recipe: Its recipe.
        shapes: Its episodes.
        devices: Speeds that its records show, with as many devices as it had servers.
        step_seconds: Mean time of its steps, without time waited for evaluations.
        steps: Number of these steps.
        left_out: Stop reason -> number of the episodes that failed or were cancelled: they are not among the shapes.
    """

    recipe: Recipe
    shapes: Recorded
    devices: Devices
    step_seconds: float
    steps: int
    left_out: dict[str, int]


def read_run(folder: Path) -> RunRecords:
    """Reads a run's records.

    Raises:
        ConfigError: The folder has no steps or no episodes.
    """
    for name in ("metrics.jsonl", "episodes.jsonl"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}: name the folder of a run that trained (logging.episodes=true)")
    recipe = recipe_of_run(folder)
    every = list(read_episodes(folder / "episodes.jsonl"))
    episodes = [one for one in every if not one.failed]
    steps = [one for one in read_metrics(folder / "metrics.jsonl") if one.keys() >= TIMES]
    if not steps or not episodes:
        raise ConfigError(
            f"{folder} has {len(steps)} steps with their times and {len(episodes)} episodes that did not fail"
        )
    steps = steps[FIRST_STEPS:] or steps
    episodes = without_first(episodes, FIRST_STEPS * recipe.rollout.batch_size)
    return RunRecords(
        recipe,
        shapes_of(episodes),
        _devices(recipe, episodes, steps),
        fmean(map(_step_seconds, steps)),
        len(steps),
        dict(Counter(one.stop_reason.value for one in every if one.failed).most_common()),
    )


def without_first(episodes: Sequence[Episode], groups: int) -> Sequence[Episode]:
    """Returns the episodes without those of the groups that ended first; all of them if there are no other groups.

    Args:
        episodes: Episodes in the order of their ends.
        groups: Number of groups to leave out.
    """
    ended: dict[str, None] = {}
    for episode in episodes:
        ended.pop(episode.group_id, None)
        ended[episode.group_id] = None
    first = set(list(ended)[:groups])
    return [episode for episode in episodes if episode.group_id not in first] or episodes


def read_shapes(folder: Path) -> Recorded:
    """Reads the episodes of a run's folder.

    Raises:
        ConfigError: There are none.
    """
    file = folder / "episodes.jsonl"
    if not file.is_file():
        raise ConfigError(f"{folder} has no episodes.jsonl")
    return shapes_of([one for one in read_episodes(file) if not one.failed])


def shapes_of(episodes: Sequence[Episode]) -> Recorded:
    """Makes a source of shapes from recorded episodes, group by group."""
    groups: dict[str, list[Shape]] = defaultdict(list)
    for episode in episodes:
        if calls := calls_of(episode):
            groups[episode.group_id].append(_shape(episode, calls))
    if not groups:
        raise ConfigError(f"none of the {len(episodes)} recorded episodes has the times of its messages")
    return Recorded(list(groups.values()))


def calls_of(episode: Episode) -> list[Call]:
    """Returns the answers of all roles, in the order of their ends."""
    calls = [call for one in episode.trajectories.values() for call in _calls(one)]
    return sorted(calls, key=lambda call: call.end)


def fit_speed(calls: Sequence[Call], servers: int) -> Speed:
    """Fits the speed of a server to recorded calls.

    Args:
        calls: All calls of a run.
        servers: Number of servers that shared them.
    """
    seconds = np.array([call.end - call.start for call in calls])
    tokens = np.array([call.tokens for call in calls], float)
    found = Speed(token=1.0, sequence=0.0)
    for _ in range(ROUNDS):  # how many ran during a token depends on how long tokens took
        sides = np.stack([np.ones(len(calls)), tokens, tokens * at_a_time(calls, servers, found)], axis=1)
        call, token, sequence = _fitted(sides, seconds)
        found = Speed(token=max(token, 1e-9), sequence=sequence, call=call)
    return found


def _fitted(sides: np.ndarray, seconds: np.ndarray) -> tuple[float, float, float]:
    """Returns the factors of the three columns; the first is 0 where it explains hardly anything.

    Where all answers are about as long, it could take the place of the others, and longer answers would cost nothing.
    """
    from scipy.optimize import nnls

    every, left = nnls(sides, seconds)
    rest, left_without = nnls(sides[:, 1:], seconds)
    if left_without**2 <= left**2 * (1 + LEAST_GAIN):
        return 0.0, float(rest[0]), float(rest[1])
    return float(every[0]), float(every[1]), float(every[2])


def at_a_time(calls: Sequence[Call], servers: int, speed: Speed) -> np.ndarray:
    """Returns the number of calls that ran on a server during each call, itself included, as a mean over its tokens."""
    times = np.array([time for call in calls for time in (call.start, call.end)])
    order = np.argsort(times, kind="stable")
    times, running = times[order], np.cumsum(np.tile([1.0, -1.0], len(calls))[order])[:-1] / servers
    tokens = np.diff(times) / (speed.token + speed.sequence * running)
    starts, ends = (np.array([getattr(call, name) for call in calls]) for name in ("start", "end"))

    def between(values: np.ndarray) -> np.ndarray:
        total = np.concatenate([[0.0], np.cumsum(values)])
        return np.interp(ends, times, total) - np.interp(starts, times, total)

    return between(running * tokens) / np.maximum(between(tokens), 1e-12)


def _calls(trajectory: Trajectory) -> list[Call]:
    found = []
    for node in trajectory.nodes:
        before = None if node.parent is None else trajectory.nodes[node.parent]
        if node.finish_reason is not None and node.at is not None and before is not None and before.at is not None:
            found.append(Call(before.at, max(node.at, before.at), max(1, sum(node.loss_mask))))
    return found


def _shape(episode: Episode, calls: Sequence[Call]) -> Shape:
    """Returns an episode's shape; what is between an answer and the next request is time outside the servers."""
    nexts = [call.start for call in calls[1:]]
    start = datetime.fromisoformat(episode.started).timestamp() if episode.started else calls[0].start
    end = max(start + episode.seconds, calls[-1].end)
    turns = [Turn(call.tokens, max(0.0, n - call.end)) for call, n in zip(calls, [*nexts, end], strict=True)]
    return Shape(tuple(turns), episode.reward or 0.0, max(0.0, calls[0].start - start))


def _step_seconds(step: dict[str, float]) -> float:
    return step["time/step"] - step.get("time/wait_evaluation", 0.0)


def _devices(recipe: Recipe, episodes: Sequence[Episode], steps: Sequence[dict[str, float]]) -> Devices:
    servers = max(1, len(recipe.inference.urls)) if recipe.inference.urls else recipe.inference.servers
    trained = fmean(step["time/update"] for step in steps)
    push = fmean(step.get("time/publish", 0.0) for step in steps)
    rest = fmean(_step_seconds(s) - s["time/wait_batch"] - s["time/update"] - s.get("time/publish", 0.0) for s in steps)
    return Devices(
        inference=servers,
        training=recipe.trainer.nproc,
        speed=fit_speed([call for episode in episodes for call in calls_of(episode)], servers),
        train_seconds=trained * recipe.trainer.nproc,
        push_seconds=push,
        step_seconds=max(0.0, rest),
        slots=recipe.inference.max_running,
    )
