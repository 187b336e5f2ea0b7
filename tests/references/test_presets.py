"""Holds every preset, and on two ranks some variants, to float64 references: change of all parameters, and metrics."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from agentrl.config.declarations import preset_names
from tests.references.cases import CASES, episodes_of
from tests.references.comparing import assert_same
from tests.references.learning import Learned, learned, setting
from tests.references.presets import PRESETS
from tests.references.step import Outcome, train_step
from tests.references.variants import ON_RANKS, VARIANTS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RANKS = 2


@functools.cache
def reference(name: str, cases: tuple[str, ...], models: Path) -> Outcome:
    given = setting(models)
    algorithm = PRESETS[name] if name in PRESETS else VARIANTS[name][1]
    return train_step(episodes_of(cases, given.policy), algorithm, given)


def test_every_preset_has_a_reference() -> None:
    without = set(preset_names()) - set(PRESETS)
    assert not without, f"tests/references/presets.py has no reference for {without}"


# In "complete" each token has an advantage; a batch of all cases has everything at once.
@pytest.mark.parametrize("cases", [("complete",), tuple(CASES)], ids=["complete", "all"])
@pytest.mark.parametrize("name", preset_names())
def test_a_step_is_the_references(name: str, cases: tuple[str, ...], models: Path, mesh: "DeviceMesh") -> None:
    given = setting(models)
    found = learned(episodes_of(cases, given.policy), {"preset": name}, given, models)
    assert_same(found, reference(name, cases, models))


@pytest.fixture(scope="module")
def on_ranks(models: Path) -> Path:
    """Folder of the steps of every preset, and of some variants, over all cases, taken on two ranks."""
    command = [sys.executable, "-m", "tests.references.learning", str(models), str(models / "rendezvous")]
    started = [subprocess.Popen([*command, str(rank), str(RANKS)]) for rank in range(RANKS)]
    try:
        assert [process.wait(timeout=240) for process in started] == [0] * RANKS
    finally:
        for process in started:
            process.kill()
    return models


@pytest.mark.parametrize("name", [*preset_names(), *ON_RANKS])
def test_a_step_on_two_ranks_is_the_references(name: str, on_ranks: Path) -> None:
    tensors = load_file(on_ranks / f"{name}.safetensors")
    policy, critic = (
        {key.removeprefix(f"{kind}/"): w for key, w in tensors.items() if key.startswith(f"{kind}/")}
        for kind in ("policy", "critic")
    )
    metrics = json.loads((on_ranks / f"{name}.json").read_text())
    assert_same(Learned(policy, critic, metrics), reference(name, tuple(CASES), on_ranks))
