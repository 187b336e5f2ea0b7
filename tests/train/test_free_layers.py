"""The choice of ZeRO-3 by what fits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from agentrl.config.recipe import TrainerConfig
from agentrl.train.free_layers import choose, decide
from agentrl.train.mesh import RankMesh
from agentrl.train.policy import accumulate, shard
from tests.end_to_end import ROOT

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


@pytest.mark.parametrize(("expert", "replicas"), [(2, 1), (2, 2)])
def test_experts_that_ranks_share_count_as_they_lie(expert: int, replicas: int, tmp_path: Path) -> None:
    """An expert is on fewer ranks than the rest; of the four ranks, ``expert`` hold different ones."""
    command = [sys.executable, "-m", "tests.train.shared_experts", str(tmp_path), str(expert), str(replicas)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    whole, own = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    sizes = {name: tensor.numel() for name, tensor in load_file(tmp_path / "moe" / "model.safetensors").items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    others = sum(sizes.values()) - experts
    assert whole == others + experts / expert
    assert own == others / (4 // replicas) + experts / (4 // replicas)


class Layered(nn.Module):
    """What is sharded of a policy: a model that names its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        self.model._no_split_modules = {"Linear"}  # type: ignore[assignment]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)


def test_copies_with_freed_layers_sum_their_gradients_once_an_update(
    mesh: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards are reduced in each micro-batch, the network between copies carries them once."""
    torch.manual_seed(0)
    policy, inputs = Layered(), torch.randn(3, 2, 3)
    plain = [parameter.detach().clone() for parameter in policy.parameters()]
    shard(policy, init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "fsdp")), torch.float32,
          free_layers=True)  # fmt: skip
    summed, own = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *args, **how: summed.append(own(tensor, *args, **how)))
    for number, one in enumerate(inputs):
        accumulate(policy, last=number == 2)
        policy(one).square().sum().backward()
    assert len(summed) == 2, "once for each layer"
    weights = [weight.requires_grad_() for weight in plain]
    (inputs @ weights[0].T @ weights[1].T).square().sum().backward()
    for found, weight in zip(policy.parameters(), weights, strict=True):
        assert torch.allclose(found.grad.full_tensor(), weight.grad, rtol=1e-5)  # type: ignore[union-attr]
