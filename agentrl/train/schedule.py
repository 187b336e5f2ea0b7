"""Learning-rate schedules as pure functions of progress.

Guarantees: the factor is at most 1; progress is that of the steps or of the time budget, whichever is further; the
decay starts at the peak when the warm-up ends, and ends at the floor when the run does.
"""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def planned_steps(total_steps: int, epochs: int | None, steps_per_epoch: int) -> int:
    """Returns the number of steps of a whole training: ``total_steps``, or fewer if ``epochs`` end before."""
    return total_steps if epochs is None else min(total_steps, epochs * steps_per_epoch)


def progress(step: int, total_steps: int, elapsed: float, time_budget: float | None) -> float:
    """Returns the fraction of the run that is done, in ``[0, 1]``; ``elapsed`` and ``time_budget`` are in seconds."""
    by_steps = step / total_steps
    by_time = elapsed / time_budget if time_budget else 0.0
    return min(1.0, max(by_steps, by_time))


def learning_rate_factor(step: int, done: float, *, warmup_steps: int, schedule: Schedule, floor: float) -> float:
    """Returns the factor on the peak learning rate for step ``step`` (from 0) at progress ``done``."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    decayed = decay_progress(step, done, warmup_steps)
    if schedule == "linear":
        return floor + (1 - floor) * (1 - decayed)
    if schedule == "cosine":
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * decayed))
    return 1.0


def decay_progress(step: int, done: float, warmup_steps: int) -> float:
    """Returns the fraction of the decay that is done, in ``[0, 1]``: 0 at the end of the warm-up, 1 at the run's end.

    The run's progress at the end of the warm-up is ``done * warmup_steps / step``: exact if steps decide, and with a
    time budget if all steps so far took equally long.
    """
    if step <= warmup_steps:
        return done if warmup_steps == 0 else 0.0
    warm = done * warmup_steps / step
    return (done - warm) / (1 - warm)
