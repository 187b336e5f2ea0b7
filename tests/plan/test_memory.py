"""Memory of a rank and a server, against published figures, the dry run and a model that was really updated."""

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.config.errors import ConfigError
from agentrl.config.mesh import MeshConfig
from agentrl.config.recipe import TrainerConfig
from agentrl.launch.dry_run import memory as dry_run_memory
from agentrl.launch.model_shape import model_shape
from agentrl.plan.memory import (
    GB,
    activation_bytes,
    cache_tokens,
    largest_context,
    largest_microbatch,
    server_memory,
    total,
    trainer_memory,
)
from agentrl.plan.mesh import Mesh, decided, mesh_of
from agentrl.plan.published import PUBLISHED
from agentrl.plan.times import microbatches
from agentrl.train import free_layers
from agentrl.train.optimizer import apply_gradients, make_optimizer
from tests.plan.planned import LLAMA_8B, SMOL, case_for, known_for


def named(items, words: str) -> float:
    (found,) = [item.nbytes for item in items if words in item.what]
    return found


def test_adamw_in_float32_takes_16_bytes_a_parameter() -> None:
    """Rajbhandari et al. 2020 (ZeRO), section 3.1, counts 16 for mixed precision: 2 + 2 + 12; ours is 4 + 4 + 8."""
    case = case_for(LLAMA_8B)
    items = trainer_memory(case.recipe, case.decoder, Mesh(), case.known)
    states = sum(item.nbytes for item in items if item.what in ("parameters", "gradients", "AdamW's two moments"))
    assert states == 16 * case.decoder.parameters
    assert states / GB == pytest.approx(128.5, rel=0.001)


def test_states_are_those_of_a_model_that_was_updated() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32)
    optimizer = make_optimizer(model.parameters(), TrainerConfig(), 1e-3)
    model(torch.randn(4, 64)).sum().backward()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    apply_gradients(optimizer, 1.0)
    moments = sum(
        value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim() > 0
    )  # fmt: skip
    count = sum(p.numel() for p in model.parameters())
    assert sum(p.nbytes for p in model.parameters()) + gradients + moments == 16 * count


def test_the_peak_of_the_measured_run_is_met() -> None:
    """docs/performance.md, Zen 4: `memory_vs_trl`, 4.0 GiB at its peak, bfloat16, two groups in a micro-batch."""
    case = case_for(SMOL, "trainer.tokens_per_microbatch=1610", "trainer.kl_coef=0", gpu="cpu")
    items = trainer_memory(case.recipe, case.decoder, Mesh(), case.known, updates=2)
    assert total(items) / 2**30 == pytest.approx(4.0, rel=0.1)
    assert named(items, "activations") / GB == pytest.approx(0.7, rel=0.1)


def test_one_rank_takes_what_the_dry_run_says() -> None:
    case = case_for("Qwen/Qwen2.5-1.5B-Instruct", "inference.engine=embedded", "weights.transport=disk")
    theirs = dry_run_memory(case.recipe, model_shape(PUBLISHED["Qwen/Qwen2.5-1.5B-Instruct"]))
    sums = {name: sum(i.nbytes for i in theirs if i.process == name) for name in ("trainer rank", "server")}
    rank = trainer_memory(case.recipe, case.decoder, Mesh(), case.known)
    beyond = named(rank, "output head") + named(rank, "reserve_gb")  # which the dry run leaves out
    assert total(rank) - beyond == pytest.approx(sums["trainer rank"], rel=1e-6)
    server = server_memory(case.recipe, case.decoder, 1, case.known, 1, 1)
    assert total(server) - named(server, "reserve_gb") == pytest.approx(sums["server"], rel=1e-6)


def test_shards_share_states_and_gather_the_whole_model() -> None:
    case = case_for(LLAMA_8B)
    items = trainer_memory(case.recipe, case.decoder, Mesh(shards=8), case.known, updates=2)
    count = case.decoder.parameters
    assert named(items, "moments") == count
    assert named(items, "gathered") == 2 * count
    assert named(items, "summed over micro-batches") == 4 * count
    once = trainer_memory(case.recipe, case.decoder, Mesh(shards=8), case.known, updates=1)
    assert not [item for item in once if "summed over" in item.what], "one micro-batch is reduced at once"


