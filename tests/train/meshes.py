"""The same training on several meshes of forked ranks.

``python -m tests.train.meshes FOLDER NAME...`` trains the models in ``FOLDER`` for three steps on each named mesh and
writes the weights to ``FOLDER/NAME.safetensors``, and the metrics of each step to ``FOLDER/NAME.json``. A name
``kind:a->b`` makes the third step on ``b``, from the checkpoint that ``kind:a`` saved after two.
"""

import json
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl.bench.made_batch import made_batch
from agentrl.config.mesh import mesh_shape
from agentrl.config.recipe import Recipe
from agentrl.core.weight_manifest import fingerprint
from agentrl.train.__main__ import make_critic, make_policy
from agentrl.train.checkpoint import load_checkpoint
from agentrl.train.export import export_model, exported_weights
from agentrl.train.learner import PolicyLearner
from agentrl.train.lora import BasePolicy
from agentrl.train.mesh import RankMesh
from agentrl.weights.file_publisher import WeightPublisher
from agentrl.weights.gather import Weight, full_tensor
from tests.tiny import build_tiny_model, build_tiny_tokenizer
from tests.train.ranks import on_ranks
from tests.train.saved import save_whole
from tests.train.test_rows import random_sequences

CPU = torch.device("cpu")
RATE = 1e-2
Names = dict[str, Any]
MESHES: dict[str, tuple[int, Names]] = {
    "1": (1, {}),
    "2": (2, {}),
    "zero3": (2, {"reshard_after_forward": True}),
    "hsdp": (4, {"replicas": 2}),
    "hsdp_zero3": (4, {"replicas": 2, "reshard_after_forward": True}),
    "tp": (2, {"tensor_parallel": 2}),
    "fsdp_tp": (4, {"tensor_parallel": 2}),
    "cp": (2, {"context_parallel": 2}),
    "fsdp_cp": (4, {"context_parallel": 2}),
    "ep": (2, {"expert_parallel": 2}),
    "fsdp_tp_ep": (4, {"tensor_parallel": 2, "expert_parallel": 4}),
    "hsdp_cp_tp": (8, {"replicas": 2, "context_parallel": 2, "tensor_parallel": 2}),
}
# What is trained: the model's folder and more keys of the trainer.
KINDS: dict[str, tuple[str, Names]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "sequences": ("llama", {"preset": "gspo"}),
    "critic": ("llama", {"advantage": "gae", "scale_rewards": "none", "kl_coef": 0.1, "critic_learning_rate": 1e-3}),
    "moe": ("moe", {}),
    "lora": ("llama", {"lora_rank": 4, "kl_coef": 0.1}),
    "balanced": ("moe", {"router_aux_loss": 0.5, "tokens_per_microbatch": 1}),  # each row is a micro-batch of its own
    "balanced_sequences": ("moe", {"preset": "gspo", "router_aux_loss": 0.5, "tokens_per_microbatch": 1}),
}


def build_models(folder: Path) -> None:
    """Writes the models to train: a tied Llama, a Qwen3 with norms of its heads, and a Qwen3 of experts."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    build_tiny_model(folder / "llama")
    sizes = {
        "vocab_size": 270, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=False)).save_pretrained(folder / "qwen3")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    for name in ("qwen3", "moe"):
        build_tiny_tokenizer(folder / name)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, tie_word_embeddings=True)).save_pretrained(folder / "moe")


def recipe_of(folder: Path, ranks: int, choices: Names) -> Recipe:
    trainer = {
        "nproc": ranks, "dtype": "float32", "tokens_per_microbatch": 60, "logprob_chunk": 16, "adam_epsilon": 1e-3,
        "learning_rate": RATE, "attention": "packed", **choices,
    }  # fmt: skip
    sections = {"inference": {"context_length": 64}, "sampling": {"temperature": 0.8, "max_new_tokens": 16}}
    return Recipe.model_validate(
        {"model": {"name": str(folder)}, "env": {"id": "unused"}, "trainer": trainer, **sections}
    )


def engine_of(recipe: Recipe, folder: Path) -> PolicyLearner:
    """Makes the learner as a trainer does."""
    config = recipe.trainer
    mesh = RankMesh.of_world(CPU, mesh_shape(config, dist.get_world_size()))
    policy = make_policy(recipe, folder, mesh, CPU)
    reference: Any = None
    if config.kl_coef:
        own = config.lora_rank is None
        reference = make_policy(recipe, folder, mesh, CPU).requires_grad_(False) if own else BasePolicy(policy)
    critic = make_critic(recipe, folder, mesh, CPU) if config.advantage == "gae" else None
    return PolicyLearner(policy, reference, config, CPU, critic, mesh)


def steps(engine: PolicyLearner, first: int, last: int) -> list[dict[str, float]]:
    """Runs updates on batches that depend only on the batch's number."""
    found = []
    for version in range(first, last):
        rng = random.Random(version)
        sequences = [
            replace(
                sequence, logprobs=[-4.0 + rng.gauss(0, 1) for _ in sequence.token_ids],
                advantages=[rng.gauss(0, 1) for _ in sequence.token_ids], group=index // 3,
            )
            for index, sequence in enumerate(random_sequences(version, 5))
        ]  # fmt: skip
        if engine.critic is not None:
            sequences = [
                replace(one, **{name: [rng.gauss(0, 1) for _ in one.token_ids] for name in ("values", "returns")})
                for one in sequences
            ]
        batch = made_batch(sequences, 100.0, 1.0, version=version) if dist.get_rank() == 0 else None
        found.append(engine.update(batch, RATE))
    return found


