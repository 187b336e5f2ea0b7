"""The choice of ZeRO-3 by what fits."""

import pytest
import torch

from agentrl.config.recipe import TrainerConfig
from agentrl.train.free_layers import choose, decide
from agentrl.train.mesh import RankMesh

GB = 10**9


@pytest.mark.parametrize(
    ("parameters", "ranks", "free", "width", "frees"),
    [
        (8 * GB, 8, 141 * GB, 2, False),  # 16 GB of shards, and 48 GB of whole weights and gradients
        (8 * GB, 8, 80 * GB, 2, True),
        (70 * GB, 64, 141 * GB, 2, True),
        (8 * GB, 1, 10 * GB, 4, False),  # one rank has nothing to gather
    ],
)
def test_layers_are_freed_where_whole_weights_do_not_fit(
    parameters: int, ranks: int, free: int, width: int, frees: bool
) -> None:
    choice = decide(parameters, ranks, free, width)
    assert choice.frees is frees
    assert f"auto: {str(frees).lower()}" in choice.said and f"{free / 2e9:.3g} GB" in choice.said


@pytest.mark.parametrize("asked", [True, False])
def test_what_the_recipe_says_is_done(asked: bool, mesh: object) -> None:
    device = torch.device("cpu")
    config = TrainerConfig(reshard_after_forward=asked)
    choice = choose(config, [torch.empty(10**15, device="meta")], RankMesh.of_world(device), device)
    assert choice.frees is asked and choice.said == f"trainer.reshard_after_forward={str(asked).lower()}"
