"""Shows simulated runs as a table of 80 columns, or as plain data.

Guarantees: every assumption stands above the figures that follow from it; the best candidate is marked.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from agentrl.sim.choice import Case, best
from agentrl.sim.figures import Figures
from agentrl.sim.recorded import RunRecords

WIDTH = 80
HEAD = (
    f"{'  split':<9}{'bound':>6}{'step':>10}{'trainer':>9}{'servers':>9}{'age':>7}{'max':>5}{'thrown':>8}"
    f"{'tokens/s':>11}"
)


def lines(case: Case, found: Sequence[Figures], source: str) -> list[str]:
    """Returns the report.

    Args:
        case: Machine and workload.
        found: Figures of all candidates.
        source: Source of the episodes' lengths.
    """
    chosen, speed, rollout = best(found), case.devices.speed, case.recipe.rollout
    training = case.devices.training_time(case.tokens) * case.devices.training
    text = [
        f"episodes  {source}; {case.shapes.mean():,.0f} tokens on average",
        f"batch     {rollout.batch_size} groups of {rollout.group_size}, {case.tokens:,.0f} tokens; at most "
        f"{rollout.max_concurrent} episodes in flight",
        *([f"a request {speed.call:.3g} s before its first token, however many there are"] if speed.call else []),
        f"a token   {_ms(speed.token)} + {_ms(speed.sequence)} for each sequence on its device",
        f"an update {training:.4g} device-seconds; a push stops the servers for {case.devices.push_seconds:.3g} s",
        "",
        HEAD,
    ]
    text += [_row(one, best=one is chosen) for one in found]
    text += [
        "",
        f"best      {chosen.inference} for inference + {chosen.training} for training, rollout.max_staleness="
        f"{chosen.max_staleness}",
        f"          a step of {chosen.step_seconds:.4g} s; the split allows "
        f"{case.bound(chosen.inference, chosen.training):.4g} s",
    ]
    return text


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _row(one: Figures, *, best: bool) -> str:
    return (
        f"{'*' if best else ' '} {f'{one.inference}+{one.training}':<7}{one.max_staleness:>6}{one.step_seconds:>8.1f} s"
        f"{one.trainer_busy:>9.0%}{one.servers_busy:>9.0%}{one.age_mean:>7.2f}{one.age_max:>5}{one.thrown:>8.1%}"
        f"{one.tokens_per_second:>11,.0f}"
    )


def as_data(case: Case, found: Sequence[Figures], source: str) -> dict[str, Any]:
    """Returns the report as plain data."""
    chosen = best(found)
    return {
        "source": source,
        "tokens_per_step": case.tokens,
        "devices": asdict(case.devices),
        "best": asdict(chosen),
        "bound_seconds": case.bound(chosen.inference, chosen.training),
        "tried": [asdict(one) for one in found],
    }


def truth_lines(records: RunRecords, predicted: Figures) -> list[str]:
    """Returns the prediction of a run's own step time beside the truth."""
    error = predicted.step_seconds / records.step_seconds - 1
    text = [
        f"the run   {records.steps} steps of {records.step_seconds:.4g} s; predicted from its records "
        f"{predicted.step_seconds:.4g} s ({error:+.1%})",
    ]
    if records.left_out:
        ends = ", ".join(f"{count} {reason}" for reason, count in records.left_out.items())
        text += [
            f"left out  episodes that did not end well: {ends};",
            "          slow ones are more often cancelled, so the lengths may be too short",
        ]
    return text
