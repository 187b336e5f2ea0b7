"""Holds three steps with a reference policy that moves to float64: it starts elsewhere, and follows after each step."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from agentrl.weights.gather import full_tensor
from tests.references.cases import episodes_of
from tests.references.comparing import assert_same
from tests.references.learning import engine_of, recipe_of, setting, stepped
from tests.references.llama import weights_of
from tests.references.losses import Kl, k2
from tests.references.presets import GROUP, PPO_CLIP
from tests.references.step import Algorithm, train_step

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

KL = Algorithm(GROUP, PPO_CLIP, "sequence", kl=Kl(0.1, k2, "plain"))
RATE = 0.01


@pytest.mark.parametrize(
    ("choices", "kept"),
    [
        ({"reference": "ema", "reference_decay": 0.7}, [0.7, 0.7, 0.7]),
        ({"reference": "reset", "reference_every": 2}, [0.0, 1.0, 0.0]),  # versions 4, 5 and 6 after the steps
        ({"reference": "frozen"}, [1.0, 1.0, 1.0]),
    ],
    ids=["ema", "reset", "frozen"],
)
def test_a_reference_follows_after_each_step(
    choices: dict[str, object], kept: list[float], models: Path, mesh: "DeviceMesh"
) -> None:
    given = replace(setting(models), rate=RATE)
    episodes = episodes_of(["complete"], given.policy)
    recipe = recipe_of(given, {"kl_coef": 0.1, "kl_estimator": "k2", "kl_gradient": "plain", **choices})
    engine = engine_of(recipe, given)
    policy, reference = weights_of(given.policy), weights_of(given.reference)
    for step, keep in enumerate(kept):
        now = replace(given, version=given.version + step)
        expected = train_step(episodes, KL, now, policy, reference)
        assert_same(stepped(episodes, recipe, engine, now, models), expected)
        with torch.no_grad():
            reference = {key: keep * weight + (1 - keep) * policy[key] for key, weight in reference.items()}
        assert engine.reference is not None
        for key, weight in engine.reference.model.named_parameters():  # type: ignore[union-attr]
            torch.testing.assert_close(full_tensor(weight).double(), reference[key].detach(), atol=1e-6, rtol=0)
