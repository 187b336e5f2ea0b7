"""A rank of :mod:`agentrl.bench.bench_gpu_mesh`: ``torchrun --module agentrl.bench.gpu_mesh_side FOLDER``.

It reads ``FOLDER/task.json`` and writes its measurements to ``FOLDER/RANK.json``.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agentrl.bench.bench_gpu_mesh import OUT_OF_MEMORY
from agentrl.bench.gpu_sides import Size, make_batch, make_model, measured, save_tokenizer
from agentrl.bench.model_flops import Work, update_flops
from agentrl.config.mesh import mesh_shape
from agentrl.config.recipe import Recipe
from agentrl.train.__main__ import make_policy
from agentrl.train.learner import PolicyLearner
from agentrl.train.mesh import RankMesh

WARM_UP = 2  # updates
RATE = 1e-6


def recipe_of(size: Size, mesh: dict[str, int], ranks: int, device: str) -> Recipe:
    """Returns the recipe of a training with recomputed layers; ranks that share rows share their tokens too."""
    trainer = {
        "nproc": ranks, "dtype": "bfloat16" if device == "cuda" else "float32", "attention": "packed",
        "tokens_per_microbatch": size.tokens // mesh.get("context_parallel", 1), "logprob_chunk": size.chunk,
        "gradient_checkpointing": True, **mesh,
    }  # fmt: skip
    length = size.prompt + size.answer + size.spread
    sections = {"inference": {"context_length": length}, "sampling": {"max_new_tokens": size.answer + size.spread}}
    sections["rollout"] = {"batch_size": size.groups, "group_size": size.members}
    return Recipe.model_validate({"model": {"name": "random"}, "env": {"id": "unused"}, "trainer": trainer, **sections})


def measure(size: Size, mesh: dict[str, int], device: torch.device, repeats: int, folder: Path) -> dict[str, Any]:
    """Loads the model onto the mesh and times updates; a collective."""
    model = folder / "model"
    if dist.get_rank() == 0:
        save_tokenizer(model)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        make_model(size, device).to(dtype).save_pretrained(model)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    recipe = recipe_of(size, mesh, dist.get_world_size(), device.type)
    ranks = RankMesh.of_world(device, mesh_shape(recipe.trainer, dist.get_world_size()))
    policy = make_policy(recipe, model, ranks, device)
    learner = PolicyLearner(policy, None, recipe.trainer, device, None, ranks)
    batch = make_batch(size)
    work = Work.of(batch, size.tokens)
    seconds, peak = [], 0.0
    for repeat in range(WARM_UP + repeats):
        dist.barrier()
        with measured(device) as found:
            metrics = learner.update(batch if ranks.rank == 0 else None, RATE)
        if metrics["train/skipped"]:
            raise RuntimeError("the update was skipped: its gradient is not finite")
        if repeat >= WARM_UP:
            seconds.append(found["seconds"])
            peak = max(peak, found["peak_gib"])
    flops = update_flops(make_model(size, torch.device("meta")), work)
    return {"seconds": seconds, "peak_gib": peak, "flops": flops, "tokens": work.tokens}


def main(folder: Path) -> None:
    """Runs the task as one rank of torchrun."""
    task = json.loads((folder / "task.json").read_text())
    rank, cuda = int(os.environ["LOCAL_RANK"]), task["device"] == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"  # as a trainer's: batches are sent between CPUs
    dist.init_process_group(backend, timeout=timedelta(minutes=30))
    size = Size(**{**task["size"], "decode": tuple(task["size"]["decode"])})
    try:
        found = measure(size, task["mesh"], device, task["repeats"], folder)
    except torch.OutOfMemoryError:
        (folder / OUT_OF_MEMORY).touch()
        raise
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
