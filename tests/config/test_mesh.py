"""Keys of the device mesh: what the ranks cannot fill, and models that cannot be split."""

from typing import Any

import pytest

from agentrl.config.errors import ConfigError
from agentrl.config.load import load_recipe
from agentrl.config.mesh import ONE_RANK, MeshConfig, MeshShape, check_mesh, mesh_shape


@pytest.mark.parametrize(
    ("keys", "ranks", "shape"),
    [
        ({}, 6, MeshShape(shards=6)),
        ({"replicas": 2}, 4, MeshShape(replicas=2, shards=2)),
        ({"context_parallel": 2, "tensor_parallel": 3}, 24, MeshShape(shards=4, context=2, tensor=3)),
        ({"tensor_parallel": 2, "expert_parallel": 4}, 4, MeshShape(shards=2, tensor=2, expert=4)),
    ],
)
def test_shards_are_what_the_other_sizes_leave(keys: dict[str, int], ranks: int, shape: MeshShape) -> None:
    found = mesh_shape(MeshConfig(**keys), ranks)
    assert found == shape and found.size == ranks


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["trainer.tensor_parallel=4", "trainer.nproc=6"], r"tensor_parallel=4 = 4 does not divide the 6 ranks"),
        (["trainer.replicas=2", "trainer.context_parallel=2", "trainer.nproc=2"], r"replicas=2 \* .*=2 = 4 does not"),
        (["trainer.expert_parallel=3", "trainer.nproc=4"], r"expert_parallel=3 must .* divide the 4 ranks"),
        (["trainer.expert_parallel=2", "trainer.tensor_parallel=4", "trainer.nproc=4"], r"must be a multiple"),
        (["trainer.context_parallel=2", "trainer.nproc=2", "trainer.attention=padded"], r"attention=padded has none"),
        (["trainer.tensor_parallel=2", "trainer.nproc=2", "trainer.lora_rank=4"], r"an adapter is not split"),
        (["trainer.tensor_parallel=2", "trainer.nproc=2", "trainer.compile=true"], r"trainer.compile=true"),
    ],
)
def test_what_cannot_be_met_is_refused_with_its_keys(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_recipe("arithmetic_grpo", settings, device="cpu")


def test_a_mesh_is_for_learning_by_acting_alone() -> None:
    with pytest.raises(ConfigError, match=r"trainer.replicas does nothing with trainer.type=sft"):
        load_recipe("gsm8k_sft", ["trainer.replicas=2", "trainer.nproc=2"], device="cpu")


def test_ranks_that_share_rows_need_no_rows_of_their_own() -> None:
    sizes = ["rollout.batch_size=1", "rollout.group_size=2", "trainer.nproc=4"]
    assert load_recipe("arithmetic_grpo", [*sizes, "trainer.context_parallel=2"], device="cpu").trainer.ranks == 4
    with pytest.raises(ConfigError, match="is larger than"):
        load_recipe("arithmetic_grpo", sizes, device="cpu")


@pytest.mark.parametrize(
    ("keys", "model", "said"),
    [
        ({"tensor_parallel": 2}, {"num_attention_heads": 9, "num_key_value_heads": 3}, "num_attention_heads=9"),
        ({"tensor_parallel": 4}, {"num_attention_heads": 8, "num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"tensor_parallel": 2}, {"text_config": {"num_attention_heads": 3}}, "num_attention_heads=3"),
        ({"expert_parallel": 2}, {"num_attention_heads": 4}, "has no experts"),
        ({"expert_parallel": 3}, {"num_experts": 4}, "4 experts"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_with_its_numbers(
    keys: dict[str, int], model: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_mesh(MeshConfig(**keys), model)


def test_one_rank_computes_again_what_any_mesh_did() -> None:
    asked = MeshConfig(replicas=2, context_parallel=2, tensor_parallel=2, expert_parallel=4)
    assert mesh_shape(asked.model_copy(update=ONE_RANK), 1).size == 1


def test_a_model_that_can_be_split_is_taken() -> None:
    check_mesh(MeshConfig(tensor_parallel=3), {"num_attention_heads": 9, "num_key_value_heads": 3})
