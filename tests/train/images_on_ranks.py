"""The same update with images on one rank and on two, one of which has micro-batches without images.

``python -m tests.train.images_on_ranks FOLDER COLUMNS OUT RANKS`` makes one update of the model in ``FOLDER`` with the
episodes in the file ``COLUMNS``, and writes the weights to the file ``OUT``.
"""

import importlib.util
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.train.ranks import on_ranks

if importlib.util.find_spec("torchvision") is not None:  # before transformers
    import tests.cpu_torchvision  # noqa: F401

CPU = torch.device("cpu")
SETTINGS = [
    "inference.context_length=400", "trainer.dtype=float32", "trainer.tokens_per_microbatch=40",
    "trainer.adam_epsilon=1e-3", "rollout.batch_size=1", "rollout.group_size=7",
]  # fmt: skip


def update(folder: Path, columns: Path, out: Path) -> None:
    """Makes one update on this rank."""
    from agentrl.config.load import load_recipe
    from agentrl.core.columns import Columns
    from agentrl.launch.resolve import resolve
    from agentrl.train.__main__ import make_policy
    from agentrl.train.batch import Batch
    from agentrl.train.learner import PolicyLearner
    from agentrl.train.mesh import RankMesh
    from agentrl.weights.gather import full_tensor

    ranks = dist.get_world_size()
    recipe = resolve(load_recipe("arithmetic_grpo", [*SETTINGS, f"trainer.nproc={ranks}"], device="cpu"), None)
    mesh = RankMesh.of_world(CPU)
    policy = make_policy(recipe, folder, mesh, CPU)
    learner = PolicyLearner(policy, None, recipe.trainer, CPU, None, mesh)
    batch = None
    if not mesh.rank:
        read, _ = Columns.from_bytes(columns.read_bytes())
        batch = Batch(read, recipe.trainer, recipe.reward).train_batch()
    learner.update(batch, 1e-2)
    weights = {name: full_tensor(parameter).clone() for name, parameter in policy.model.named_parameters()}
    if not mesh.rank:
        torch.save(weights, out)


if __name__ == "__main__":
    folder, columns, out = map(Path, sys.argv[1:4])
    on_ranks(int(sys.argv[4]), lambda rank: update(folder, columns, out))
