"""Holds choices that no preset makes to their float64 references: in a batch with complete credit, and in all cases."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.references.cases import CASES, episodes_of
from tests.references.comparing import assert_same
from tests.references.learning import learned, setting
from tests.references.step import train_step
from tests.references.variants import VARIANTS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def assert_step(name: str, cases: Sequence[str], models: Path, mesh: "DeviceMesh", **rewards: float) -> None:
    choices, algorithm = VARIANTS[name]
    given = setting(models, **rewards)
    episodes = episodes_of(cases, given.policy)
    assert_same(learned(episodes, choices, given, models), train_step(episodes, algorithm, given))


# In "complete" each token has an advantage; a batch of all cases has everything at once.
@pytest.mark.parametrize("cases", [("complete",), tuple(CASES)], ids=["complete", "all"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_is_the_references(name: str, cases: tuple[str, ...], models: Path, mesh: "DeviceMesh") -> None:
    assert_step(name, cases, models, mesh)


@pytest.mark.parametrize("name", ["turns", "gae", "k3", "reward over the batch's deviation"])
def test_scaled_and_moved_rewards_are_what_is_learned_from(name: str, models: Path, mesh: "DeviceMesh") -> None:
    assert_step(name, ["complete"], models, mesh, scale=1.5, bias=-0.25)
