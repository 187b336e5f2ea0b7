"""Sharded loading without ranks: what it does to a model, and when a model is loaded whole."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from agentrl.config.mesh import MeshShape
from agentrl.config.recipe import TrainerConfig
from agentrl.train.mesh import RankMesh
from agentrl.train.sharded_loading import loads_whole, sum_gradients

FOUR = RankMesh(MeshShape(shards=4), "cpu", 0)


def test_gradients_of_several_micro_batches_are_each_summed_over_the_heads_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two ranks with the same heads: their sum is twice the gradient of one."""
    plain, summed = Qwen3RMSNorm(4), Qwen3RMSNorm(4)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(2))
    sum_gradients(summed, None)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        states: Tensor = torch.randn(2, 4, generator=generator)
        assert torch.equal(plain(states), summed(states))
        plain(states).square().sum().backward()
        summed(states).square().sum().backward()
    assert plain.weight.grad is not None and summed.weight.grad is not None
    assert torch.allclose(summed.weight.grad, 2 * plain.weight.grad)


def test_a_model_is_loaded_whole_only_with_a_reason(tiny_model: Path, tmp_path: Path) -> None:
    assert loads_whole(tiny_model, TrainerConfig(), FOUR) is None
    assert loads_whole(tiny_model, TrainerConfig(lora_rank=4), FOUR) is None
    assert "one rank" in str(loads_whole(tiny_model, TrainerConfig(), RankMesh(MeshShape(), "cpu", 0)))
    assert "cpu_offload" in str(loads_whole(tiny_model, TrainerConfig(cpu_offload=True), FOUR))
    assert "safetensors" in str(loads_whole(tmp_path, TrainerConfig(), FOUR))


@pytest.mark.parametrize("rank", range(24))
def test_neighbors_are_of_one_tensor_group_then_of_one_context_group(rank: int) -> None:
    mesh = RankMesh(MeshShape(replicas=2, shards=2, context=3, tensor=2), "cpu", rank)
    assert (mesh.tensor_rank, mesh.context_rank) == (rank % 2, rank // 2 % 3)
    (data,) = [number for number in range(mesh.shape.data) if rank in mesh.with_rows(number)]
    assert data == rank // 6 and mesh.averaged == 12