def test_resharding_gathers_two_layers_alone() -> None:
    case = case_for(LLAMA_8B)
    whole, freed = (
        trainer_memory(case.recipe, case.decoder, Mesh(shards=8, reshard=on), case.known) for on in (False, True)
    )
    layer = (case.decoder.parameters - 2 * case.decoder.head) / 32
    assert named(freed, "two layers") == pytest.approx(2 * (2 * layer + 2 * case.decoder.head))
    assert total(whole) - total(freed) == pytest.approx(6 * case.decoder.parameters - named(freed, "two layers"))


def test_replicas_do_not_shard() -> None:
    case = case_for(LLAMA_8B)
    hybrid = trainer_memory(case.recipe, case.decoder, Mesh(replicas=2, shards=4), case.known)
    assert named(hybrid, "moments") == 2 * case.decoder.parameters


def test_an_adapter_freezes_the_rest() -> None:
    case = case_for(LLAMA_8B, "trainer.lora_rank=16")
    items = trainer_memory(case.recipe, case.decoder, Mesh(), case.known)
    assert named(items, "frozen") == 4 * case.decoder.parameters
    assert named(items, "moments") == 8 * 16 * case.decoder.linear_sides


def test_offloaded_states_stand_in_the_hosts_memory() -> None:
    case = case_for(LLAMA_8B, "trainer.cpu_offload=true")
    items = trainer_memory(case.recipe, case.decoder, Mesh(shards=8), case.known)
    assert sum(item.nbytes for item in items if item.host) == 2 * case.decoder.parameters
    assert total(items) < sum(item.nbytes for item in items)


def test_the_largest_micro_batch_fills_the_card() -> None:
    case, mesh = case_for(LLAMA_8B), Mesh(shards=16)
    most = largest_microbatch(case.recipe, case.decoder, mesh, case.known)
    full = total(trainer_memory(case.recipe, case.decoder, mesh, case.known, most))
    assert 0 <= 80 * GB - full < activation_bytes(case.recipe, case.decoder, mesh)
    assert not largest_microbatch(case.recipe, case.decoder, Mesh(), case.known), "states alone are too large"


def test_a_micro_batch_has_the_recipes_tokens_for_each_rank_that_shares_them() -> None:
    case = case_for(LLAMA_8B)
    one, two = (trainer_memory(case.recipe, case.decoder, Mesh(shards=8, context=each), case.known) for each in (1, 2))
    assert named(one, "activations") == named(two, "activations")
    assert microbatches(case, Mesh(shards=2, context=4)) == microbatches(case, Mesh(shards=8))


def test_context_ranks_share_the_tokens_of_a_row() -> None:
    case = case_for(LLAMA_8B)
    one, two = (activation_bytes(case.recipe, case.decoder, Mesh(shards=8, context=each)) for each in (1, 2))
    assert one == 2 * two


def test_a_cache_holds_what_the_weights_leave() -> None:
    """Llama 3.1 8B: 128 KiB of keys and values a token in bfloat16 (32 layers x 8 heads x 128 x 2 x 2)."""
    case = case_for(LLAMA_8B)
    room = 0.88 * 80e9 - 2 * case.decoder.parameters - 4e9
    assert cache_tokens(case.recipe, case.decoder, 1, case.known) == int(room / 131072)
    both = cache_tokens(case.recipe, case.decoder, 2, case.known)
    assert both == pytest.approx((2 * (0.88 * 80e9 - 4e9) - 2 * case.decoder.parameters) / 131072, abs=1)


def test_the_largest_context_names_what_sets_it() -> None:
    case = case_for(LLAMA_8B)
    mesh = Mesh(shards=64)
    roomy = known_for(case, memory_gb=1000)
    assert largest_context(case.recipe, case.decoder, mesh, 1, roomy) == (
        131072, "max_position_embeddings of the model",
    )  # fmt: skip
    assert "micro-batch" in largest_context(case.recipe, case.decoder, mesh, 1, case.known)[1]
    tight = known_for(case, memory_gb=24)
    tokens, why = largest_context(case.recipe, case.decoder, mesh, 1, tight)
    assert tokens == cache_tokens(case.recipe, case.decoder, 1, tight) or "trainer" in why
    assert tokens < 131072


def test_a_mesh_is_what_is_left_for_shards() -> None:
    config = MeshConfig(replicas=2, context_parallel=2, tensor_parallel=2)
    assert mesh_of(config, 32) == Mesh(2, 4, 2, 2)
    assert Mesh(2, 4, 2, 2).ranks == 32 and Mesh(2, 4, 2, 2).rows == 8
    assert mesh_of(MeshConfig(expert_parallel=4, reshard_after_forward=True), 8) == Mesh(1, 8, 1, 1, True, 4)
    with pytest.raises(ConfigError, match="does not divide the 6 ranks"):
        mesh_of(MeshConfig(tensor_parallel=4), 6)


