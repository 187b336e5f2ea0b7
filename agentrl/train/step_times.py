"""Splits the time of a step into waiting, updating and overhead.

Guarantees: a pure function; waiting for a batch or for an evaluation does not count as overhead.
"""

from collections.abc import Mapping

WORK = ("time/wait_batch", "time/update", "time/wait_evaluation")


def step_times(metrics: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Computes the metrics of a whole step: its length, and the fraction that was neither waiting nor updating.

    Args:
        metrics: Metrics of the step, which include the seconds of :data:`WORK`.
        seconds: Time from the request for the batch until the servers hold the new version.
    """
    other = seconds - sum(metrics[name] for name in WORK)
    return {"time/step": seconds, "time/overhead_share": other / seconds}
