"""Holds choices that no preset makes to their float64 references: in a batch with complete credit, and in all cases."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.references.cases import episodes_of
from tests.references.comparing import assert_same
from tests.references.faults import all_cases, each_case, faulty_cases, wrong_metrics
from tests.references.learning import learned, setting
from tests.references.step import train_step
from tests.references.variants import VARIANTS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def assert_step(name: str, cases: list[str], models: Path, mesh: "DeviceMesh", **rewards: float) -> None:
    choices, algorithm = VARIANTS[name]
    given = setting(models, **rewards)
    episodes = episodes_of(cases, given.policy)
    without = wrong_metrics(name) if len(cases) > 1 else frozenset()
    assert_same(
        learned(episodes, choices, given, mesh, models), train_step(episodes, algorithm, given), without=without
    )


# "complete": each token has an advantage, so that the metrics are means over all tokens
COMPLETE = each_case(VARIANTS, ["complete"])


@pytest.mark.parametrize(("name", "cases"), [*COMPLETE, *all_cases(VARIANTS), *faulty_cases(VARIANTS)])
def test_a_step_is_the_references(name: str, cases: list[str], models: Path, mesh: "DeviceMesh") -> None:
    assert_step(name, cases, models, mesh)


@pytest.mark.parametrize("name", ["turns", "gae", "k3", "reward over the batch's deviation"])
def test_scaled_and_moved_rewards_are_what_is_learned_from(name: str, models: Path, mesh: "DeviceMesh") -> None:
    assert_step(name, ["complete"], models, mesh, scale=1.5, bias=-0.25)
