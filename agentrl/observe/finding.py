"""Findings of a diagnosis, and means over the steps of a run.

Guarantees: averages are of the newest steps and are absent where a metric is: a missing metric is never 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

Record = Mapping[str, float]

RECENT = 3  # steps over which a slow symptom is averaged
ENOUGH_GROUPS = 40  # so many groups at least where a share of groups is judged: 12 groups say little


@dataclass(frozen=True)
class Finding:
    """A symptom in a run's metrics, with its likely cause and a remedy.

    Attributes:
        kind: Short name, the same for the same symptom.
        symptom: Pattern in the metrics.
        cause: Usual cause.
        remedy: Suggested change.
        level: ``warning``: something is wrong. ``note``: worth knowing of a run that does what its recipe says.
    """

    kind: str
    symptom: str
    cause: str
    remedy: str
    level: Literal["warning", "note"] = "warning"

    def __str__(self) -> str:
        return f"{self.symptom}. {self.cause} {self.remedy}"


def recent(steps: Sequence[Record], key: str, count: int = RECENT) -> float | None:
    """Averages a metric over the last ``count`` steps; ``None`` if one of them lacks it."""
    values = [step[key] for step in steps[-count:] if key in step]
    return fmean(values) if len(values) == count else None


def newest(records: Sequence[Record], key: str) -> Record | None:
    """Returns the newest record that has a metric."""
    return next((record for record in reversed(records) if key in record), None)


def steps_of_enough_groups(steps: Sequence[Record]) -> int:
    """Returns the number of last steps, ``RECENT`` or more, that have ``ENOUGH_GROUPS`` groups together.

    Where steps do not say how many groups they have, it is ``RECENT``; where all of them have too few, it is more than
    there are, so that nothing is judged yet.
    """
    groups = 0.0
    for count, step in enumerate(reversed(steps), 1):
        if "rollout/groups_drawn" not in step:
            return RECENT
        groups += step["rollout/groups_drawn"]
        if count >= RECENT and groups >= ENOUGH_GROUPS:
            return count
    return len(steps) + 1
