"""Where the seconds of a step went.

Guarantees: a pure function; waiting for a batch and waiting for an evaluation are no overhead.
"""

from collections.abc import Mapping

WORK = ("time/wait_batch", "time/update", "time/wait_evaluation")


def step_times(metrics: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Metrics of a whole step of ``seconds``: its length, and the share of it that was neither waiting nor updating.

    Args:
        metrics: With the seconds of :data:`WORK`.
        seconds: From the request for the batch until the servers hold the new version.
    """
    other = seconds - sum(metrics[name] for name in WORK)
    return {"time/step": seconds, "time/overhead_share": other / seconds}
