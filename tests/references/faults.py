"""The faults of issue 15 that agentrl still has: where the references say what is right, and agentrl does otherwise.

A mended fault must leave the list: an expected failure that does not fail fails the tests.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.references.cases import CASES

CRITICS = {"ppo", "gae", "critic without a bound", "critic held near"}
CUTS = {"dapo", "means, cut ones left out", "rewards whitened, cut ones left out"}
TURNS = {"turns", "turns, centered"}
WITHOUT_REWARDS = {"distill", "teacher, whitened"}
SEVERAL_UPDATES = {"decoupled", "two updates", "critic without a bound", "critic held near"}


@dataclass(frozen=True)
class Fault:
    """A fault in a case.

    Attributes:
        case: The case.
        reason: Number and name of the fault.
        only: Presets and variants that have it; empty: all but ``others``.
        others: Those that do not.
        metrics: Metrics that show it, if nothing else does.
    """

    case: str
    reason: str
    only: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    metrics: frozenset[str] = frozenset()

    def has(self, name: str) -> bool:
        return name in self.only if self.only else name not in self.others


FAULTS: list[Fault] = [
    Fault("cut_by_length", "issue 15 fault 1: an answer that ends at its limit is cut", frozenset(CRITICS | CUTS)),
    Fault("roots", "issue 15 fault 3: returns follow time over roots", frozenset(CRITICS | TURNS)),
    Fault(
        "complete", "issue 15 fault 6: mismatch before the first update", frozenset(SEVERAL_UPDATES),
        metrics=frozenset({"train/entropy", "train/kl_behavior", "train/ratio_deviation_max"}),
    ),
    Fault("own_rewards", "issue 15 fault 10: a role's own reward", others=frozenset(WITHOUT_REWARDS)),
]  # fmt: skip


def fault(name: str, case: str) -> Fault | None:
    """Returns the fault that a preset or variant has in a case, ``None`` without one."""
    return next((one for one in FAULTS if one.case == case and one.has(name)), None)


def cases_that_hold(name: str) -> list[str]:
    """Lists the cases in which a preset or variant has no known fault."""
    return [case for case in CASES if fault(name, case) is None]


def wrong_metrics(name: str) -> frozenset[str]:
    """Returns the metrics that known faults make wrong."""
    return frozenset(metric for one in FAULTS if one.has(name) for metric in one.metrics)


def each_case(names: Iterable[str], cases: Iterable[str] = tuple(CASES)) -> list[Any]:
    """Returns a name and a list of one case for every pair; a known fault is a strict expected failure."""
    return [_expected(name, case) for name in names for case in cases]


def all_cases(names: Iterable[str]) -> list[Any]:
    """Returns every name with all cases that hold together."""
    return [pytest.param(name, cases_that_hold(name), id=f"{name}-all") for name in names]


def faulty_cases(names: Iterable[str]) -> list[Any]:
    """Returns the pairs of :func:`each_case` that have a known fault, without those of ``complete``."""
    return [_expected(name, case) for name in names for case in CASES if case != "complete" and fault(name, case)]


def _expected(name: str, case: str) -> Any:
    found = fault(name, case)
    marks = pytest.mark.xfail(strict=True, reason=found.reason) if found else ()
    return pytest.param(name, [case], marks=marks, id=f"{name}-{case}")