def weights(engine: PolicyLearner) -> dict[str, Tensor]:
    """Returns all weights, on every rank."""
    found = {f"policy/{name}": full_tensor(weight).clone() for name, weight in exported(engine)}
    if engine.critic is not None:
        critic = engine.critic.critic.named_parameters()
        found |= {f"critic/{name}": full_tensor(weight).clone() for name, weight in critic}
    return found


def written(engine: PolicyLearner, folder: Path, start: Path) -> None:
    """Fails if an exported model or a pushed file does not hold the weights to the bit; a collective."""
    mesh, first = engine.mesh, engine.mesh.rank == 0
    whole = {name: full_tensor(weight).clone() for name, weight in exported(engine)}
    publisher = WeightPublisher(
        exported(engine), torch.float32, "disk", folder, is_writer=first, tensor=(mesh.tensor_rank, mesh.shape.tensor)
    )
    manifest = publisher.write(1)
    if manifest is not None:
        pushed = load_file(manifest.file)
        assert all(torch.equal(pushed[name], tensor) for name, tensor in whole.items()), "another push"
        data = {name: memoryview(tensor.numpy()) for name, tensor in whole.items()}
        assert manifest.fingerprints == {name: fingerprint(one) for name, one in data.items()}
    dist.barrier()
    publisher.close()
    adapter = engine.config.lora_rank is not None
    for gather in (True, False):  # the second export of a process writes what the first did
        export_model(engine.policy, exported(engine), folder / "model", 3, start, mesh, adapter=adapter, gather=gather)
        if first:
            state = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
            assert all(torch.equal(state[name], tensor) for name, tensor in whole.items()), "another export"
            assert "distributed_config" not in (folder / "model" / "config.json").read_text()
        dist.barrier()


def exported(engine: PolicyLearner) -> list[tuple[str, Weight]]:
    """Returns the plain model's weights."""
    return exported_weights(engine.policy.model, adapter=engine.config.lora_rank is not None)


def train(folder: Path, name: str) -> None:
    """Trains on a mesh, or goes on with the checkpoint of another, which is trained first if it was not."""
    kind, _, meshes = name.partition(":")
    first, _, second = meshes.partition("->")
    saved = folder / f"saved-{kind}-{first}"
    if not saved.is_dir():
        on_ranks(MESHES[first][0], partial(_train, folder, f"{kind}:{first}", saved))
    if second:
        on_ranks(MESHES[second][0], partial(_go_on, folder, name, second, saved / "step-000002"))


def _train(folder: Path, name: str, saved: Path, rank: int) -> None:
    """Makes three steps, and saves after two of them."""
    engine = _engine(folder, name, name.partition(":")[2])
    metrics = steps(engine, 0, 2)
    save_whole(saved, 2, engine, {})
    _end(folder, name, engine, metrics + steps(engine, 2, 3))


def _go_on(folder: Path, name: str, mesh: str, checkpoint: Path, rank: int) -> None:
    """Makes the third step from a checkpoint."""
    engine = _engine(folder, name, mesh)
    load_checkpoint(checkpoint, engine)
    _end(folder, name, engine, steps(engine, 2, 3))


def _engine(folder: Path, name: str, mesh: str) -> PolicyLearner:
    (model, choices), (ranks, more) = KINDS[name.partition(":")[0]], MESHES[mesh]
    return engine_of(recipe_of(folder / model, ranks, choices | more), folder / model)


def _end(folder: Path, name: str, engine: PolicyLearner, metrics: list[dict[str, float]]) -> None:
    """Compares what is written with the weights, and leaves weights and metrics for the test."""
    found = weights(engine)
    written(engine, folder / f"written-{name}", folder / KINDS[name.partition(":")[0]][0])
    if dist.get_rank() == 0:
        save_file(found, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(metrics))


def main(folder: str, *names: str) -> None:
    torch.set_num_threads(1)
    if not (Path(folder) / "moe").is_dir():
        build_models(Path(folder))
    for name in names:
        print(name, flush=True)
        train(Path(folder), name)


if __name__ == "__main__":
    main(*sys.argv[1:])