@pytest.mark.parametrize("model", [SMOL, LLAMA_8B])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(shards=4), Mesh(2, 4), Mesh(1, 2, 4), Mesh(1, 4, 1, 2), Mesh(shards=64)])
@pytest.mark.parametrize("gigabytes", [1, 4, 24, 80, 141, 192])
def test_layers_are_freed_where_the_trainer_frees_them(model: str, mesh: Mesh, gigabytes: float) -> None:
    case = case_for(model)
    found = decided(mesh, case.recipe.trainer, case.decoder, gigabytes * GB)
    head = 128256 * 4096 * 2 if model == LLAMA_8B else 49152 * 576  # which tensor ranks do not split
    parameters = round((case.decoder.parameters - head) / mesh.tensor) + head
    ranks = mesh.shards * mesh.context
    assert found.reshard == free_layers.decide(parameters, ranks, gigabytes * GB, 2).frees


@pytest.mark.parametrize("name", [LLAMA_8B, "Qwen/Qwen3-4B"])
def test_a_tensor_rank_holds_what_transformers_plan_leaves_it(name: str) -> None:
    """Parameters of a rank counted one by one: by the model's own plan, with embedding and head whole, as we split."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**PUBLISHED[name]))
    plan = {**model.tp_plan, "model.embed_tokens": "replicate", "lm_head": "replicate"}
    counts = {"split": 0, "whole": 0}
    for full, parameter in model.named_parameters():
        kind = plan.get(re.sub(r"\.\d+\.", ".*.", full.rpartition(".")[0]), "replicate")
        counts["split" if kind in ("colwise", "rowwise") else "whole"] += parameter.numel()
    sizes = case_for(name).decoder
    assert counts["whole"] == pytest.approx(sizes.embeddings, rel=1e-3), "norms are whole too, and small"
    for mesh in (Mesh(tensor=8), Mesh(shards=2, tensor=4, context=2)):
        assert mesh.whole(sizes) == pytest.approx(counts["split"] / mesh.tensor + counts["whole"], rel=1e-3)
        own = (counts["split"] / mesh.tensor + counts["whole"]) / mesh.sharing
        items = trainer_memory(case_for(name).recipe, sizes, mesh, case_for(name).known)
        assert named(items, "moments") == pytest.approx(8 * own, rel=1e-3)


def test_tensor_ranks_do_not_share_hidden_states() -> None:
    """Llama 3.1 8B, a layer: 4 hidden states; queries, keys, values and result; gate, up, activated gate, product."""
    case = case_for(LLAMA_8B, "trainer.gradient_checkpointing=false")
    split = 2 * (32 + 8) * 128 + 4 * 14336
    kept = 32 * (4 * 4096 + split / 8)
    assert activation_bytes(case.recipe, case.decoder, Mesh(tensor=8)) == 2 * kept
    again = case_for(LLAMA_8B, "trainer.gradient_checkpointing=true")
    assert activation_bytes(again.recipe, again.decoder, Mesh(tensor=8)) == 2 * (32 * 4096 + kept / 32)


def test_experts_that_ranks_share_are_not_freed() -> None:
    case = case_for("Qwen/Qwen3-30B-A3B")
    mesh = Mesh(shards=8, expert=4, reshard=True)
    items = trainer_memory(case.recipe, case.decoder, mesh, case.known)
    every = case.decoder.expert_parameters
    assert named(items, "not freed") == 2 * every / 4
    layers = case.decoder.parameters - every - 2 * case.decoder.head
    assert named(items, "two layers") == pytest.approx(2 * (2 * layers / 48 + 2 * case.decoder.head))


def test_experts_that_ranks_share_are_not_gathered() -> None:
    case = case_for("Qwen/Qwen3-30B-A3B")
    every, count = case.decoder.expert_parameters, case.decoder.parameters
    assert every == 48 * 128 * 3 * 2048 * 768, "48 layers of 128 experts, three matrices each"
    assert Mesh(shards=8, expert=4).whole(case.decoder) == count - every + every / 4
    items = trainer_memory(case.recipe, case.decoder, Mesh(shards=8, expert=4), case.known)
    assert named(items, "gathered") == pytest.approx(2 * (count - every + every / 4))
    assert named(items, "moments") == count, "the states are divided among all ranks as before"
