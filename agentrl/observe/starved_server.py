"""Finds a run whose episodes ran out of time because its own server got too little of the CPU.

Guarantees: only for a server that this run started on a CPU with a lower priority; the record of the failed episodes
decides, and the machine's load of the last minutes is said, not judged: a run may be examined long after it ended.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from agentrl.core.episode import StopReason
from agentrl.observe.finding import Finding

ENOUGH = 8  # timeouts
MOST_OF = 0.5  # of the failed episodes
FAILED = "failed-episodes.jsonl"


def starved(failures: Counter[str], config: Mapping[str, Any], load: tuple[float, int] | None = None) -> Finding | None:
    """Judges the kinds of a run's failed episodes.

    Args:
        failures: Number of failed attempts of each kind.
        config: The run's ``config.json``.
        load: The machine's load and number of cores; by default those of now.
    """
    inference, launch, trainer = (config.get(name) or {} for name in ("inference", "launch", "trainer"))
    niceness = inference.get("niceness") or 0
    lowered = launch.get("device") == "cpu" and trainer.get("type") and not inference.get("urls") and niceness > 0
    late = sum(count for kind, count in failures.items() if kind.startswith(f"{StopReason.TIMEOUT}:"))
    if not lowered or late < ENOUGH or late <= MOST_OF * failures.total():
        return None
    now, cores = load or (os.getloadavg()[0], os.cpu_count() or 1)
    limit = (config.get("rollout") or {}).get("episode_timeout")
    return Finding(
        "starved",
        f"{late} episodes had no end within rollout.episode_timeout={limit:g} s",
        f"The server runs at niceness {niceness} (inference.niceness): on a machine that others use, their processes "
        f"come first (load now {now:.1f} on {cores} cores).",
        "Set inference.niceness=0, wait until the machine is free, or raise rollout.episode_timeout.",
    )


def failures_of(run_dir: Path, lines: Callable[[Path], Iterable[Mapping[str, Any]]]) -> Counter[str]:
    """Counts the kinds of a run's failed attempts.

    Args:
        run_dir: Folder of the run.
        lines: Reads the objects of a file, one for each line.
    """
    file = run_dir / FAILED
    return Counter(str(line.get("kind")) for line in lines(file)) if file.is_file() else Counter()
