"""Makes a policy with the trial of a first update, on one of several ranks.

``python -m tests.train.trying MODEL STORE RANK RANKS OUT`` writes what it came to, as ``OUT/RANK.json``.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from agentrl.config.load import load_recipe
from agentrl.launch.resolve import resolve
from agentrl.train.__main__ import make_policy
from agentrl.train.mesh import RankMesh
from agentrl.train.policy import ModelRefused
from agentrl.train.row_attention import is_packed


def main(model: str, store: str, rank: str, ranks: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks))
    mesh = RankMesh.of_world(torch.device("cpu"))
    found: dict[str, object] = {}
    for attention in ("auto", "packed"):
        chosen = ["inference.context_length=32", f"trainer.attention={attention}"]
        recipe = resolve(load_recipe("arithmetic_grpo", chosen, device="cpu"), None)
        try:
            policy = make_policy(recipe, Path(model), mesh, torch.device("cpu"))
            found[attention] = is_packed(policy.model)
        except ModelRefused as error:
            found[attention] = str(error)
    (Path(out) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
