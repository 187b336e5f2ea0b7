"""Training steps with an adapter, the same in the test's process and on ranks of their own.

``python -m tests.train.adapting MODEL STORE RANK RANKS OUT`` runs each of :data:`VARIANTS` on one of several ranks.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.bench.made_batch import made_batch
from agentrl.config.recipe import TrainerConfig
from agentrl.train.learner import PolicyLearner
from agentrl.train.lora import BasePolicy, add_adapter
from agentrl.train.policy import Policy, load_model, shard
from agentrl.weights.gather import full_tensor
from agentrl.weights.lora_weights import plain_weights
from tests.train.test_rows import random_sequences

CPU = torch.device("cpu")
RATE = 1e-2
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "lora_kl": {**LORA, "kl_coef": 0.1, "gradient_checkpointing": True},
    "decoupled": {"preset": "decoupled", "minibatches": 2},
    "selected": {
        "clip_cov": 0.1, "clip_cov_low": 0.1, "token_mask_low": 0.1, "reject_by": "geometric", "reject_low": 0.2,
        "proximal": "recomputed", "minibatches": 2,
    },
    "kl_cov": {"preset": "kl_cov", "kl_cov": 0.2, "m2_threshold": 3.0},
}  # fmt: skip


def make_engine(folder: Path, mesh: DeviceMesh, choices: dict[str, Any], *, offload: bool = False) -> PolicyLearner:
    """Makes a learner that is sharded with FSDP2 for any number of ranks."""
    given = {"tokens_per_microbatch": 60, "logprob_chunk": 16, "adam_epsilon": 1e-3, **choices}
    config = TrainerConfig.model_validate(given)
    model = load_model(folder, gradient_checkpointing=config.gradient_checkpointing)
    if config.lora_rank is not None:
        add_adapter(model, config, seed=3, base="tiny")
    policy = Policy(model, 0.8, config.logprob_chunk)
    shard(policy, mesh, torch.float32, offload=offload)
    return PolicyLearner(policy, BasePolicy(policy) if config.kl_coef else None, config, CPU)


def steps(engine: PolicyLearner, first: int, last: int) -> None:
    """Runs updates on batches that depend only on the batch's number."""
    for version in range(first, last):
        rng = random.Random(version)
        sequences = [
            replace(
                sequence, logprobs=[-4.0 + rng.gauss(0, 1) for _ in sequence.token_ids],
                advantages=[rng.gauss(0, 1) for _ in sequence.token_ids], group=index // 3,
            )
            for index, sequence in enumerate(random_sequences(version, 6))
        ]  # fmt: skip
        engine.update(made_batch(sequences, 100.0, 1.0, version=version), RATE)


def weights(engine: PolicyLearner) -> dict[str, Tensor]:
    """Returns all weights under the plain model's names."""
    return {name: full_tensor(weight).clone() for name, weight in plain_weights_of(engine)}


def plain_weights_of(engine: PolicyLearner) -> Any:
    model = engine.policy.model
    return model.named_parameters() if engine.config.lora_rank is None else plain_weights(model)


def main(model: str, store: str, rank: str, ranks: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    mesh = init_device_mesh("cpu", (int(ranks),))
    for name, choices in VARIANTS.items():
        engine = make_engine(Path(model), mesh, choices)
        steps(engine, 0, 3)
        found = weights(engine)
        if int(rank) == 0:
            save_file(found, Path(out) / f"{name}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
