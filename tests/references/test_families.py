"""A step of a hybrid, of windows with sinks or soft caps, of experts, of multipliers: loss, gradients and metrics.

The references call transformers' own forward pass over each sequence alone, in float64. The cases have answers of very
uneven length, of one token and of none, groups of one, forks and failed episodes; dropout stands in each config.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.references.any_model import build_family, use_any_model
from tests.references.cases import CASES, episodes_of
from tests.references.comparing import assert_same
from tests.references.learning import learned, setting
from tests.references.presets import PRESETS
from tests.references.step import train_step
from tests.references.variants import VARIANTS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SAMPLE = ("gemma2", "qwen3_next")  # trees with windows and a soft cap; a padded hybrid with experts
MORE = ("gpt_oss", "granite", "jamba", "mamba2", "mixtral")
MASKED = "entropy and kl of masked tokens"


def check(family: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, kind in enumerate(("policy", "reference")):
        build_family(family, folder / kind, seed, monkeypatch)
    use_any_model(monkeypatch)
    given = setting(folder)
    choices, algorithm = VARIANTS[name] if name in VARIANTS else ({"preset": name}, PRESETS[name])
    expected = train_step(episodes_of(tuple(CASES), given.policy), algorithm, given)
    assert_same(learned(episodes_of(tuple(CASES), given.policy), choices, given, folder), expected)


@pytest.mark.parametrize("family", SAMPLE)
def test_a_step_of_a_family_is_the_references(
    family: str, tmp_path: Path, mesh: "DeviceMesh", monkeypatch: pytest.MonkeyPatch
) -> None:
    check(family, "grpo", tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("name", ["grpo", MASKED])
@pytest.mark.parametrize("family", MORE)
def test_a_step_of_further_families_is_the_references(
    family: str, name: str, tmp_path: Path, mesh: "DeviceMesh", monkeypatch: pytest.MonkeyPatch
) -> None:
    check(family, name, tmp_path, monkeypatch)
