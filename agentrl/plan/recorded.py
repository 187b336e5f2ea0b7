"""Reads what a run says of its episodes and its steps, for a plan.

Guarantees: nothing is measured anew. Figures of episodes are means over those that did not fail; the first step, which
loads and compiles, is left out where there are more.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from agentrl.config.errors import ConfigError
from agentrl.observe.sinks import read_metrics

FIRST_STEPS = 1


def read_steps(folder: Path) -> list[dict[str, float]]:
    """Reads the records of a run's steps.

    Raises:
        ConfigError: The folder is not that of a run with steps.
    """
    for name in ("config.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}: name the folder of a run, or its name below runs/")
    steps = [one for one in read_metrics(folder / "metrics.jsonl") if "time/step" in one]
    if not steps:
        raise ConfigError(f"{folder} has no step yet: there is nothing to account for")
    return steps[FIRST_STEPS:] or steps


def episode_figures(folder: Path) -> dict[str, float]:
    """Reads the lengths and times of a run's episodes, as values of assumptions.

    Raises:
        ConfigError: There are no episodes.
    """
    from agentrl.rollout.journal import read_episodes

    file = folder / "episodes.jsonl"
    found = [one for one in read_episodes(file) if not one.failed] if file.is_file() else []
    shapes = [shape for one in found if (shape := _shape(one)) is not None]
    if not shapes:
        raise ConfigError(
            f"{folder} has no recorded episodes: run it with logging.episodes=true, or tell their "
            "lengths: --assume prompt=... --assume answer=..."
        )
    sampled = [len(shape["sampled"]) for shape in shapes]
    prompts = {tuple(shape["prompt"]) for shape in shapes}
    return {
        "prompt": fmean(len(shape["prompt"]) for shape in shapes),
        "shared": float(common(prompts)),
        "answer": fmean(sampled),
        "sigma": pstdev(map(math.log, sampled)),
        "turns": fmean(shape["turns"] for shape in shapes),
        "observation": fmean(shape["observation"] for shape in shapes),
        "outside": fmean(shape["outside"] for shape in shapes),
        "distinct_rows": distinct_rows(shapes),
    }


def _shape(episode: Any) -> dict[str, Any] | None:
    """Returns the sizes of an episode; ``None`` where nothing was sampled with token ids."""
    nodes = [node for one in episode.trajectories.values() for node in one.nodes]
    sampled = [token for node in nodes if node.finish_reason is not None for token in node.token_ids]
    if not sampled:
        return None
    first = next(index for index, node in enumerate(nodes) if node.finish_reason is not None)
    prompt = [token for node in nodes[:first] for token in node.token_ids]
    given = sum(len(node.token_ids) for node in nodes) - len(sampled) - len(prompt)
    return {
        "group": episode.group_id,
        "prompt": prompt,
        "sampled": sampled,
        "observation": given,
        "turns": sum(node.finish_reason is not None for node in nodes),
        "outside": _outside(episode, nodes),
    }


def _outside(episode: Any, nodes: Sequence[Any]) -> float:
    """Returns the seconds of an episode in which no answer was awaited."""
    waited = 0.0
    for before, node in pairwise(nodes):
        if node.finish_reason is not None and node.at is not None and before.at is not None:
            waited += max(0.0, node.at - before.at)
    known = episode.started and waited
    start = datetime.fromisoformat(episode.started).timestamp() if known else 0.0
    ended = max((node.at for node in nodes if node.at is not None), default=start)
    return max(0.0, min(episode.seconds, ended - start) - waited) if known else 0.0


def common(sequences: Iterable[Sequence[int]]) -> int:
    """Returns the length of the longest beginning that all sequences have; 0 for a single one."""
    every = [list(sequence) for sequence in sequences]
    if len(every) < 2:
        return 0
    low, high = min(every), max(every)
    return next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


def distinct_rows(shapes: Sequence[dict[str, Any]]) -> float:
    """Returns the share of decoded rows that differ: members with the same tokens so far are decoded once."""
    groups: dict[str, list[Sequence[int]]] = defaultdict(list)
    for shape in shapes:
        groups[shape["group"]].append(shape["sampled"])
    rows = sum(len(one) for members in groups.values() for one in members)
    different = 0
    for members in groups.values():
        longest = max(map(len, members))
        different += sum(len({tuple(one[:at]) for one in members if len(one) > at}) for at in range(longest))
    return different / rows
