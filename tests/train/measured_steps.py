"""Trainer steps on a batch of several groups, ages and signals, in processes of one rank or of two."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM

from agentrl.bench.made_batch import TrainSequence, made_batch
from agentrl.config.recipe import TrainerConfig
from agentrl.train.batch import TrainBatch
from agentrl.train.learner import PolicyLearner
from agentrl.train.policy import Policy, load_model, reshard, shard
from agentrl.train.row_attention import choose_attention

CPU = torch.device("cpu")
TEMPERATURE = 0.8
VERSION = 4
GROUPS, MEMBERS, PROMPT = 4, 3, 5
Step = tuple[dict[str, float], Tensor]


def plain(folder: Path, sequences: list[TrainSequence]) -> list[list[tuple[float, float]]]:
    """Computes float64 logprobs and entropies of each sequence's trained tokens, one forward pass a sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder).double()
    found = []
    for s in sequences:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([list(s.token_ids)]), use_cache=False).logits[0] / TEMPERATURE
        logprobs = logits.log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        at = [i for i, m in enumerate(s.loss_mask) if m]
        found.append([(logprobs[i - 1, s.token_ids[i]].item(), entropies[i - 1].item()) for i in at])
    return found


@cache
def make_sequences(folder: Path, spread: float, ages: tuple[int, ...] = (0, 1, 3)) -> list[TrainSequence]:
    """Makes groups of answers of several ages; ``spread`` moves logprobs off the model's, a tenth of it at age 0."""
    rng = random.Random(3)
    sequences = []
    for group in range(GROUPS):
        prompt = [rng.randint(3, 200) for _ in range(PROMPT)]
        for _ in range(MEMBERS):
            answer = [rng.randint(3, 200) for _ in range(rng.randint(3, 8))]
            count = PROMPT + len(answer)
            versions = [VERSION - rng.choice(ages)] * count
            mask = [0] * PROMPT + [1] * len(answer)
            sequences.append(
                TrainSequence([*prompt, *answer], mask, (), [rng.gauss(0, 1)] * count, versions=versions, group=group)
            )
    return [
        replace(
            s,
            logprobs=[0.0] * PROMPT
            + [v + rng.gauss(0, spread if s.versions[0] < VERSION else spread / 10) for v, _ in values],
        )
        for s, values in zip(sequences, plain(folder, sequences), strict=True)
    ]


def make_batch(sequences: list[TrainSequence], idle: tuple[int, ...], version: int = VERSION) -> TrainBatch:
    """Makes a batch whose groups ``idle`` have no advantage."""
    level = [replace(s, advantages=()) if s.group in idle else s for s in sequences]
    batch = made_batch(level, 50.0, 1 - len(idle) / GROUPS, version)
    return replace(
        batch,
        branches=[b for b in batch.branches if b.group not in idle],
        idle=[b for b in batch.branches if b.group in idle],
    )


def make_learner(folder: Path, mesh: DeviceMesh, choices: dict[str, Any]) -> PolicyLearner:
    """Makes a learner of the tiny model, sharded over the mesh."""
    config = TrainerConfig.model_validate({"logprob_chunk": 16, "learning_rate": 1e-2, **choices})
    model = load_model(folder)
    choose_attention(model, config, CPU)
    policy = Policy(model, TEMPERATURE, 16)
    shard(policy, mesh, torch.float32)
    return PolicyLearner(policy, None, config, CPU)


def parameters(engine: PolicyLearner) -> Tensor:
    """Returns all parameters of a policy as one vector; a collective."""
    reshard(engine.policy)
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in engine.policy.parameters()]
    return torch.cat([p.detach().flatten().clone() for p in full])


def step(
    folder: Path, mesh: DeviceMesh, choices: dict[str, Any], spread: float = 0.3, idle: tuple[int, ...] = (0,),
    ages: tuple[int, ...] = (0, 1, 3),
) -> Step:  # fmt: skip
    """Makes one trainer step; returns its metrics and the parameters after it."""
    engine = make_learner(folder, mesh, choices)
    batch = make_batch(make_sequences(folder, spread, ages), idle) if dist.get_rank() == 0 else None
    metrics = engine.update(batch, 1e-2)
    return metrics, parameters(engine)


def steps_of_two_ranks(folder: Path, place: Path, cases: list[dict[str, Any]]) -> list[list[Step]]:
    """Returns the steps of each of two ranks, one step for each case."""
    spawn(_rank, (folder, place, cases), nprocs=2)
    return [torch.load(place / f"rank-{rank}.pt") for rank in range(2)]


def _rank(rank: int, folder: Path, place: Path, cases: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.save([step(folder, mesh, **case) for case in cases], place / f"rank-{rank}.pt")
    dist.destroy_process_group()
